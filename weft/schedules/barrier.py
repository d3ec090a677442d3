"""The plan of a barrier."""

from __future__ import annotations

from functools import cache

from weft.plan import Plan
from weft.schedules.lanes import one_lane
from weft.schedules.levels import Levels, nested, synchronize
from weft.schedules.workload import Collective


@cache
def barrier(levels: Levels, name: str = "barrier") -> Plan:
    """No rank ends it before all have begun it. `name` is the name of its signals."""
    lanes = (synchronize(rank, levels, name) for rank in range(len(levels[-1])))
    return Plan(name, "levels", {}, one_lane(lanes), synchronizes=True)


COLLECTIVE = Collective(
    "barrier",
    (),
    lambda request: barrier(nested(request.ranks)),
    barrier,
    default_shards=lambda rows, ranks: [],
    shards=lambda parts: [],
    few_rows_algorithm="levels",
)
