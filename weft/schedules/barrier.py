"""The plan of a barrier."""

from __future__ import annotations

from functools import cache

from weft.plan import Plan
from weft.schedules.lanes import one_lane
from weft.schedules.levels import Levels, synchronize


@cache
def barrier(levels: Levels, name: str = "barrier") -> Plan:
    """No rank ends it before all have begun it. `name` is the name of its signals."""
    lanes = (synchronize(rank, levels, name) for rank in range(len(levels[-1])))
    return Plan(name, "levels", {}, one_lane(lanes), synchronizes=True)
