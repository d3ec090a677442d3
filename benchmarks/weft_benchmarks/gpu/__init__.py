"""Parts shared by the benchmarks on a GPU: its name and versions, and times by its own events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from weft.bench import harness


def hardware() -> dict[str, Any]:
    """The GPU's name and properties."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = round(properties.total_memory / 2**30, 1)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "gpu_memory_gib": memory,
    }


def versions() -> dict[str, str]:
    """The versions of the software that a measurement on a GPU depends on."""
    return harness.versions(torch.device("cuda"))


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
