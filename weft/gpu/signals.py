"""Signals that kernels raise and wait for."""

from __future__ import annotations

import torch

from weft.world import World
from weft.world.signals import COUNTER_BYTES, LARGEST, Signals


class DeviceSignals(Signals):
    """Signals that kernels raise and wait for: their counters are in the world's symmetric memory.

    To read a counter waits for the current stream.

    Attributes: `world`, `name`, and `counters`, int64 (number, words of a cache line), with the
    values in column 0.
    """

    on_streams = True

    def __init__(self, world: World, count: int, name: str) -> None:
        self.world, self.name, self._count = world, name, count
        shape = [count, COUNTER_BYTES // torch.int64.itemsize]
        # new symmetric memory is zeroed
        self.counters = world.backend.allocate(world, shape, torch.int64, f"signals({count})")

    def __getitem__(self, index: int | slice) -> int | list[int]:
        values = self.values(*self.select(index))
        return values if isinstance(index, slice) else values[0]

    def values(self, start: int, count: int, step: int) -> list[int]:
        """The values of `count` counters from `start` on, with step `step`."""
        signed = self.counters[start : start + count * step : step, 0].tolist()
        return [value % (LARGEST + 1) for value in signed]
