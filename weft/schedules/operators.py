"""The fused operators and the collectives by name, and the planners of all.

A module of this package that defines an `OPERATOR` is the planner of a fused operator, one that
defines a `COLLECTIVE` that of a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple, TypeVar

import weft.schedules as package
from weft.plan import Plan
from weft.schedules.levels import nested
from weft.schedules.workload import Collective, Operator, Request

Record = TypeVar("Record", Operator, Collective)


def _found(kind: type[Record], name: str) -> Iterator[tuple[str, Record]]:
    """The records of a kind that modules of this package define under a name."""
    for module in iter_modules(package.__path__):
        record = getattr(import_module(f"{package.__name__}.{module.name}"), name, None)
        if isinstance(record, kind):
            yield record.name, record


OPERATORS: Mapping[str, Operator] = dict(_found(Operator, "OPERATOR"))
"""The fused operators."""

COLLECTIVES: Mapping[str, Collective] = dict(_found(Collective, "COLLECTIVE"))
"""The collectives."""


class Planner(NamedTuple):
    """An operator's algorithms, the first to show, and its plan for a request."""

    algorithms: tuple[str, ...]
    first: str
    plan: Callable[[Request], Plan]


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
    return Planner(names, _first(collective, names), plan)


def _first(operator: Operator | Collective, names: Sequence[str]) -> str:
    """The first algorithm that ranks on several hosts can use, or the first of all."""
    others = (name for name in names if name not in operator.shared_memory_only)
    return next(others, names[0])


PLANNERS: Mapping[str, Planner] = {
    **{name: _fused(operator) for name, operator in OPERATORS.items()},
    **{name: _collective(collective) for name, collective in COLLECTIVES.items()},
}
"""The planners of all operators, by name and with one signature."""
