"""The plan of a barrier."""

from __future__ import annotations

from functools import cache

from weft.plan import Plan
from weft.schedules.levels import Levels, meet


@cache
def barrier(levels: Levels, name: str = "barrier") -> Plan:
    """No rank ends it before all have begun it. `name` is that of its signals."""
    lanes = tuple({"compute": tuple(meet(rank, levels, name))} for rank in range(len(levels[-1])))
    return Plan(name, "levels", {}, lanes, meets=True)
