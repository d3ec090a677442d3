"""Predicted times of plans on machine models (`weft_tools.predict.machine`), without torch or
ranks: ``weft.predict``.
"""

from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload
from weft_tools.predict.collectives import COLLECTIVES, collective_candidates
from weft_tools.predict.forecast import (
    Forecast,
    candidates,
    changes,
    compute,
    plan,
    planned,
    rank,
    savings,
    time,
    trace,
    workload,
)

__all__ = [
    "COLLECTIVES",
    "OPERATORS",
    "Forecast",
    "Variant",
    "Workload",
    "candidates",
    "changes",
    "collective_candidates",
    "compute",
    "plan",
    "planned",
    "rank",
    "savings",
    "time",
    "trace",
    "workload",
]
