"""The computations of a program with one binding: their operands are found once, so that a repeated
call only gives other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor

from weft.plan import Region
from weft.plan.kernel import Run

Operand = Callable[[Any], Tensor]
"""Finds an operand of a computation among the caller's tensors."""
Computation = tuple[Run, tuple[Region, ...], Region, str | None]
"""The function of a Compute, its sources, its result, and the name of its weight."""


class Computes:
    """Runs computations of a call of `rows` rows, whose operands `operand` finds.

    Each call gives its tensors, weights and biases, as mappings or sequences; `weights` are the
    keys of weights there. A bias may be None, and is not added unless `biased`.
    """

    def __init__(
        self,
        computations: Mapping[int, Computation],
        rows: int,
        operand: Callable[[Region], Operand],
        weights: Mapping[str, Any],
        biased: bool = True,
    ) -> None:
        self.rows, self.biased = rows, biased
        self.operands = {
            at: (
                run,
                [operand(source) for source in sources],
                None if name is None else weights[name],
                operand(out),
            )
            for at, (run, sources, out, name) in computations.items()
        }

    def run(self, at: int, tensors: Any, weights: Any, biases: Any) -> None:
        """Run the computation of an instruction."""
        run, sources, weight, out = self.operands[at]
        operands = [source(tensors) for source in sources]
        if weight is None:
            run(operands, None, out(tensors), None, self.rows)
        else:
            bias = biases[weight] if self.biased else None
            run(operands, weights[weight], out(tensors), bias, self.rows)


def rows_of(key: Any, rows: slice, matrix: Tensor, reshaped: bool) -> Operand:
    """Finds rows of one of the caller's tensors, which has the shape of `matrix` unless it is to be
    `reshaped`.
    """
    find: Operand = itemgetter(key)
    if reshaped:
        shape, strides = matrix.shape, matrix.stride()
        return lambda tensors: find(tensors).as_strided(shape, strides)[rows]
    if rows == slice(0, len(matrix)):
        return find
    return lambda tensors: find(tensors)[rows]
