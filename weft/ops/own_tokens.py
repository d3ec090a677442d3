"""A layer of experts whose tokens are each on one rank, from which their rows visit the experts,
and its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.experts import Experts, RoutedExperts
from weft.kernels.function import weight
from weft.ops.all_gather_matmul_reduce_scatter import all_gather_matmul_reduce_scatter
from weft.ops.all_to_all_matmul_all_to_all import all_to_all_matmul_all_to_all
from weft.ops.dims import adjacent
from weft.ops.expert_sums import add_gradients, factors
from weft.ops.visits import add_up, find
from weft.ops.ways import Rows, fastest
from weft.schedules.all_gather_matmul_reduce_scatter import OPERATOR
from weft.world import World


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
        routed = self.experts.routed(self.chosen.shape[1])
        x, chosen = adjacent(self.x), adjacent(self.chosen)
        scores = factors(self.scores, x.dtype)

        def rows(tokens: Tensor) -> Tensor:
            return routed.rows(x, chosen, scores, tokens)

        return self._visit(Rows(rows, routed, self.x.dtype))

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x and scores, in the dtype of sums, and of both weights of this rank's
        experts; collective. Rows visit the experts again, with the gradients of their results.
        """
        x, chosen, experts = adjacent(self.x), adjacent(self.chosen), self.experts
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
        found = self._visit(Rows(rows, weight(product, shape, x.dtype), wide))
        # one operator's results share no memory
        for_x, for_scores = (
            part.clone(memory_format=torch.contiguous_format)
            for part in found.split((width, chosen.shape[1]), 1)
        )
        return for_x, for_scores, for_gate_up, for_down

    def _visit(self, rows: Rows) -> Tensor:
        """What the weights of all ranks contribute to each token."""
        if self.algorithm == "auto":
            with torch.no_grad():
                return fastest(
                    self.chosen, self.sizes, rows, self.chunk_rows, self.world, self.timeout
                )
        for_hosts = self.algorithm in OPERATOR.algorithms
        operator = all_gather_matmul_reduce_scatter if for_hosts else all_to_all_matmul_all_to_all
        visits = find(self.chosen, self.sizes, self.world.hosts, for_hosts)
        back = operator(
            rows.of_tokens(visits.tokens),
            rows.weight,
            input_split_sizes=visits.counts,
            out_dtype=rows.out_dtype,
            algorithm=self.algorithm,
            chunk_rows=self.chunk_rows,
            world=self.world,
            timeout=self.timeout,
        )
        return add_up(back, visits)
