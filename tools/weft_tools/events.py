"""Times of work on a GPU's streams, by its own events."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], object], warmup: int, iterations: int) -> list[float]:
    """The times of `iterations` calls on the current stream, in milliseconds."""
    for _ in range(max(1, warmup)):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(marks)]
