"""How ranks hand rows to peers that cannot read them where they are: piece by piece, through a few slots of a workspace.

A slot is written, read and written again while it lies in the caches, so that rows are read from memory once and written once, as
if peers could read them in place. A rank stages a piece before it uses what its peers staged in the step before: they find it when
they come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weft.plan import Copy, Instruction, Notify, Region, Signal, Wait
from weft.schedules.common import after, before, chunks, enter, leave, tidy

SLOTS = 3
"""Slots of a stream. With two, each rank would wait in each step until its peers have done as much as itself."""


class Part(NamedTuple):
    """Rows ``start:stop`` that a rank hands to `readers`."""

    readers: Sequence[int]
    start: int
    stop: int


class Arrival(NamedTuple):
    """Once `wait` is over, rows of `peer` lie in `region`, the `at`-th of their part and following; then `thanks` must be said."""

    peer: int
    wait: Wait
    region: Region
    at: int
    thanks: list[Instruction]


class Stream:
    """The parts that every rank hands out through slots of the workspace `buffer`, in steps: step k is chunk k of each part.

    A rank reads at most one part of each peer. `ready` and `taken` are the names of the signals that say that a step can be read,
    and that it has been; the latter is None where a plan's other signals say it before a slot is used again.
    """

    def __init__(
        self, buffer: str, parts: Sequence[Sequence[Part]], chunk: int, ready: str = "ready", taken: str | None = "taken"
    ) -> None:
        self.parts, self.chunk, self.ready, self.taken = parts, chunk, ready, taken
        self.ranks = len(parts)
        # By rank and step: what is handed out, and where.
        self.pieces = [_cut(Region(rank, buffer, 0, 0), own, chunk) for rank, own in enumerate(parts)]
        # The rows of the buffer on each rank.
        self.rows = tuple(min(len(self.pieces[rank]), SLOTS) * len(own) * chunk for rank, own in enumerate(parts))

    def steps(self, rank: int) -> int:
        """How many steps a rank hands out."""
        return len(self.pieces[rank])

    def handed_out(self, rank: int, step: int) -> list[Part]:
        """What a rank hands out in a step."""
        return [part for part, _ in self.pieces[rank][step]] if step < self.steps(rank) else []

    def stage(self, rank: int, step: int, make: Callable[[Part, Region], Iterable[Instruction]]) -> list[Instruction]:
        """Hand out a step: `make` puts each piece to its place, once nobody needs what was there before."""
        if step >= self.steps(rank):
            return []
        free: list[Instruction] = []
        if self.taken and step >= SLOTS:
            free += [Wait(Signal(self.taken, reader), step - SLOTS + 1) for reader in self._readers(rank, step - SLOTS)]
        made = [instruction for piece in self.pieces[rank][step] for instruction in make(*piece)]
        return [*free, *made, *(Notify(reader, Signal(self.ready, rank)) for reader in self._readers(rank, step))]

    def arrivals(self, rank: int, step: int) -> list[Arrival]:
        """What a rank's peers hand to it in a step."""
        found = []
        for peer in after(rank, self.ranks):
            thanks: list[Instruction] = []
            if self.taken and step + SLOTS < self.steps(peer):
                thanks.append(Notify(peer, Signal(self.taken, rank)))
            for part, region in self.pieces[peer][step] if step < self.steps(peer) else ():
                if rank in part.readers:
                    found.append(Arrival(peer, Wait(Signal(self.ready, peer), step + 1), region, step * self.chunk, thanks))
        return found

    def fetch(self, rank: int, buffer: str, starts: Sequence[int]) -> Callable[[int], list[Instruction]]:
        """What a rank does in a step with what its peers hand to it: copy it to a buffer, where the part of each has its start."""

        def fetched(step: int) -> list[Instruction]:
            found: list[Instruction] = []
            for peer, wait, region, at, thanks in self.arrivals(rank, step):
                start = starts[peer] + at
                found += [wait, Copy(region, Region(rank, buffer, start, start + region.rows)), *thanks]
            return found

        return fetched

    def _readers(self, rank: int, step: int) -> list[int]:
        readers = {reader for part, _ in self.pieces[rank][step] for reader in part.readers}
        return [peer for peer in before(rank, self.ranks) if peer in readers]


def _cut(buffer: Region, parts: Sequence[Part], chunk: int) -> list[list[tuple[Part, Region]]]:
    steps: list[list[tuple[Part, Region]]] = []
    for number, (readers, start, stop) in enumerate(parts):
        for step, (low, high) in enumerate(chunks(stop - start, chunk) if readers else ()):
            at = (step % SLOTS * len(parts) + number) * chunk
            if step == len(steps):
                steps.append([])
            steps[step].append((Part(readers, start + low, start + high), buffer._replace(start=at, stop=at + high - low)))
    return steps


def copies(rank: int, buffer: str) -> Callable[[Part, Region], Iterable[Instruction]]:
    """Stage rows of a buffer as they are."""
    return lambda part, there: [Copy(Region(rank, buffer, part.start, part.stop), there)]


def pipeline(
    rank: int, streams: Sequence[Stream], stages: Sequence[Callable[[int], Iterable[Instruction]]]
) -> tuple[Instruction, ...]:
    """A rank's lane: step k of the first of `stages`, then step k - 1 of the next, and so on; each is given the step.

    A stream is staged in one of them and read in the next.
    """
    ranks = streams[0].ranks
    steps = max(stream.steps(r) for stream in streams for r in range(ranks))
    lane = [
        instruction
        for step in range(steps + len(stages) - 1)
        for lag, stage in enumerate(stages)
        if 0 <= step - lag < steps
        for instruction in stage(step - lag)
    ]
    first = enter(rank, ranks) if any(stream.steps(rank) for stream in streams) else []
    last = leave(rank, ranks) if any(stream.arrivals(rank, 0) for stream in streams) else []
    return tidy([*first, *lane, *last])
