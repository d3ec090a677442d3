"""The times of the steps of a lane: on a GPU read after an execution has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

import weft._native as _native
from weft.engines.program import Timed
from weft.gpu.lanes import Step

if TYPE_CHECKING:
    from weft.gpu.kernel_trace import KernelTrace

Span = Callable[[], list[Timed]]
"""Returns the times of the instructions of a step, after the execution has ended."""


def timed(
    step: Step,
    name: str,
    every: range,
    spans: list[Span],
    device: torch.device,
    traces: Sequence[KernelTrace],
) -> Step:
    """The step, with a record of its begin and end on its lane; the times of a stream are read
    after the execution has ended.

    Each of several instructions of one step gets the time of the step, unless its kernels recorded
    `traces`.
    """

    def step_and_times() -> None:
        start = _timestamp(device)
        step()
        stop = _timestamp(device)

        def found() -> list[Timed]:
            times = start(), stop()
            if not traces:
                return [(name, at, *times) for at in every]
            return [span for trace in traces for span in trace.spans(name, times[1])]

        spans.append(found)

    return step_and_times


def _timestamp(device: torch.device) -> Callable[[], int]:
    """A function that returns the time at which the current lane executes this, in nanoseconds of
    the host's clock; on a GPU it waits for the device.
    """
    if device.type != "cuda":
        time = _native.now()
        return lambda: time
    event = torch.cuda.Event(enable_timing=True)
    event.record()

    def clock() -> int:
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        return int(_native.now() - event.elapsed_time(now) * 1e6)

    return clock
