"""Experts as a weight that operators multiply by: rows have their routing as companions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from weft.kernels.weights import PreparedWeight, WeightKernel
from weft.plan.kernel import Load, Rates

if TYPE_CHECKING:
    from weft.experts.weights import Experts


class ExpertSums(WeightKernel):
    """Each row's sum over a rank's experts that were chosen for it, times their scores. It is not a
    linear function of the row, which decides what it is multiplied by.
    """

    name = "expert_sums"
    companions = ("chosen", "scores")

    def seconds(self, machine: Rates, load: Load) -> float:
        """About the time of a product by a square weight; the router decides how many rows a rank
        has.
        """
        n = load.columns[-1]
        return machine.product(load.rows, n, n, load.dtype, load.packed)


class RoutedExperts(PreparedWeight):
    """Experts as a weight (K, K) of rows that have companions: the numbers of the experts that each
    chose, int32 or int64, and their scores in float32, or float64 for float64; both (rows, top).
    """

    kernel = ExpertSums()
    words = "experts"

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        count, width, inner = experts.shape
        self.tensors = (experts.gate_up, experts.down)
        self.packed = experts.packed
        layout = count, inner, experts.first, experts.activation, experts.packed
        super().__init__((width, width), experts.dtype, *layout)

    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        x, chosen, scores = sources
        if len(x):
            self.experts.sums(x, chosen, scores, out)
        if bias is not None:
            out.add_(bias)

    def check_unchanged(self) -> None:
        self.experts.check_unchanged()
