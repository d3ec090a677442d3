"""The computations of a program with one binding: their operands are found once, so that a repeated
call only passes other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from weft.plan import Compute, Region
from weft.plan.kernel import Run

Operand = Any
"""An operand of a computation: the key of one of the caller's tensors, or a function that makes it
of all of them.
"""


class Computation(NamedTuple):
    """A Compute, and a region that has as many rows as its result: its slots hold any block."""

    instruction: Compute
    like: Region

    @property
    def sources(self) -> list[tuple[Region, Region]]:
        """Its sources, each with a region that has as many rows."""
        whole, srcs = self.instruction.kernel.whole, self.instruction.srcs
        return [(src, src if at in whole else self.like) for at, src in enumerate(srcs)]


class Computes:
    """Runs computations of a call of `rows` rows, with operands as `operand` gives them, of a
    region and one that has as many rows.

    Each call passes its tensors, weights and biases, as mappings or sequences; `weights` are the
    keys of weights there. A bias may be None, and is not added unless `biased`.
    """

    def __init__(
        self,
        computations: Mapping[int, Computation],
        rows: int,
        operand: Callable[[Region, Region], Operand],
        weights: Mapping[str, Any],
        biased: bool = True,
    ) -> None:
        self.rows, self.biased = rows, biased
        self.operands = {
            at: (
                one.instruction.kernel,
                [operand(*source) for source in one.sources],
                None if (name := one.instruction.weight) is None else weights[name],
                operand(one.instruction.dst, one.like),
            )
            for at, one in computations.items()
        }

    def run(self, at: int, tensors: Any, weights: Any, biases: Any) -> None:
        """Run the computation of an instruction."""
        kernel, sources, name, result = self.operands[at]
        operands, out = [_find(source, tensors) for source in sources], _find(result, tensors)
        weight = None if name is None else weights[name]
        bias = None if name is None or not self.biased else biases[name]
        kernel.prepare(operands, weight, out, self.rows)(*operands, weight, out, bias)

    def prepare(
        self, at: int, tensors: Any, weights: Any
    ) -> tuple[Run, list[Operand], Operand, Any, bool]:
        """The computation of an instruction, for operands with the layouts of these: the function,
        its sources and its result, the key of its weight, and whether a bias is added.
        """
        kernel, sources, name, result = self.operands[at]
        operands, out = [_find(source, tensors) for source in sources], _find(result, tensors)
        weight = None if name is None else weights[name]
        return kernel.prepare(operands, weight, out, self.rows), sources, result, name, self.biased


def _find(operand: Operand, tensors: Any) -> Tensor:
    found: Tensor = operand(tensors) if callable(operand) else tensors[operand]
    return found


def rows_of(key: Any, rows: slice, matrix: Tensor, reshaped: bool) -> Operand:
    """Rows of one of the caller's tensors, which has the shape of `matrix` unless it is to be
    `reshaped`.
    """
    if reshaped:
        shape, strides = matrix.shape, matrix.stride()
        return lambda tensors: tensors[key].as_strided(shape, strides)[rows]
    if rows == slice(0, matrix.shape[0]):
        return key
    return lambda tensors: tensors[key][rows]
