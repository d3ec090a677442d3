"""Signals for one-sided calls: an array of counters on every rank that peers raise.

Their memory order is in docs/memory-model.md; `weft.ops.onesided` has the calls that raise them
and wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import weft._native as _native
from weft.checks import integer
from weft.world import memory

if TYPE_CHECKING:
    from weft.world.world import World

COUNTER_BYTES = 64  # a cache line each, against false sharing
LARGEST = 2**64 - 1


class Signals:
    """Unsigned 64-bit counters, the same number on every rank, zero at first. Made by
    `World.signals`, collectively.

    ``len(signals)`` is their number; ``signals[i]`` is the value of this rank's counter i,
    ``signals[i:j]`` a list of values. A read acquires: data put before a notify that is seen is
    visible.

    Attributes: `world`, `name`, used in errors, and `memory`, the number of the call that made
    them, equal on all ranks.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.init().signals(3)[0:3])
        [[0, 0, 0], [0, 0, 0]]
    """

    on_streams = False
    """Whether they are raised and waited for in the order of streams."""

    def __init__(self, world: World, count: int, name: str) -> None:
        self.world = world
        self.name = name
        segment = memory.find(
            memory.allocate(world, [count * COUNTER_BYTES], torch.uint8, f"signals({count})")
        )
        assert isinstance(segment, _native.Segment)
        self.memory = segment.number
        network = None if world.network is None else world.network.native
        self.array = _native.SignalArray(world.mesh, segment, world.spins, network)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> int | list[int]:
        values = self.array.values(*self.select(index))
        return values if isinstance(index, slice) else values[0]

    def __repr__(self) -> str:
        return f"Signals({self.name!r}, {self._count} on each of {self.world.ranks} ranks)"

    def select(self, index: int | slice) -> tuple[int, int, int]:
        """First, number and step of the counters at `index`. Raises `ValueError` unless all of them
        exist.
        """
        if not isinstance(index, slice):
            at = integer(index, "an index must be an integer or a slice")
            if not 0 <= at < self._count:
                raise ValueError(
                    f"{self.name} has the counters 0 to {self._count - 1}; got index {at}"
                )
            return at, 1, 1
        start = index.start or 0
        step = 1 if index.step is None else index.step
        stop = self._count if index.stop is None else index.stop
        if not (0 <= start <= stop <= self._count and step > 0):
            raise ValueError(
                f"{self.name} has {self._count} counters: a slice needs 0 <= start <= stop <= "
                f"{self._count} and a positive step; "
                f"got {start}:{stop}:{step}"
            )
        return start, len(range(start, stop, step)), step
