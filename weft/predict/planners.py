"""Planners of all operators, fused ones and collectives, by name and with one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.plan import Plan
from weft.schedules.levels import nested
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.schedules.workload import Collective, Operator, Request


class Planner(NamedTuple):
    """An operator's algorithms, the first to show, its plan for a request, and the rows of each
    shard by the rows of each rank.
    """

    algorithms: tuple[str, ...]
    first: str
    plan: Callable[[Request], Plan]
    shards: Callable[[Sequence[int]], Sequence[int]] = list


def _fused(operator: Operator) -> Planner:
    def plan(request: Request) -> Plan:
        uncut = request.algorithm in operator.uncut
        return operator.plan(request._replace(pieces=1) if uncut else request)

    return Planner(operator.algorithms, _first(operator, operator.algorithms), plan)


def _collective(collective: Collective) -> Planner:
    """The planner of a collective; few rows are planned for ranks of one host."""
    few_rows = collective.few_rows_algorithm

    def plan(request: Request) -> Plan:
        if request.algorithm == few_rows:
            return collective.few_rows(nested(request.ranks))
        return collective.plan(request)

    names = (*collective.algorithms, few_rows)
    return Planner(names, _first(collective, names), plan, collective.shards)


def _first(operator: Operator | Collective, names: Sequence[str]) -> str:
    """The first algorithm that ranks on several hosts can use, or the first of all."""
    others = (name for name in names if name not in operator.shared_memory_only)
    return next(others, names[0])


PLANNERS: Mapping[str, Planner] = {
    **{name: _fused(operator) for name, operator in OPERATORS.items()},
    **{name: _collective(collective) for name, collective in COLLECTIVES.items()},
}
