"""The plan of a barrier.

Rank 0 of three, and of four in two groups of two, where rank 2 represents the other group; time to
the right, ``!`` notifies a rank, ``?`` waits for it::

    one level   | !2 | !1 | ?1 | ?2 |
    two levels  | !1 | ?1 | !2 | ?2 |
"""

from __future__ import annotations

from functools import cache

from weft.plan import Plan
from weft.schedules.lanes import by_rank
from weft.schedules.levels import Levels, nested, synchronize
from weft.schedules.workload import Collective


@cache
def barrier(levels: Levels, name: str = "barrier") -> Plan:
    """No rank ends it before all have begun it. `name` is the name of its signals."""
    lanes = by_rank(
        len(levels[-1]), lambda rank: {"compute": synchronize(rank, levels, name)}, (name, levels)
    )
    return Plan(name, "levels", {}, lanes, synchronizes=True)


COLLECTIVE = Collective(
    "barrier",
    (),
    lambda request: barrier(nested(request.ranks)),
    barrier,
    default_shards=lambda rows, ranks: [],
    few_rows_algorithm="levels",
)
