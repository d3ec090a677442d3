"""The fused operators and the collectives by name.

A module of this package that defines an `OPERATOR` is the planner of a fused operator, one that
defines a `COLLECTIVE` that of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

import weft.schedules as package
from weft.schedules.workload import Collective, Operator

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
