"""A layer of experts whose tokens are each on one rank: a row of a token visits every rank, or
every host, that has experts which it chose, and returns as what these contribute, to be summed at
home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import integers, name
from weft.kernels.experts import Experts, RoutedExperts
from weft.kernels.function import weight
from weft.kernels.weights import Weight
from weft.ops.all_gather_matmul_reduce_scatter import all_gather_matmul_reduce_scatter
from weft.ops.all_to_all_matmul_all_to_all import all_to_all_matmul_all_to_all
from weft.ops.expert_sums import add_gradients, factors
from weft.schedules import all_gather_matmul_reduce_scatter as of_hosts
from weft.schedules.peers import Hosts
from weft.world import World

OF_HOSTS = of_hosts.ALGORITHMS
"""The algorithms by which a row visits a host, whose ranks add up what their experts contribute; by
others it visits each rank.
"""


class Visits(NamedTuple):
    """The rows of a rank's tokens: their number for each part, which is a rank or a host, the token
    of each row, ordered by part, and the rows of each token (tokens, top), followed by -1. `hosts`
    has the host of each part.
    """

    counts: list[int]
    tokens: Tensor
    places: Tensor
    hosts: Sequence[int]


def check_sizes(sizes: Sequence[int], experts: Experts, world: World) -> tuple[int, ...]:
    """The numbers of experts of all ranks. Raises `ValueError` or `TypeError` unless those of this
    rank are `experts`.
    """
    found = tuple(integers(sizes, "experts_of_ranks"))
    if len(found) != world.ranks or min(found) < 0:
        raise ValueError(
            f"experts_of_ranks must be {world.ranks} numbers, one for each rank, none negative; "
            f"got {[*found]}"
        )
    first, own = sum(found[: world.rank]), found[world.rank]
    if (experts.first, experts.shape.number) != (first, own):
        raise ValueError(
            f"experts_of_ranks {[*found]} gives rank {world.rank} {own} experts from number "
            f"{first} on; got {experts}"
        )
    return found


def find(chosen: Tensor, sizes: Sequence[int], hosts: Hosts, for_hosts: bool = False) -> Visits:
    """The rows of tokens that chose these experts, of which each rank has so many: for each rank,
    or for each of the `hosts` of ranks.
    """
    chosen = chosen if chosen.stride(1) == 1 else chosen.contiguous()
    places = torch.empty(chosen.shape, dtype=torch.int64, device="cpu")
    tokens = torch.empty(chosen.numel(), 1, dtype=torch.int64, device="cpu")
    parts = [*hosts] if for_hosts else [*range(len(sizes))]
    counts = _native.find_visits(chosen, [*accumulate(sizes)], parts, places, tokens)
    host_of = [*range(len(counts))] if for_hosts else [*hosts]
    return Visits(counts, tokens[: sum(counts)], places, host_of)


def add_up(rows: Tensor, visits: Visits) -> Tensor:
    """Each token's sum of its rows: within each host in the order of the ranks, then over the hosts
    in their order, both in float32 or float64 and rounded to the dtype of the rows.
    """
    out = rows.new_empty(len(visits.places), rows.shape[1])
    dtype = getattr(_native.Dtype, name(rows.dtype))
    ends = [*accumulate(visits.counts)]
    _native.add_up_visits(rows, visits.places, ends, visits.hosts, out, dtype)
    return out


class Layer(NamedTuple):
    """The operands of a layer whose tokens are each on one rank, and the options of its call."""

    x: Tensor
    chosen: Tensor
    scores: Tensor
    experts: Experts
    sizes: Sequence[int]
    algorithm: str
    chunk_rows: int | None
    world: World
    timeout: float | None = None

    def sums(self) -> Tensor:
        """The layer of checked operands, without gradients; collective."""
        weight = self.experts.routed(self.chosen.shape[1])
        scores = factors(self.scores, self.x.dtype)

        def rows(tokens: Tensor) -> Tensor:
            return weight.rows(self.x, self.chosen, scores, tokens)

        return self._visit(rows, weight, self.x.dtype)

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x and scores, in the dtype of sums, and of both weights of this rank's
        experts; collective. Rows visit the experts again, with the gradients of their results.
        """
        x, chosen, experts = self.x, self.chosen, self.experts
        routed = RoutedExperts(experts, chosen.shape[1])
        scores, width, at = factors(self.scores, x.dtype), x.shape[1], routed.shape[0]
        for_gate_up, for_down = torch.zeros_like(experts.gate_up), torch.zeros_like(experts.down)

        def rows(tokens: Tensor) -> Tensor:
            # as wide as lets routings be aligned
            of_results = x.new_zeros(len(tokens), routed.routing_at)
            of_results[:, :width] = grad[tokens[:, 0]]
            return torch.cat((routed.rows(x, chosen, scores, tokens), of_results), 1)

        def product(rows: Tensor, out: Tensor) -> None:
            own, choices, shares = routed.split(rows[:, :at])
            for_x, for_scores = out.zero_().split((width, choices.shape[1]), 1)
            add_gradients(
                rows[:, at : at + width],
                own,
                choices,
                shares,
                experts,
                (for_x, for_scores, for_gate_up, for_down),
            )

        shape = at + routed.routing_at, width + chosen.shape[1]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        found = self._visit(rows, weight(product, shape, x.dtype), wide)
        # one operator's results share no memory
        for_x, for_scores = (
            part.clone(memory_format=torch.contiguous_format)
            for part in found.split((width, chosen.shape[1]), 1)
        )
        return for_x, for_scores, for_gate_up, for_down

    def _visit(
        self, rows: Callable[[Tensor], Tensor], weight: Weight, out_dtype: torch.dtype
    ) -> Tensor:
        """What the weights of all ranks contribute to each token, of which `rows` makes the rows of
        these tokens.
        """
        for_hosts = self.algorithm in OF_HOSTS
        visits = find(self.chosen, self.sizes, self.world.hosts, for_hosts)
        operator = all_gather_matmul_reduce_scatter if for_hosts else all_to_all_matmul_all_to_all
        back = operator(
            rows(visits.tokens),
            weight,
            input_split_sizes=visits.counts,
            out_dtype=out_dtype,
            algorithm=self.algorithm,
            chunk_rows=self.chunk_rows,
            world=self.world,
            timeout=self.timeout,
        )
        return add_up(back, visits)
