"""How ranks hand rows to peers that cannot read them where they are: piece by piece, through a few
slots of a workspace.

A slot is written, read and written again while it lies in the caches, so that rows are read from
memory once and written once, as if peers could read them in place. A rank stages a piece before it
uses what its peers staged in the step before: they find it when they come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Region, Signal, Wait
from weft.plan.language import ANY_BLOCK
from weft.schedules.common import after, before, block, enter, hear, leave, tell

SLOTS = 3
"""Slots of a part. With two, each rank would wait in each step until its peers have done as much as
itself.
"""

SHARED_SLOTS = 2
"""Slots that two ranks share on each: one is written while what the other holds is read."""


class Part(NamedTuple):
    """Blocks from `start` on that a rank hands to `readers`."""

    readers: Sequence[int]
    start: int


class Arrival(NamedTuple):
    """Once `wait` is over, a block of `peer` lies in `region`; then `thanks` must be said."""

    peer: int
    wait: Wait
    region: Region
    thanks: list[Instruction]


class Stream:
    """The parts that every rank hands out through slots of the workspace `buffer`, in steps: step k
    is block k of each part.

    All parts have as many `pieces`, and a rank reads at most one part of each peer. `ready` and
    `taken` are the names of the signals that say that a step can be read, and that it has been; the
    latter is None where a plan's other signals say it before a slot is used again.

    Two ranks that hand parts to each other, and nobody else these, share their slots: each writes
    where it has read the step before last. So it need not be told that a slot is free, and what it
    writes to is in its own cache. What it wrote last is in the other's, which would have to give it
    up line after line.
    """

    def __init__(
        self,
        buffer: str,
        parts: Sequence[Sequence[Part]],
        pieces: int,
        ready: str = "ready",
        taken: str | None = "taken",
    ) -> None:
        self.buffer, self.parts, self.pieces, self.ready, self.taken = (
            buffer,
            parts,
            pieces,
            ready,
            taken,
        )
        self.ranks = len(parts)
        # Of each rank's parts those that nobody else reads, by their reader.
        self.exclusive = [
            {own.readers[0]: number for number, own in enumerate(of) if len(own.readers) == 1}
            for of in parts
        ]
        self.room = Buffer.of(
            "workspace",
            [
                (ANY_BLOCK,) * min(self.steps(rank), SLOTS) * len(own)
                for rank, own in enumerate(parts)
            ],
        )

    def shares(self, rank: int, peer: int) -> bool:
        """Whether two ranks hand each other parts that nobody else reads."""
        return peer in self.exclusive[rank] and rank in self.exclusive[peer]

    def steps(self, rank: int) -> int:
        """How many steps a rank hands out."""
        return self.pieces if any(part.readers for part in self.parts[rank]) else 0

    def stage(
        self, rank: int, step: int, make: Callable[[int, Region], Iterable[Instruction]]
    ) -> list[Instruction]:
        """Hand out a step: `make` puts each block to its place, once nobody needs what was there
        before.
        """
        if step >= self.steps(rank):
            return []
        readers, lane = self._readers(rank), list[Instruction]()
        if self.taken and step >= SLOTS:
            lane += hear(
                self.taken,
                (peer for peer in readers if not self.shares(rank, peer)),
                step - SLOTS + 1,
            )
        for number, part in enumerate(self.parts[rank]):
            if part.readers:
                lane += make(part.start + step, self._slot(rank, number, step))
        return lane + tell(rank, self.ready, readers)

    def stage_own(self, rank: int) -> Callable[[int], list[Instruction]]:
        """What a rank does in a step to hand out its ``a`` as it is."""
        return lambda step: self.stage(
            rank, step, lambda number, slot: [Copy(block(rank, "a", number), slot)]
        )

    def arrivals(self, rank: int, step: int) -> list[Arrival]:
        """What a rank's peers hand to it in a step."""
        found = []
        for peer in after(rank, self.ranks):
            thanks: list[Instruction] = []
            if self.taken and step + SLOTS < self.steps(peer) and not self.shares(rank, peer):
                thanks = tell(rank, self.taken, [peer])
            for number, part in enumerate(self.parts[peer]) if step < self.steps(peer) else ():
                if rank in part.readers:
                    wait = Wait(Signal(self.ready, peer), step + 1)
                    found.append(Arrival(peer, wait, self._slot(peer, number, step), thanks))
        return found

    def fetch(
        self, rank: int, buffer: str, starts: Sequence[int]
    ) -> Callable[[int], list[Instruction]]:
        """What a rank does in a step with what its peers hand to it: copy it to a buffer, where the
        part of each has its start.
        """

        def fetched(step: int) -> list[Instruction]:
            found: list[Instruction] = []
            for peer, wait, region, thanks in self.arrivals(rank, step):
                found += [wait, Copy(region, block(rank, buffer, starts[peer] + step)), *thanks]
            return found

        return fetched

    def _slot(self, rank: int, part: int, step: int) -> Region:
        """Where a rank's part lies in a step."""
        reader = self.parts[rank][part].readers[0]
        if not self.shares(rank, reader):
            return block(rank, self.buffer, step % SLOTS * len(self.parts[rank]) + part)
        if step // SHARED_SLOTS % 2:
            rank, part = reader, self.exclusive[reader][rank]
        return block(rank, self.buffer, step % SHARED_SLOTS * len(self.parts[rank]) + part)

    def _readers(self, rank: int) -> list[int]:
        readers = {reader for part in self.parts[rank] for reader in part.readers}
        return [peer for peer in before(rank, self.ranks) if peer in readers]


def one_for_each(ranks: int, pieces: int, taken: str | None = "taken") -> Stream:
    """Every rank hands each peer the part of ``a`` that is for it: its p-th share for rank p."""
    parts = [[Part([p] if p != r else [], p * pieces) for p in range(ranks)] for r in range(ranks)]
    return Stream("staged", parts, pieces, taken=taken)


def pipeline(
    rank: int, streams: Sequence[Stream], stages: Sequence[Callable[[int], Iterable[Instruction]]]
) -> list[Instruction]:
    """A rank's lane: step k of the first of `stages`, then step k - 1 of the next, and so on; each
    is given the step.

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
    return [*first, *lane, *last]
