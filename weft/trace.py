"""Where the time of an execution went: a span for every instruction of every rank, and their export to Perfetto.

    with weft.trace.record(world) as recording:
        weft.all_gather_matmul(a, b)
    trace = recording.gather("pipelined")       # collective; a Trace on rank 0, None elsewhere
    if trace:
        json.dump(weft.trace.to_perfetto(trace), file)

Every engine reports the same spans, so figures, pictures and exports are made here and in `weft.bench.timeline` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import _native
from weft.plan import Plan, writes
from weft.world import World

KINDS = ("matmul", "copy", "reduce", "wait", "notify")
"""The kinds of spans: the five instructions."""

_ROUNDS = 20  # of asking another host for the time


class Span(NamedTuple):
    """One instruction as it ran.

    `kind` is one of `KINDS`, `text` the instruction as `weft.plan.show` prints it, `rows` how many it writes. `start` and `stop`
    are nanoseconds of the monotonic clock of rank 0's host.
    """

    rank: int
    lane: str
    kind: str
    text: str
    rows: int
    start: int
    stop: int


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks during some executions, in order of their start, under a title."""

    title: str
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        """When the first rank began, in nanoseconds."""
        return min((span.start for span in self.spans), default=0)

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last rank's end."""
        return (max((span.stop for span in self.spans), default=0) - self.start) / 1e9

    @property
    def lanes(self) -> list[tuple[int, str]]:
        """``(rank, lane)`` of all lanes, rank by rank, ``compute`` first."""
        return sorted({(span.rank, span.lane) for span in self.spans}, key=lambda lane: (lane[0], lane[1] != "compute", lane[1]))

    def hidden_copies(self) -> float | None:
        """The part (0 to 1) of the time ranks spend copying in which the same rank multiplies too; None if nothing is copied."""
        copying = hidden = 0
        for rank in {rank for rank, _ in self.lanes}:
            copies, products = (_union(s for s in self.spans if s.rank == rank and s.kind == kind) for kind in ("copy", "matmul"))
            copying += sum(stop - start for start, stop in copies)
            hidden += sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in products)
        return hidden / copying if copying else None


class Recording:
    """The executions of one rank since `record` began."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.executions: list[tuple[Plan, list[tuple[str, int, int, int]]]] = []

    def add(self, plan: Plan, spans: list[tuple[str, int, int, int]]) -> None:
        """Take note of an execution; called by engines with ``(lane, index of the instruction, start, stop)``."""
        self.executions.append((plan, spans))

    def gather(self, title: str, group: dist.ProcessGroup | None = None) -> Trace | None:
        """The trace of all ranks on rank 0, None elsewhere; collective over `group`, the one the world was made with."""
        spans = [*self._spans()]
        if self.world.ranks > 1:
            parts: list[Any] | None = [None] * self.world.ranks if self.world.rank == 0 else None
            offsets = clock_offsets(self.world, group)
            dist.gather_object(spans, parts, group=group, group_dst=0)
            if parts is None:
                return None
            spans = [_shifted(span, offset) for part, offset in zip(parts, offsets, strict=True) for span in part]
        return Trace(title, tuple(sorted(spans, key=lambda span: span.start)))

    def _spans(self) -> Iterator[Span]:
        for plan, spans in self.executions:
            for lane, index, start, stop in spans:
                instruction = plan.lanes[self.world.rank][lane][index]
                rows = sum(region.rows for region in writes(instruction))
                yield Span(self.world.rank, lane, type(instruction).__name__.lower(), str(instruction), rows, start, stop)


def clock_offsets(world: World, group: dist.ProcessGroup | None = None, now: Callable[[], int] = _native.now) -> list[int]:
    """By how many nanoseconds each rank's clock `now` is ahead of rank 0's; known to rank 0, zeros elsewhere. Collective.

    Rank 0 asks one rank of each other host for the time, and takes it for that of half-way between its question and the answer, in
    the fastest of several rounds (F. Cristian, "Probabilistic clock synchronization"). It is off by less than half that round.
    """
    offsets, stamp = [0] * world.ranks, torch.zeros(1, dtype=torch.int64)
    for host in sorted({*world.hosts} - {world.hosts[0]}):
        asked = world.hosts.index(host)
        rounds: list[tuple[int, int]] = []
        for _ in range(_ROUNDS if world.rank in (0, asked) else 0):
            if world.rank:
                dist.recv(stamp, group=group, group_src=0)
                stamp.fill_(now())
                dist.send(stamp, group=group, group_dst=0)
            else:
                begun = now()
                dist.send(stamp, group=group, group_dst=asked)
                dist.recv(stamp, group=group, group_src=asked)
                ended = now()
                rounds.append((ended - begun, int(stamp) - (begun + ended) // 2))
        for rank in range(world.ranks):
            if rounds and world.hosts[rank] == host:
                offsets[rank] = min(rounds)[1]
    return offsets


def _shifted(span: Span, offset: int) -> Span:
    return span._replace(start=span.start - offset, stop=span.stop - offset)


@contextmanager
def record(world: World) -> Iterator[Recording]:
    """Record this rank's part of every execution in `world` inside the ``with`` block; not collective."""
    world.recorder = recording = Recording(world)
    world.native.trace(True)
    try:
        yield recording
    finally:
        world.native.trace(False)
        world.recorder = None


def to_perfetto(*traces: Trace) -> dict[str, Any]:
    """The traces in Chrome's trace event format, which https://ui.perfetto.dev opens once it is written as JSON.

    Ranks appear as processes and lanes as threads, with times in microseconds. Each trace starts at 0, so that several are
    compared one below the other. The format is that of the "Trace Event Format" document of the Chromium project.
    """
    events: list[dict[str, Any]] = []
    for number, trace in enumerate(traces):
        ranks = 1 + max((rank for rank, _ in trace.lanes), default=0)
        threads = {lane: thread for thread, lane in enumerate(trace.lanes)}
        for (rank, lane), thread in threads.items():
            process = number * ranks + rank
            events += [
                _name("process_name", process, thread, name=f"{trace.title}: rank {rank}"),
                _name("process_sort_index", process, thread, sort_index=process),
                _name("thread_name", process, thread, name=lane),
                _name("thread_sort_index", process, thread, sort_index=thread),
            ]
        for span in trace.spans:
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.kind} {span.rows} rows" if span.rows else span.kind,
                    "cat": span.kind,
                    "pid": number * ranks + span.rank,
                    "tid": threads[span.rank, span.lane],
                    "ts": (span.start - trace.start) / 1e3,
                    "dur": (span.stop - span.start) / 1e3,
                    "args": {"instruction": span.text, "rows": span.rows},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _union(spans: Iterable[Span]) -> Sequence[tuple[int, int]]:
    """The intervals that spans cover together, apart from each other and in order."""
    united: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if united and span.start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], span.stop)
        else:
            united.append((span.start, span.stop))
    return united
