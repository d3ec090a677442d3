"""The trace of a view, as `weft bench` draws and exports it."""

from __future__ import annotations

from weft.engines.recording import record
from weft.measure.timing import Stopwatch
from weft.plan.trace import Trace
from weft_tools.bench.budget import Budget
from weft_tools.bench.views import View

_RUNS = 5  # of a view; its trace is that of the run with the median time


def trace(
    view: View, stopwatch: Stopwatch, title: str, budget: Budget | None = None
) -> Trace | None:
    """The trace of a view's run with the median time, on rank 0; there is one run if no time is
    left.
    """
    found = list[Trace | None]()
    for _ in range(_RUNS):
        if found and budget is not None and not budget.left():
            break
        stopwatch.time(lambda: None)
        with record(stopwatch.world) as recording:
            view.call()
        found.append(recording.gather(title))
    runs = sorted((each for each in found if each), key=lambda each: each.seconds)
    return runs[len(runs) // 2] if runs else None
