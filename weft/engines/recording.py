"""Recording of the times of all instructions that a world executes, on every rank by one clock.

with weft.engines.recording.record(world) as recording:
    weft.all_gather_matmul(a, b)
trace = recording.gather("pipelined")       # collective; a Trace on rank 0, None elsewhere
if trace:
    json.dump(weft.plan.trace.to_perfetto(trace), file)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

import weft._native as _native
from weft.engines.program import Timed
from weft.errors import WeftError
from weft.plan import Plan
from weft.plan.binding import bind
from weft.plan.trace import Span, Trace, joined, lane_of
from weft.world import World, wire

_log = logging.getLogger("weft")
_ROUNDS = 20  # questions for the time per host


@contextmanager
def record(world: World) -> Iterator[Recording]:
    """Record this rank's part of every execution in `world` inside the ``with`` block; not
    collective.
    """
    world.recorder = recording = Recording(world)
    world.executor.trace(True)
    try:
        yield recording
    finally:
        world.executor.trace(False)
        world.recorder = None


class Recording:
    """The executions of one rank since `record` began."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.executions: list[tuple[Plan, Sequence[int], list[Timed]]] = []

    def add(self, plan: Plan, rows: Sequence[int], spans: list[Timed]) -> None:
        """Add an execution with these sizes; called by engines."""
        self.executions.append((plan, rows, spans))

    def own(self, title: str) -> Trace:
        """The trace of this rank alone, by the clock of its host. `weft.plan.trace.joined` joins
        those of the ranks of a `weft.local_world`, which have one clock.
        """
        return joined(title, [self._spans()])

    def gather(self, title: str, group: dist.ProcessGroup | None = None) -> Trace | None:
        """The trace of all ranks on rank 0, None elsewhere; collective over `group`, with which
        the world was made.

        Raises `WeftError` for a rank of a `weft.local_world`, which has no process group.
        """
        if self.world.ranks == 1:
            return self.own(title)
        if group is None and not dist.is_initialized():
            raise WeftError(
                "a recording is gathered by the process group of its world, and a local world has "
                "none: return recording.own(title) from local.run, and join what it returns by "
                "weft.plan.trace.joined(title, traces)"
            )
        offsets = clock_offsets(self.world, group)
        parts = wire.all_gather_values([*self._spans()], list[Span], group)
        return None if self.world.rank else joined(title, parts, offsets)

    def _spans(self) -> Iterator[Span]:
        if not self.executions:
            _log.warning(
                "no call was recorded in this world: layers on a device mesh have a world of their "
                "own, to be recorded by record(layer.world)"
            )
        for plan, sizes, spans in self.executions:
            bound = bind(plan, sizes)
            for name, index, start, stop in spans:
                lane = lane_of(name)
                instruction = bound.lanes[self.world.rank][lane][index]
                span = Span.of(self.world.rank, name, instruction, start, stop)
                yield span if name == lane else span._replace(rows=0)  # a part of the instruction


def clock_offsets(
    world: World, group: dist.ProcessGroup | None = None, now: Callable[[], int] = _native.now
) -> list[int]:
    """The nanoseconds by which each rank's clock `now` is ahead of rank 0's, on rank 0; zeros on
    other ranks. Collective.

    Rank 0 asks one rank of each other host for the time. The answer counts as the time half-way
    between the question and its arrival, in the fastest of several rounds (F. Cristian,
    "Probabilistic clock synchronization"). The error is less than half the fastest round.
    """
    offsets = [0] * world.ranks
    stamp = torch.zeros(1, dtype=torch.int64, device="cpu")
    for host in sorted({*world.hosts} - {world.hosts[0]}):
        first = world.hosts.index(host)
        rounds: list[tuple[int, int]] = []
        for _ in range(_ROUNDS if world.rank in (0, first) else 0):
            if world.rank:
                dist.recv(stamp, group=group, group_src=0)
                stamp.fill_(now())
                dist.send(stamp, group=group, group_dst=0)
            else:
                start = now()
                dist.send(stamp, group=group, group_dst=first)
                dist.recv(stamp, group=group, group_src=first)
                stop = now()
                rounds.append((stop - start, int(stamp) - (start + stop) // 2))
        for rank in range(world.ranks):
            if rounds and world.hosts[rank] == host:
                offsets[rank] = min(rounds)[1]
    return offsets
