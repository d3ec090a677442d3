"""The matrix product: ``dst = src @ weight (+ bias)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.plan import Compute, Kernel, Region, Term, Value
from weft.plan.kernel import Load, Rates, Run
from weft.plan.values import Weight

if TYPE_CHECKING:
    from torch import Tensor


class Matmul(Kernel):
    """The product of rows by a weight (K, N)."""

    name = "matmul"
    tiles = True

    def value(self, sources: Sequence[Value], weight: Weight | None) -> Value:
        """A product is linear: that of a sum of rows is the sum of their products."""
        (source,) = sources
        plain = [term for term in source if isinstance(term, Term) and term.weights is None]
        if len(plain) < len(source):
            return super().value(sources, weight)
        return tuple(term._replace(weights=weight) for term in plain)

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        product: Tensor = sources[0].to(weight.dtype) @ weight
        return product

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        from weft.kernels.products import prepare  # plans are written without torch

        return prepare(sources[0], weight, out, rows)

    def device(self) -> Run:
        from weft.kernels.methods import on_device

        return on_device

    def seconds(self, machine: Rates, load: Load) -> float:
        k, n = load.columns
        return machine.product(load.rows, k, n, load.dtype, load.packed)


MATMUL = Matmul()


def matmul(src: Region, dst: Region) -> Compute:
    """The product of the rows of `src` by the executing rank's weight for the buffer of `dst`."""
    return Compute(MATMUL, (src,), dst, dst.buffer)
