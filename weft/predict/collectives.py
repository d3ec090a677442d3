"""Predicted times of collectives on a machine: eager plans, flat or by levels, for few bytes, and
otherwise one plan for each algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from weft.plan import Plan
from weft.plan.binding import bind, split
from weft.predict.machine import Machine
from weft.predict.planners import EAGER_PLANS
from weft.predict.simulator import seconds
from weft.schedules import all_gather, all_reduce, broadcast
from weft.schedules.levels import flat, nested
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import Rows


class Candidate(NamedTuple):
    """A plan for a collective: its predicted seconds, and the most notifies of any rank."""

    name: str
    seconds: float
    notifies: int


_STAGED: Mapping[str, Mapping[str, Callable[[int], Plan]]] = {
    "all_gather": {"pull": partial(all_gather.all_gather, pieces=1)},
    "all_reduce": {
        name: partial(all_reduce.all_reduce, pieces=1, algorithm=name)
        for name in all_reduce.ALGORITHMS
    },
    "broadcast": {"pull": partial(broadcast.broadcast, pieces=1, source=0)},
}
COLLECTIVES = ("barrier", *_STAGED)


def collective_candidates(
    collective: str, size: int, ranks: int, machine: Machine
) -> list[Candidate]:
    """The candidates for a collective of `size` bytes on each rank, the fastest first.

    Few bytes are sent eagerly: ``flat``, or by ``levels`` if there are several. Raises `ValueError`
    for a machine whose signal latency is unknown.
    """
    if not machine.notify_us:
        raise ValueError(
            f"{machine.name} has no signal latency (notify_us), most of the time of this collective"
        )
    if collective == "barrier" or size <= (
        EAGER_BUFFER_BYTES if collective == "all_gather" else machine.thresholds.eager_bytes
    ):
        levels_of = {
            "flat": flat(ranks),
            "levels": nested(ranks, machine.groups(ranks)),
        }
        plans = {
            name: EAGER_PLANS[collective](levels)
            for name, levels in levels_of.items()
            if name == "flat" or len(levels) > 1
        }
    else:
        plans = {name: plan(ranks) for name, plan in _STAGED[collective].items()}
    rows = split(-(-size // 4), ranks) if collective == "all_reduce" else [-(-size // 4)] * ranks
    return sorted(
        (_predicted(name, plan, rows, machine) for name, plan in plans.items()),
        key=lambda candidate: candidate.seconds,
    )


def _predicted(name: str, plan: Plan, rows: Sequence[int], machine: Machine) -> Candidate:
    """The prediction for shards with these numbers of `rows`, each row one number of 4 bytes."""
    bound = bind(plan, rows[: len(plan.pieces)])
    columns = dict.fromkeys(plan.buffers, Rows(1, "float32"))
    return Candidate(name, seconds(bound, machine, columns), max(plan.notifies()))
