"""Kernels: the computations of a plan's `Compute` instructions.

A kernel is one record in one file: the symbol of its result in the proof, the functions by which
engines run it, and its predicted time. No engine, proof or simulator names a kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from weft.plan.values import Applied, Value, Weight

if TYPE_CHECKING:
    from torch import Tensor

Run = Callable[..., None]
"""``run(*sources, weight, out, bias)`` computes the rows of `out`; weight and bias may be None."""


class Load(NamedTuple):
    """The operands of one Compute, as predictions see them."""

    rows: int
    columns: tuple[int, ...]  # of each source, then of the result
    dtype: str  # of the first source
    size: int  # bytes of all sources
    packed: bool  # whether the weight was packed before the call


class Rates(Protocol):
    """The speed of a machine, by which its kernels are predicted."""

    def product(self, rows: int, k: int, n: int, dtype: str, packed: bool) -> float: ...

    def reduce(self, size: int) -> float: ...


@dataclass(frozen=True)
class Kernel(ABC):
    """A computation by rows: a row of the result is made of the same row of each source, and of all
    rows of the sources at the positions in `whole`, which may have any number of rows.

    A kernel that `accumulates` may have its destination as its last source, besides the others: the
    result then takes the place of the rows that it was computed from. A kernel may also take a
    weight: a constant operand of the rank that executes it. `tiles`: whether the device engine's
    persistent product kernel can make it, tile by tile. `companions`: what its rows have beside
    them, by name, which are its further sources (`weft.plan.companions`).
    """

    name: ClassVar[str]
    whole: ClassVar[Collection[int]] = ()
    accumulates: ClassVar[bool] = False
    tiles: ClassVar[bool] = False
    companions: ClassVar[Sequence[str]] = ()

    def value(self, sources: Sequence[Value], weight: Weight | None) -> Value:
        """The value of a row of the result, from the values of the same row of each source, and of
        all rows of others (`weft.plan.values.whole`).

        By default the order of accumulations matters, as it does for the bits of most. A kernel
        whose results have the same bits in every order says so by a value that is the same: a sum
        of values, or a maximum (`weft.plan.reduced`).
        """
        return (Applied(self.name, tuple(sources), weight),)

    @abstractmethod
    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        """The result by the simplest computation, with which the reference engine tests the other
        engines. Any source may have no rows.
        """

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:  # noqa: B027
        """Raise `ValueError` or `TypeError` unless the kernel can compute with operands of these
        columns and dtypes; the tensors have no rows.
        """

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        """The function that runs on a CPU, for these operands and all of the same layouts, which
        are part of a call of `rows` rows.
        """
        return self._run

    def device(self) -> Run:
        """The function that runs on the current stream of a GPU."""
        return self._run

    def seconds(self, machine: Rates, load: Load) -> float:
        """The predicted time; by default the time to read the sources."""
        return machine.reduce(load.size)

    def _run(self, *operands: Any) -> None:
        *sources, weight, out, bias = operands
        result = self.compute(sources, weight)
        out.copy_(result if bias is None else result + bias)
