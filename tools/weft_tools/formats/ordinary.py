"""Plans of other systems as engines execute them: ordinary plans, with the lanes, the memory and
the signals of weft's own.

The proof of a plan of another system is of that plan, with its threads, its memory and its weakest
signals. `ordinary` only adds order: it makes a plan that engines execute and the proof accepts
too, but that says less about the original.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft.plan.language import (
    LANES,
    Buffer,
    Copy,
    Instruction,
    Notify,
    Plan,
    Region,
    Signal,
    Wait,
    is_engines_lane,
    reads,
    writes,
)
from weft.plan.values import Term, Value, mapped

Lane = tuple[Instruction, ...]


def ordinary(plan: Plan) -> Plan:
    """The plan for engines: a lane for each thread block and port, workspaces for private memory,
    and for flags signals.

    A buffer ``x`` that is input and output becomes an input ``x_in``, a workspace, and an output
    ``x_out`` of the rows that the plan promises. A plan that is ordinary is returned.
    """
    names = {name for lanes in plan.lanes for name in lanes}
    imported = any(buffer.role in ("inout", "private") for buffer in plan.buffers.values())
    if not imported and all(map(is_engines_lane, names)):
        return plan
    return _Ordinary(plan).made()


class _Ordinary:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inout = [name for name, each in plan.buffers.items() if each.role == "inout"]
        self.flagged = {name for name, each in plan.buffers.items() if each.flagged}
        self.given = {name for name, each in plan.buffers.items() if each.given} - {*self.inout}
        self.shares = bool(plan.buffers.keys() - self.given)
        # of each rank and flagged buffer the signals of its rows, with their counts
        self.flags: dict[tuple[int, str], list[tuple[Region, Signal, int]]] = defaultdict(list)

    def made(self) -> Plan:
        raised = [self.with_flags(rank, lanes) for rank, lanes in enumerate(self.plan.lanes)]
        lanes = [self.lanes(rank, own) for rank, own in enumerate(raised)]
        buffers = {name: self.plan.buffers[name] for name in self.given}
        for name in self.plan.buffers.keys() - self.given:
            rows = self.plan.buffers[name].rows
            buffers[name] = Buffer("workspace", rows)
            if name in self.inout:
                after = tuple(
                    sum(region.rows for region in self.promised(rank, name))
                    for rank in range(self.plan.ranks)
                )
                buffers |= {
                    f"{name}_in": Buffer("input", rows),
                    f"{name}_out": Buffer("output", after),
                }
        ordered = {name: buffers[name] for name in sorted(buffers)}
        return replace(self.plan, lanes=tuple(lanes), buffers=ordered, result=self.result())

    def promised(self, rank: int, name: str) -> list[Region]:
        """The regions of a rank's buffer that the result promises, in their order."""
        return sorted(region for region in self.plan.result if region[:2] == (rank, name))

    def out(self, region: Region) -> Region:
        """Where promised rows are in the output."""
        earlier = self.promised(region.rank, region.buffer)
        start = sum(each.rows for each in earlier if each < region)
        return Region(region.rank, f"{region.buffer}_out", start, start + region.rows)

    def result(self) -> Mapping[Region, Value]:
        def renamed(term: Term, by: int) -> Term:
            name = f"{term.buffer}_in" if term.buffer in self.inout else term.buffer
            return term._replace(buffer=name, shift=term.shift + by)

        found = {}
        for region, value in self.plan.result.items():
            target = self.out(region) if region.buffer in self.inout else region
            by = region.start - target.start
            found[target] = mapped(value, lambda term, by=by: renamed(term, by))  # type: ignore[misc]
        return found

    def with_flags(self, rank: int, lanes: Mapping[str, Lane]) -> list[list[Instruction]]:
        """The lanes of a rank, with a notify after each write of rows with flags."""
        return [[*self.notified(rank, at, lane)] for at, lane in enumerate(lanes.values())]

    def notified(self, rank: int, at: int, lane: Lane) -> Iterator[Instruction]:
        signal, counts = Signal(f"flags {at}", rank), Counter[int]()
        for instruction in lane:
            match instruction:
                case Notify():
                    yield replace(instruction, relaxed=False)
                case _:
                    yield instruction
            for dst in writes(instruction):
                if dst.buffer in self.flagged:
                    counts[dst.rank] += 1
                    self.flags[dst[:2]].append((dst, signal, counts[dst.rank]))
                    yield Notify(dst.rank, signal)

    def waiting(self, rank: int, lane: Sequence[Instruction]) -> Iterator[Instruction]:
        """The lane with waits for the flags of what it reads."""
        for instruction in lane:
            for src in reads(instruction):
                for region, signal, count in self.flags.get(src[:2], ()):
                    if region.overlaps(src):
                        yield Wait(signal, count)
            yield instruction

    def lanes(self, rank: int, lanes: Sequence[Sequence[Instruction]]) -> Mapping[str, Lane]:
        """The lanes of a rank: the first one begins before the others, and ends after them."""
        peers = [peer for peer in range(self.plan.ranks) if peer != rank] if self.shares else []
        begun = Signal("begun", rank)
        ended = [Signal(f"ended {at}", rank) for at in range(1, len(lanes))]
        rows = {name: self.plan.buffers[name].rows[rank] for name in self.inout}
        first: list[Instruction] = [Wait(Signal("free", peer), 0) for peer in peers]
        first += [
            Copy(Region(rank, f"{name}_in", 0, many), Region(rank, name, 0, many))
            for name, many in rows.items()
        ]
        last: list[Instruction] = [Wait(signal, 1) for signal in ended]
        last += [
            Copy(region, self.out(region)) for name in rows for region in self.promised(rank, name)
        ]
        last += [Notify(peer, Signal("free", rank)) for peer in peers]
        own, *others = (self.waiting(rank, lane) for lane in lanes)
        start = [Notify(rank, begun)] if others else []
        made: dict[str, Lane] = {LANES[0]: (*first, *start, *own, *last)}
        for at, (lane, end) in enumerate(zip(others, ended, strict=True)):
            name = f"{LANES[1]}{at or ''}"
            made[name] = (Wait(begun, 1), *lane, Notify(rank, end))
        return made
