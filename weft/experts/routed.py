"""Experts as a weight of rows that carry their routing, by which operators multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import weft._native as _native
from weft.kernels.weights import PreparedWeight, check_product
from weft.plan import Kernel
from weft.plan.kernel import Load, Rates, Run

if TYPE_CHECKING:
    from weft.experts.weights import Experts


class ExpertSums(Kernel):
    """The sums of rows that carry their routing, by the experts of a rank.

    A row chooses what it is multiplied by, so it is no linear function of the row.
    """

    name = "expert_sums"

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        out = sources[0].new_empty(len(sources[0]), weight.shape[1])
        weight.multiply(sources[0], out, None, len(out))
        return out

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        check_product(sources[0], weight, out)

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        product: Run = weight.prepare(sources[0], out, rows)
        return product

    def seconds(self, machine: Rates, load: Load) -> float:
        """About that of a product by a square weight; how many rows a rank has depends on the
        router.
        """
        _, n = load.columns
        return machine.product(load.rows, n, n, load.dtype, load.packed)


EXPERT_SUMS = ExpertSums()


class RoutedExperts(PreparedWeight):
    """Experts as a weight (columns, K) of rows that carry their routing: K columns, then the `top`
    experts that a row chose as int32, and their scores in float32; both in float64 for float64.
    `rows` makes such rows.
    """

    kernel = EXPERT_SUMS
    words = "experts"

    def __init__(self, experts: Experts, top: int) -> None:
        self.experts, self.top = experts, top
        count, width, inner = experts.shape
        item = experts.dtype.itemsize
        self.routing_at = -(-width * item // 4) * 4 // item
        columns = 2 * top if experts.dtype == torch.float64 else 8 * top // item
        self.tensors = (experts.gate_up, experts.down)
        self.packed = experts.packed
        super().__init__(
            (self.routing_at + columns, width),
            experts.dtype,
            count,
            inner,
            experts.first,
            experts.activation,
            experts.packed,
        )

    def rows(
        self, x: Tensor, chosen: Tensor, scores: Tensor, token_of: Tensor | None = None
    ) -> Tensor:
        """`x` (tokens, K), `chosen` and `scores` (tokens, top) as rows of this weight: all tokens,
        or for each row that of `token_of` (rows, 1), int64.
        """
        if x.dtype == torch.float64:
            made = torch.cat((x, chosen.to(x.dtype), scores), 1)
            return made if token_of is None else made[token_of[:, 0]]
        made = x.new_empty(len(x if token_of is None else token_of), self.shape[0])
        if len(made):
            _native.PackedExperts.route(x, chosen, scores, made, token_of)
        return made

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of `rows`: tokens, what they chose, and their scores."""
        routing, tokens = rows[:, self.routing_at :], rows[:, : self.shape[1]]
        if rows.dtype == torch.float64:
            chosen, scores = routing.split(self.top, 1)
            return tokens, chosen.long(), scores
        chosen, scores = routing.view(torch.int32).split(self.top, 1)
        return tokens, chosen, scores.view(torch.float32)

    def multiply(self, x: Tensor, out: Tensor, bias: Tensor | None, rows: int) -> None:
        if len(x):
            self.experts.sums(*self.split(x), out)
        if bias is not None:
            out.add_(bias)

    def check_unchanged(self) -> None:
        self.experts.check_unchanged()
