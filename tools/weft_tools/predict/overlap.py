"""Predicted times of a product and an all-gather that are independent of each other: one after the
other, and at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.kernels.matmul import matmul
from weft.plan import Buffer, Plan, Region
from weft.plan.binding import bind
from weft.plan.language import Lanes
from weft.schedules.all_gather import all_gather
from weft.schedules.workload import Rows
from weft_tools.predict.machine import Machine
from weft_tools.predict.rates import ITEMSIZE
from weft_tools.predict.simulator import seconds

KERNEL = "nccl"
"""The variant of a profile in which kernels communicate, and so take cores from the product."""
ALONE = ("compute", "communicate", "sequential")
AT_ONCE = "overlapped"
"""What runs alone: the product, the all-gather, and one after the other; and both at once."""


class Beside(NamedTuple):
    """A product (m, k) @ (k, n) on every rank, and an all-gather of `size` bytes of each, in
    symmetric memory.
    """

    ranks: int
    m: int
    k: int
    n: int
    dtype: str
    size: int

    @property
    def rows(self) -> dict[str, Rows]:
        """The rows of the buffers of its plans; the gather's have one number each."""
        moved = dict.fromkeys(("a", "gathered"), Rows(1, self.dtype))
        return moved | {"x": Rows(self.k, self.dtype), "y": Rows(self.n, self.dtype)}


def plan(case: Beside, part: str, machine: Machine) -> Plan:
    """The plan of one of `ALONE`, or `AT_ONCE`; the all-gather is a push over all links of a rank.

    If all groups of the machine do the same, only the ranks of the first have lanes.
    """
    links = max(1, min(machine.lanes, case.ranks - 1))
    group = machine.group(case.ranks)
    planned = group if case.ranks % group == 0 else case.ranks
    rows = -(-case.size // ITEMSIZE[case.dtype])
    whole = all_gather(case.ranks, 1, "push", symmetric_gathered=True, links=links)
    gather = bind(whole.part(range(planned)), [rows] * case.ranks)

    def lanes(rank: int) -> Lanes:
        product = matmul(Region(rank, "x", 0, case.m), Region(rank, "y", 0, case.m))
        communicate, *puts = gather.lanes[rank].values()
        others = {f"comm{number}": lane for number, lane in enumerate(puts)}
        match part:
            case "compute":
                return {"compute": (product,)}
            case "communicate":
                return {"compute": communicate, **others}
            case "sequential":
                return {"compute": (*communicate, product), **others}
        return {"compute": (product,), "comm": communicate, **others}

    every = [lanes(rank) if rank < planned else {} for rank in range(case.ranks)]
    own = dict.fromkeys(("x", "y"), Buffer("input", (case.m,) * case.ranks))
    return replace(gather, buffers={**gather.buffers, **own}, lanes=tuple(every))


def time(case: Beside, part: str, machine: Machine) -> float:
    """Predicted seconds of one of `ALONE`, or `AT_ONCE`."""
    return seconds(plan(case, part, machine), machine, case.rows)
