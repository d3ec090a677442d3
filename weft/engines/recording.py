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

import weft._native as _native
from weft.engines.program import Timed
from weft.plan import Plan
from weft.plan.binding import bind
from weft.plan.trace import Span, Trace, joined, lane_of
from weft.world import World
from weft.world.values import all_gather_texts, all_gather_values

_log = logging.getLogger("weft")
_ROUNDS = 20  # requests for the time per host


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

    def gather(self, title: str) -> Trace | None:
        """The trace of all ranks on rank 0, None elsewhere; collective, in the world of the
        recording.
        """
        parts = all_gather_values(self.world, [*self._spans()], list[Span])
        offsets = clock_offsets(self.world)
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


def clock_offsets(world: World, now: Callable[[], int] = _native.now) -> list[int]:
    """The nanoseconds by which each rank's clock `now` is ahead of rank 0's, on rank 0; zeros on
    other ranks. Collective.

    In each of several rounds a rank sends its time once it has received from all ranks. This counts
    as the time half-way between the beginning and the end of the round on rank 0, in the fastest
    round (F. Cristian, "Probabilistic clock synchronization"). The error is less than half of that.
    """
    offsets = [0] * world.ranks
    rounds = list[tuple[int, int, list[int]]]()
    for _ in range(_ROUNDS if world.hosts.several else 0):
        start = now()
        all_gather_texts(world, "")
        theirs = all_gather_texts(world, str(now()))
        stop = now()
        rounds.append((stop - start, (start + stop) // 2, [*map(int, theirs)]))
    for _, middle, times in sorted(rounds)[: world.rank == 0]:
        offsets = [
            0 if host == world.hosts[0] else time - middle
            for host, time in zip(world.hosts, times, strict=True)
        ]
    return offsets
