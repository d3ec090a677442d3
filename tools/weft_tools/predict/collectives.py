"""Predicted times of collectives on a machine: eager plans, flat or by levels, for few bytes, and
otherwise one plan for each algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.plan import Plan
from weft.plan.binding import bind
from weft.schedules import operators
from weft.schedules.levels import flat, nested
from weft.schedules.thresholds import EAGER_BUFFER_BYTES
from weft.schedules.workload import Collective, Request, Rows
from weft_tools.predict.machine import Machine
from weft_tools.predict.simulator import seconds


class Candidate(NamedTuple):
    """A plan for a collective: its predicted seconds, and the most notifies of any rank."""

    name: str
    seconds: float
    notifies: int


COLLECTIVES: Mapping[str, Collective] = {
    name: collective
    for name, collective in operators.COLLECTIVES.items()
    if collective.predicted or not collective.algorithms
}
"""The collectives whose times are predicted; those without algorithms have one plan for all rows.
"""


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
    record = COLLECTIVES[collective]
    rows = -(-size // 4)
    most = machine.thresholds.eager_bytes if record.reduces else EAGER_BUFFER_BYTES
    if not record.algorithms or size <= most:
        levels_of = {
            "flat": flat(ranks),
            "levels": nested(ranks, machine.groups(ranks)),
        }
        plans = {
            name: record.few_rows(levels)
            for name, levels in levels_of.items()
            if name == "flat" or len(levels) > 1
        }
    else:
        plans = _of_many_rows(record, ranks, machine)
    shards = record.default_shards(rows, ranks)
    return sorted(
        (_predicted(name, plan, shards, machine) for name, plan in plans.items()),
        key=lambda candidate: candidate.seconds,
    )


def _of_many_rows(record: Collective, ranks: int, machine: Machine) -> dict[str, Plan]:
    """The plan of each algorithm; those over links only where rows pass other links than memory."""
    links = max(1, min(machine.lanes, ranks - 1))
    plans = {name: record.plan(Request(ranks, 1, name)) for name in record.predicted}
    for name in () if machine.in_place else record.predicted_over_links:
        plans[name] = record.plan(Request(ranks, 1, name, symmetric=True, links=links))
    return plans


def _predicted(name: str, plan: Plan, shards: Sequence[int], machine: Machine) -> Candidate:
    """The prediction for shards with these numbers of rows, each row one number of 4 bytes."""
    bound = bind(plan, shards)
    columns = dict.fromkeys(plan.buffers, Rows(1, "float32"))
    return Candidate(name, seconds(bound, machine, columns), max(plan.notifies()))
