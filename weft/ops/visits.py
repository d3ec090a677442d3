"""A layer of experts whose tokens are each on one rank: a row of a token visits every rank that has
experts which it chose, and returns as what these contribute, to be summed at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name
from weft.kernels.experts import Experts, RoutedExperts
from weft.kernels.function import weight
from weft.ops.all_to_all_matmul_all_to_all import all_to_all_matmul_all_to_all
from weft.ops.arguments import check_experts_of_ranks
from weft.ops.expert_sums import add_gradients, factors
from weft.world import World


class Visits(NamedTuple):
    """The rows of a rank's tokens: their number for each rank, the token of each row, ordered by
    rank, and the rows of each token (tokens, top), followed by -1.
    """

    counts: list[int]
    tokens: Tensor
    places: Tensor


def check_sizes(sizes: Sequence[int], experts: Experts, world: World) -> tuple[int, ...]:
    """The numbers of experts of all ranks. Raises `ValueError` or `TypeError` unless those of this
    rank are `experts`.
    """
    found = check_experts_of_ranks(sizes, world)
    first, own = sum(found[: world.rank]), found[world.rank]
    if (experts.first, experts.shape.number) != (first, own):
        raise ValueError(
            f"experts_of_ranks {[*found]} gives rank {world.rank} {own} experts from number "
            f"{first} on; got {experts}"
        )
    return found


def find(chosen: Tensor, sizes: Sequence[int]) -> Visits:
    """The rows of tokens that chose these experts, of which each rank has so many."""
    chosen = chosen if chosen.stride(1) == 1 else chosen.contiguous()
    places = torch.empty(chosen.shape, dtype=torch.int64, device="cpu")
    tokens = torch.empty(chosen.numel(), 1, dtype=torch.int64, device="cpu")
    counts = _native.find_visits(chosen, [*accumulate(sizes)], places, tokens)
    return Visits(counts, tokens[: sum(counts)], places)


def add_up(rows: Tensor, visits: Visits) -> Tensor:
    """Each token's sum of its rows, in the order of the ranks, in float32 or float64, rounded once
    to the dtype of the rows.
    """
    out = rows.new_empty(len(visits.places), rows.shape[1])
    _native.add_up_visits(rows, visits.places, out, getattr(_native.Dtype, name(rows.dtype)))
    return out


def sums(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    sizes: Sequence[int],
    algorithm: str,
    chunk_rows: int | None,
    world: World,
    timeout: float | None = None,
) -> Tensor:
    """The layer of checked operands, without gradients; collective."""
    visits, weight = find(chosen, sizes), experts.routed(chosen.shape[1])
    back = all_to_all_matmul_all_to_all(
        weight.rows(x, chosen, factors(scores, x.dtype), visits.tokens),
        weight,
        input_split_sizes=visits.counts,
        algorithm=algorithm,
        chunk_rows=chunk_rows,
        world=world,
        timeout=timeout,
    )
    return add_up(back, visits)


def gradients(
    grad: Tensor,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    experts: Experts,
    sizes: Sequence[int],
    algorithm: str,
    chunk_rows: int | None,
    world: World,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and scores, in the dtype of sums, and of both weights of this rank's
    experts; collective. Rows visit the experts again, with the gradients of their results.
    """
    visits, routed = find(chosen, sizes), RoutedExperts(experts, chosen.shape[1])
    rows = routed.rows(x, chosen, factors(scores, x.dtype), visits.tokens)
    width, at = x.shape[1], rows.shape[1]
    of_results = x.new_zeros(len(rows), routed.routing_at)  # as wide as lets routings be aligned
    of_results[:, :width] = grad[visits.tokens[:, 0]]
    for_gate_up, for_down = torch.zeros_like(experts.gate_up), torch.zeros_like(experts.down)

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

    rows = torch.cat((rows, of_results), 1)
    columns = width + chosen.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    back = all_to_all_matmul_all_to_all(
        rows,
        weight(product, (rows.shape[1], columns), x.dtype),
        input_split_sizes=visits.counts,
        out_dtype=wide,
        algorithm=algorithm,
        chunk_rows=chunk_rows,
        world=world,
    )
    # one operator's results share no memory
    for_x, for_scores = (
        part.clone(memory_format=torch.contiguous_format)
        for part in add_up(back, visits).split((width, chosen.shape[1]), 1)
    )
    return for_x, for_scores, for_gate_up, for_down
