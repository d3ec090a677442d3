"""The fused operators by name.

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
