"""Traces: a span for every instruction of every rank of an execution, and their Perfetto files.

Every engine reports the same spans, so figures, pictures and exports are made only here and in
the tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.plan import Compute, Instruction, writes
from weft.version import __version__

KINDS = ("copy", "reduce", "wait", "notify")
"""The kinds of spans, next to the names of kernels: the kind of a Compute is its kernel."""


_PROGRAM = ", program "


def of_program(lane: str, number: int) -> str:
    """The lane in which a trace shows one program of a kernel that executes instructions of `lane`:
    each of its tiles as a part of the instruction.
    """
    return f"{lane}{_PROGRAM}{number:03}"


def lane_of(name: str) -> str:
    """The lane of the plan whose instructions a lane of a trace shows."""
    return name.partition(_PROGRAM)[0]


class Span(NamedTuple):
    """The execution of one instruction.

    `kind` is one of `KINDS` or the name of a kernel, `text` the instruction as `weft.plan.show`
    prints it, `rows` the number of rows that it writes. `start` and `stop` are nanoseconds of the
    monotonic clock of rank 0's host.
    """

    rank: int
    lane: str
    kind: str
    text: str
    rows: int
    start: int
    stop: int

    @classmethod
    def of(cls, rank: int, lane: str, instruction: Instruction, start: int, stop: int) -> Span:
        """The span of an instruction over rows."""
        rows = sum(region.rows for region in writes(instruction))
        kernel = instruction.kernel if isinstance(instruction, Compute) else None
        kind = kernel.name if kernel else type(instruction).__name__.lower()
        return cls(rank, lane, kind, str(instruction), rows, start, stop)


@dataclass(frozen=True)
class Trace:
    """The spans of all ranks during some executions, in order of their start, under a title."""

    title: str
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        """The time at which the first rank began, in nanoseconds."""
        return min((span.start for span in self.spans), default=0)

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last rank's end."""
        return (max((span.stop for span in self.spans), default=0) - self.start) / 1e9

    @property
    def lanes(self) -> list[tuple[int, str]]:
        """``(rank, lane)`` of all lanes, rank by rank, ``compute`` first."""
        return sorted(
            {(span.rank, span.lane) for span in self.spans},
            key=lambda lane: (lane[0], lane_of(lane[1]) != "compute", lane[1]),
        )

    def without_programs(self) -> Trace:
        """The trace with the lanes of plans only."""
        return Trace(self.title, tuple(s for s in self.spans if s.lane == lane_of(s.lane)))

    def arrows(self) -> Iterator[tuple[int, int]]:
        """The numbers, in `spans`, of each notify and of the wait that it ended.

        A wait for a counter to reach n is ended by the n-th notify of that counter. Counters that
        count again from the beginning have none, since several executions cannot be distinguished.
        """
        raised, awaited = dict[tuple[int, str], list[int]](), dict[tuple[int, str], list[Any]]()
        for number, span in sorted(enumerate(self.spans), key=lambda found: found[1].stop):
            if notify := re.fullmatch(r"(?:notify|begun) +(.+) on (\d+)", span.text):
                raised.setdefault((int(notify[2]), notify[1]), []).append(number)
            elif wait := re.fullmatch(r"wait +(.+) >= (\d+)", span.text):
                awaited.setdefault((span.rank, wait[1]), []).append((int(wait[2]), number))
        for counter, waits in awaited.items():
            counts, notifies = [count for count, _ in waits], raised.get(counter, [])
            if counts == sorted({*counts}):
                for count, number in waits:
                    if 0 < count <= len(notifies):
                        yield notifies[count - 1], number

    def hidden_copies(self) -> float | None:
        """The part (0 to 1) of the time ranks spend copying in which the same rank computes too;
        None if nothing is copied.
        """
        copying = hidden = 0
        for rank in {rank for rank, _ in self.lanes}:
            spans = [span for span in self.spans if span.rank == rank]
            copies = _union((span.start, span.stop) for span in spans if span.kind == "copy")
            computes = _union((span.start, span.stop) for span in spans if span.kind not in KINDS)
            copying += _length(copies)
            hidden += _length(copies) + _length(computes) - _length(_union([*copies, *computes]))
        return hidden / copying if copying else None


def joined(
    title: str, parts: Iterable[Trace | Iterable[Span]], offsets: Sequence[int] | None = None
) -> Trace:
    """One trace of the parts, each of one rank: its trace or its spans. `offsets` are the
    nanoseconds by which the clock of each part is ahead of the first one's, by default none.
    """
    spans = [part.spans if isinstance(part, Trace) else part for part in parts]
    return Trace(
        title,
        tuple(
            sorted(
                (
                    span._replace(start=span.start - offset, stop=span.stop - offset)
                    for part, offset in zip(spans, offsets or [0] * len(spans), strict=True)
                    for span in part
                ),
                key=lambda span: span.start,
            )
        ),
    )


def to_perfetto(*traces: Trace, about: str = "") -> dict[str, Any]:
    """The traces in Chrome's trace event format, which https://ui.perfetto.dev opens if it is
    written as JSON.

    Ranks appear as processes and lanes as threads, with times in microseconds. Each trace starts at
    0, so that several are compared one below the other. An arrow leads from each notify to the wait
    that it ends. ``otherData`` has the version of weft, and `about`, a line on the run. The format
    is that of the "Trace Event Format" document of the Chromium project.
    """
    events: list[dict[str, Any]] = []
    ranks = 1 + max((span.rank for trace in traces for span in trace.spans), default=0)
    for number, trace in enumerate(traces):
        threads, begin = {lane: thread for thread, lane in enumerate(trace.lanes)}, trace.start
        for (rank, lane), thread in threads.items():
            process = number * ranks + rank
            named: dict[str, dict[str, Any]] = {
                "process_name": {"name": f"{trace.title}: rank {rank}"},
                "process_sort_index": {"sort_index": process},
                "thread_name": {"name": lane},
                "thread_sort_index": {"sort_index": thread},
            }
            events += [
                {"ph": "M", "name": key, "pid": process, "tid": thread, "args": args}
                for key, args in named.items()
            ]
        for span in trace.spans:
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.kind} {span.rows} rows" if span.rows else span.kind,
                    "cat": span.kind,
                    "pid": number * ranks + span.rank,
                    "tid": threads[span.rank, span.lane],
                    "ts": (span.start - begin) / 1e3,
                    "dur": (span.stop - span.start) / 1e3,
                    "args": {"instruction": span.text, "rows": span.rows},
                }
            )
        for notify, wait in (map(trace.spans.__getitem__, pair) for pair in trace.arrows()):
            ends = (notify, notify.start, {"ph": "s"}), (wait, wait.stop, {"ph": "f", "bp": "e"})
            identity = len(events)
            for span, at, end in ends:
                events.append(
                    {
                        **end,
                        "id": identity,
                        "name": "signal",
                        "cat": "signal",
                        "pid": number * ranks + span.rank,
                        "tid": threads[span.rank, span.lane],
                        "ts": (max(at - 1, span.start) - begin) / 1e3,
                    }
                )
    other = {"version": f"weft {__version__}", "about": about}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def from_perfetto(file: object) -> list[Trace]:
    """The traces, with titles that differ, of which `to_perfetto` made this JSON object. Each
    starts at 0. Raises `ValueError` for any other object, such as the trace of another program.
    """
    names, threads = dict[int, tuple[str, int]](), dict[tuple[int, int], str]()
    spans = dict[str, list[Span]]()
    try:
        events = file["traceEvents"]  # type: ignore[index]
        for event in events:
            if event["ph"] == "M" and event["name"] == "process_name":
                title, _, rank = event["args"]["name"].rpartition(": rank ")
                names[event["pid"]] = title, int(rank)
            elif event["ph"] == "M" and event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        for event in events:
            if event["ph"] == "X":
                title, rank = names[event["pid"]]
                start, length = (round(1e3 * event[key]) for key in ("ts", "dur"))
                text, rows = event["args"]["instruction"], int(event["args"]["rows"])
                lane = threads[event["pid"], event["tid"]]
                span = Span(rank, lane, event["cat"], text, rows, start, start + length)
                spans.setdefault(title, []).append(span)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
        raise ValueError("the events are not instructions of weft") from None
    if not spans:
        raise ValueError("there are no instructions")
    return [Trace(title, tuple(found)) for title, found in spans.items()]


def _union(intervals: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """What intervals cover together, as disjoint ones in order."""
    united: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], stop)
        else:
            united.append((start, stop))
    return united


def _length(disjoint: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in disjoint)
