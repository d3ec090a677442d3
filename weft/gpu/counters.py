"""The counters of a device engine: in host memory for lanes that are threads, in device memory for
streams and kernels.

Both count as the host engine does: the counts of an execution start at a base, the sum of the
increments that the plans of earlier executions promise. `advance` adds an execution's increments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import weft._native as _native
from weft.gpu.loading import LOADING
from weft.gpu.memory import drain
from weft.world import World
from weft.world.signals import Signals

_POLL_SECONDS = 0.2  # between checks whether peers make the same call


class WaitFailed(Exception):
    """A failed wait: its status, and the expected and the actual number of notifies in this
    execution.
    """

    def __init__(self, status: Any, expected: int, actual: int) -> None:
        self.status = status
        self.expected = expected
        self.actual = actual


class HostCounters:
    """Counters for threads: the signals of one-sided calls."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        with world.failure.fail_on_error:
            self.signals = Signals(world, count, "counters of lanes")
        self.base = [0] * count

    def notify(self, peer: int, index: int) -> None:
        """Add 1 on `peer`, after all earlier steps of this lane."""
        if not self.signals.array.add(peer, index, 1, 1, 1):
            raise self.world.failure.reported(f"to notify rank {peer}")

    def wait(
        self, index: int, source: int, count: int, compiled: _native.Compiled, timeout: float
    ) -> None:
        """Block this lane until rank `source` has raised a counter `count` times in this execution,
        for at most `timeout` seconds.

        Raises `WaitFailed`.
        """
        base = self.base[index]
        left = timeout
        reached = index, 1, 1, _native.Compare.greater_equal, base + count
        refused = self.world.executor.refused_call(compiled, source)
        while True:
            status, _, actual = self.signals.array.wait(*reached, min(left, _POLL_SECONDS))
            left -= _POLL_SECONDS
            not_failed = status in (_native.WaitStatus.none, _native.WaitStatus.timeout)
            if not_failed and self.world.executor.mismatch(compiled, source):
                status = _native.WaitStatus.mismatch
            elif status == _native.WaitStatus.timeout and refused.stands:
                status = _native.WaitStatus.refused
            if status == _native.WaitStatus.timeout and self.world.mesh.left(source):
                status = _native.WaitStatus.left  # but a notify before it left counts
                if self.signals.array.test(*reached):
                    status = _native.WaitStatus.none
            if status == _native.WaitStatus.none:
                return
            if status != _native.WaitStatus.timeout or left <= 0:
                raise WaitFailed(status, count, actual - base)

    def advance(self, promised: Mapping[int, int]) -> None:
        """End an execution, whose plan `promised` these increments by counter."""
        for index, count in promised.items():
            self.base[index] += count

    def prepare(self, promised: Mapping[int, int]) -> None:
        pass

    def check(self, name: Callable[[int], str]) -> None:
        pass  # the waits of threads raise


class DeviceCounters:
    """Counters for kernels, in symmetric memory; their bases are in device memory, too, so that
    graphs can be replayed.
    """

    def __init__(self, world: World, count: int) -> None:
        from weft.gpu.kernels import stream_signals, symmetric

        self.world = world
        self.kernels = stream_signals
        self.symmetric = symmetric
        self.counters = symmetric.zeroed(world, count + 1)
        self.bases = symmetric.bases(world, self.counters)
        self.base = torch.zeros(count + 1, dtype=torch.int64, device=world.device)
        self.timeout_record = symmetric.timeout_record(world.device)
        self.tables = symmetric.CounterTables(
            self.counters, self.bases, self.base, self.timeout_record
        )
        self.increments: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}

    def load(self) -> None:
        """Load the kernels of notifies and waits, and torch's of `advance`, by those of a counter
        that no plan has.
        """
        with LOADING:
            self.notify(self.world.rank, len(self.base) - 1)
            self.wait(len(self.base) - 1, self.world.rank, 1, None, self.world.timeout)
            self.advance({len(self.base) - 1: 1})
            drain(self.world.device)

    def notify(self, peer: int, index: int) -> None:
        kernel: Any = self.kernels.notify_kernel
        kernel[(1,)](self.counters, index, self.bases, self.world.rank, peer, num_warps=1)

    def wait(
        self, index: int, source: int, count: int, compiled: _native.Compiled | None, timeout: float
    ) -> None:
        """Block this lane until a counter has been raised `count` times in this execution; `check`
        raises errors of waits, since a stream cannot.
        """
        kernel: Any = self.kernels.wait_kernel
        limit = self.symmetric.time_limit(timeout)
        kernel[(1,)](
            self.counters, index, self.base, count, self.timeout_record, limit, num_warps=1
        )

    def advance(self, promised: Mapping[int, int]) -> None:
        self.base.add_(self.prepare(promised))

    def prepare(self, promised: Mapping[int, int]) -> torch.Tensor:
        """The increments that `advance` adds; created at the first use, which cannot be captured in
        a graph.
        """
        key = tuple(sorted(promised.items()))
        if key not in self.increments:
            increments = torch.zeros(len(self.base), dtype=torch.int64, device="cpu")
            for index, count in key:
                increments[index] = count
            self.increments[key] = increments.to(self.base.device)
        return self.increments[key]

    def check(self, name: Callable[[int], str]) -> None:
        """Raise `PeerTimeout` if a wait timed out; `name` names a counter."""
        self.symmetric.check(self.timeout_record, f"rank {self.world.rank}", name)


Counters = HostCounters | DeviceCounters


def counters(world: World, count: int) -> Counters:
    """Counters for the lanes of this world's device; collective."""
    return (DeviceCounters if world.backend.runs_kernels else HostCounters)(world, count)
