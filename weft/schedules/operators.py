"""The fused operators by name, and the algorithms that need shared memory.

A module of this package that defines an `OPERATOR` is the planner of a fused operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

import weft.schedules as package
from weft.schedules.workload import Operator


def _found() -> Iterator[Operator]:
    for module in iter_modules(package.__path__):
        operator = getattr(import_module(f"{package.__name__}.{module.name}"), "OPERATOR", None)
        if isinstance(operator, Operator):
            yield operator


OPERATORS: Mapping[str, Operator] = {operator.name: operator for operator in _found()}
"""The fused operators."""

_READS = "it reads rows of other hosts in place, and hosts can only send each other rows"
_WRITES = "it multiplies into the memory of other hosts, and hosts can only send each other rows"

SHARED_MEMORY_ONLY: Mapping[str, str] = {
    "pull": _READS,  # of collectives
    **{name: _READS for operator in OPERATORS.values() for name in operator.reads_peers},
    **{name: _WRITES for operator in OPERATORS.values() for name in operator.writes_products},
}
"""Algorithms that ranks on several hosts cannot use, each with the reason."""
