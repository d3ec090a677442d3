"""Plans whose rows have companions, by which the proof and the engines are tested: those of every
fused operator, with a kernel that reads two matrices beside the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.kernels.matmul import with_kernel
from weft.plan import Kernel, Plan
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request


class Beside(Kernel):
    """``(x + 3 y + 5 z) @ weight`` for a row of `x`, and those of `y` and `z` beside it.

    It is exact for integers in float64, and another number for other rows beside it.
    """

    name = "beside"
    companions = ("y", "z")

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        x, y, z = sources
        product: Tensor = (x + 3 * y + 5 * z) @ weight
        return product


BESIDE = Beside()


def plans(ranks: int) -> list[Plan]:
    """The plan of each fused operator in two pieces: of those that move the rows of ``a`` by each
    algorithm.
    """
    return [
        with_kernel(operator.plan(Request(ranks, 2, algorithm)), BESIDE)
        for operator in OPERATORS.values()
        for algorithm in (operator.algorithms if operator.exchanges == "a" else ["sequential"])
    ]
