"""Ticks of the clock of the device that executes a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE, INTERPRETED = "GPU's clock", "clock of interpreted kernels"


class DeviceTicks:
    """The clock that kernels read, in nanoseconds.

    A kernel of one warp stamps it on the current stream before and after the work. So the ticks
    are of the stream, with the launch of one kernel, and not of the thread that fills it.
    """

    def __init__(self, device: torch.device) -> None:
        self._times = torch.zeros(2, dtype=torch.int64, device=device)

    def counter(self) -> dict[str, Any]:
        """The clock's name, and its frequency in MHz."""
        return {"name": DEVICE if self._times.is_cuda else INTERPRETED, "mhz": 1000.0}

    def spent(self, work: Callable[[], object]) -> int:
        """The ticks that `work` occupies the current stream; waits for that stream."""
        from weft.gpu.kernels.clock import stamp_kernel

        stamp_kernel[(1,)](self._times, 0, num_warps=1)
        work()
        stamp_kernel[(1,)](self._times, 1, num_warps=1)
        begin, end = self._times.tolist()
        return int(end - begin)
