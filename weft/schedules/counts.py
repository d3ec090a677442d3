"""The exchange of counts: the row of numbers of every rank goes to every rank, where the rows are a
matrix. The numbers of rows of a plan that follows are numbers of it (`weft.plan.sized`).
"""

from __future__ import annotations

from dataclasses import replace

from weft.plan import Plan
from weft.schedules.all_gather import all_gather, eager
from weft.schedules.levels import Levels
from weft.schedules.peers import Hosts


def counts(operator: str, levels: Levels, hosts: Hosts | None = None, few: bool = True) -> Plan:
    """The plan by which the ranks of an `operator` exchange counts: of a host through eager
    buffers, a put and a notify for each peer, if they are `few` enough for these.
    """
    if few and hosts is None:
        plan = eager(levels)
    else:
        plan = all_gather(len(levels[-1]), 1, "push", hosts=hosts)
    return replace(plan, operator=f"sizes of {operator}")
