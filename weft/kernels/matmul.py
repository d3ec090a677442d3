"""The matrix product: ``dst = src @ weight (+ bias)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.plan import Compute, Instruction, Kernel, Plan, Region, Term, Value, companions
from weft.plan.kernel import Load, Rates, Run
from weft.plan.lazy import Deferred
from weft.plan.values import Applied, Symbol, Weight, Whole

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

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        from weft.kernels.weights import check_product  # plans are written without torch

        check_product(sources[0], weight, out)

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        from weft.kernels.products import prepare

        return prepare(sources[0], weight, out, rows)

    def device(self) -> Run:
        from weft.kernels.methods import on_device

        return on_device

    def seconds(self, machine: Rates, load: Load) -> float:
        k, n = load.columns
        return machine.product(load.rows, k, n, load.dtype, load.packed)


MATMUL = Matmul()


def with_kernel(plan: Plan, kernel: Kernel) -> Plan:
    """The plan with another kernel of the rows of ``a`` and a weight in place of the matrix
    product; the rows have the companions that the kernel takes.
    """
    names = kernel.companions

    def instruction(one: Instruction) -> Instruction:
        if isinstance(one, Compute) and one.kernel is MATMUL:
            return replace(companions.compute_with(one, names), kernel=kernel)
        return one

    def product(source: Value, weight: Weight | None) -> Symbol:
        sources = [source, *(companions.of_value(source, name) for name in names)]
        return kernel.value(sources, weight)[0]

    def value(terms: Value) -> Value:
        return tuple(map(symbol, terms))

    def symbol(one: Symbol) -> Symbol:
        if isinstance(one, Whole):
            return Whole(tuple((numbers, value(part)) for numbers, part in one.parts))
        if isinstance(one, Applied):
            sources = tuple(map(value, one.sources))
            if one.kernel == MATMUL.name:
                return product(sources[0], one.weight)
            return one._replace(sources=sources)
        if one.weights is None:
            return one
        return product((one._replace(weights=None),), one.weights)

    moved = companions.with_companions(plan, names) if names else plan
    return moved.with_instructions(
        instruction,
        f"{moved.request} by {kernel.name}",
        result=Deferred(lambda: {region: value(terms) for region, terms in moved.result.items()}),
    )


def matmul(src: Region, dst: Region) -> Compute:
    """The product of the rows of `src` by the executing rank's weight for the buffer of `dst`."""
    return Compute(MATMUL, (src,), dst, dst.buffer)
