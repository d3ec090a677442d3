"""What benchmarks on a GPU share: the device they ran on, and the times of its own events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from weft.bench import harness


def hardware() -> dict[str, Any]:
    """The GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = round(properties.total_memory / 2**30, 1)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "gpu_memory_gib": memory,
    }


def versions() -> dict[str, str]:
    """Of what takes part in a measurement on a GPU."""
    import triton

    return harness.versions() | {
        "triton": triton.__version__,
        "cuda": torch.version.cuda or str(torch.version.hip),
    }


def milliseconds(call: Callable[[], object], warmup: int, iterations: int) -> list[float]:
    """What each of `iterations` calls takes on the current stream."""
    for _ in range(max(1, warmup)):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(marks)]
