"""Predicted times of plans on machine models (`weft.predict.machine`), without torch or ranks.

Names are imported when they are first used: operators look up measured variants here, and load
neither the simulator nor the machines for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.predict.collectives import COLLECTIVES as COLLECTIVES
    from weft.predict.collectives import collective_candidates as collective_candidates
    from weft.predict.forecast import Forecast as Forecast
    from weft.predict.forecast import candidates as candidates
    from weft.predict.forecast import changes as changes
    from weft.predict.forecast import compute as compute
    from weft.predict.forecast import plan as plan
    from weft.predict.forecast import planned as planned
    from weft.predict.forecast import rank as rank
    from weft.predict.forecast import savings as savings
    from weft.predict.forecast import time as time
    from weft.predict.forecast import trace as trace
    from weft.predict.forecast import workload as workload
    from weft.schedules.operators import OPERATORS as OPERATORS
    from weft.schedules.workload import Variant as Variant
    from weft.schedules.workload import Workload as Workload

_HOMES = {
    "collectives": ("COLLECTIVES", "collective_candidates"),
    "forecast": (
        "Forecast",
        "candidates",
        "changes",
        "compute",
        "plan",
        "planned",
        "rank",
        "savings",
        "time",
        "trace",
        "workload",
    ),
}
_HOME = {name: f"weft.predict.{module}" for module, names in _HOMES.items() for name in names}
_HOME |= {
    "OPERATORS": "weft.schedules.operators",
    "Variant": "weft.schedules.workload",
    "Workload": "weft.schedules.workload",
}
"""The module of each name of this package."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.predict' has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
