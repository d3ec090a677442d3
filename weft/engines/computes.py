"""The computations of a program with one binding: their operands are found once, so that a repeated
call only gives other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

import weft._native as _native
from weft.plan import Region

if TYPE_CHECKING:
    from weft.engines.host import HostProgram

Operand = Callable[[Any], Tensor]
"""Finds an operand of a computation among the caller's tensors."""


class Computes:
    """Runs the computations of a program with one binding, whose buffers had these `tensors`.

    Each call gives its tensors, weights and biases, as mappings or sequences. `keys` and `weights`
    are the keys there, by buffer and by the name of the weight. A tensor of a call has the shape in
    `tensors` unless its buffer is among `reshaped`. A bias may be None, and is not added unless
    `biased`.
    """

    def __init__(
        self,
        program: HostProgram,
        binding: _native.Binding,
        tensors: Mapping[str, Tensor],
        keys: Mapping[str, Any],
        weights: Mapping[str, Any],
        reshaped: frozenset[str] = frozenset(),
        biased: bool = True,
    ) -> None:
        def operand(region: Region) -> Operand:
            name, own = region.buffer, region.rank == program.world.rank
            if program.plan.buffers[name].given and own:
                return _rows_of(
                    keys[name], program.rows_in(binding, region), tensors[name], name in reshaped
                )
            matrix = program.matrix(binding, region, tensors)
            return lambda _: matrix

        self.rows, self.biased = sum(binding.rows), biased
        self.operands = {
            at: (
                run,
                [*map(operand, sources)],
                None if name is None else weights[name],
                operand(out),
            )
            for at, (run, sources, out, name) in program.computes.items()
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


def _rows_of(key: Any, rows: slice, matrix: Tensor, reshaped: bool) -> Operand:
    """Finds rows of one of the caller's tensors, which is to have the shape of `matrix`."""
    find: Operand = itemgetter(key)
    if reshaped:
        shape, strides = matrix.shape, matrix.stride()
        return lambda tensors: find(tensors).as_strided(shape, strides)[rows]
    if rows == slice(0, len(matrix)):
        return find
    return lambda tensors: find(tensors)[rows]
