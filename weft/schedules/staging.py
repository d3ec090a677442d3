"""Staging: rows that peers cannot read in place are sent piece by piece, through a few slots of a
workspace.

A slot is written, read and written again while it is in the caches, so that rows are read from
memory once and written once, as if peers could read them in place. A rank stages a piece before it
uses the pieces that its peers staged in the previous step, so that peers do not wait for it.

Rank 0 of three with three slots s0 to s2 and four pieces, time to the right; ``!`` notifies the
peers, ``?`` waits for them::

    | 0 in s0 |!| 1 in s1 |!|?| get 0 |!| 2 in s2 |!|?| get 1 |?| 3 in s0 |!|?| get 2 |?| get 3 |

The peers notify a rank when they have taken piece 0, and only then it stages piece 3 in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Region, Signal, Wait
from weft.plan.language import ANY_BLOCK
from weft.schedules.blocks import block
from weft.schedules.lanes import enter, leave, notify_all, wait_all
from weft.schedules.peers import after, before

SLOTS = 3
"""Slots of a part, the fewest with which no rank waits in each step for its peers' previous one."""

SHARED_SLOTS = 2
"""Slots that two ranks share on each: one is written while the other is read.

Measured on a 2-core Zen 4: all-gathers in place of 256 KiB take 20 us, by slots of each rank 40.
"""


class Part(NamedTuple):
    """Blocks from `start` on that a rank sends to `readers`."""

    readers: Sequence[int]
    start: int


class SlotArrival(NamedTuple):
    """After `wait` a block of `peer` is in `region`; after its use `acknowledge` must follow."""

    peer: int
    wait: Wait
    region: Region
    acknowledge: list[Instruction]


class Stream:
    """The parts that every rank sends through slots of the workspace `buffer`, in steps: step k is
    block k of each part.

    All parts have `pieces` blocks, and a rank reads at most one part of each peer. `ready` is the
    name of the signal that a step can be read, `taken` of the signal that it was read: None if
    other signals of the plan imply it before a slot is used again. `slots` is the workspace.

    Two ranks that exchange parts only with each other share their slots: each writes to the slot
    that it read in the step before last. So no signal that a slot is free is needed, and the slot
    is in the writer's own cache; the slot that it wrote last is in its peer's cache, which would
    have to release each line.
    """

    def __init__(
        self,
        buffer: str,
        parts: Sequence[Sequence[Part]],
        pieces: int,
        ready: str = "ready",
        taken: str | None = "taken",
    ) -> None:
        self.buffer = buffer
        self.parts = parts
        self.pieces = pieces
        self.ready = ready
        self.taken = taken
        self.ranks = len(parts)
        # each rank's parts with one reader, by the reader
        self.exclusive = [
            {own.readers[0]: number for number, own in enumerate(of) if len(own.readers) == 1}
            for of in parts
        ]
        self.slots = Buffer.of(
            "workspace",
            [
                (ANY_BLOCK,) * min(self.steps(rank), SLOTS) * len(own)
                for rank, own in enumerate(parts)
            ],
        )

    def shares(self, rank: int, peer: int) -> bool:
        """Whether two ranks exchange parts that no other rank reads."""
        return peer in self.exclusive[rank] and rank in self.exclusive[peer]

    def steps(self, rank: int) -> int:
        """The number of steps that a rank sends."""
        return self.pieces if any(part.readers for part in self.parts[rank]) else 0

    def stage(
        self, rank: int, step: int, make: Callable[[int, Region], Iterable[Instruction]]
    ) -> list[Instruction]:
        """Send a step: `make` puts each block into its slot, after its previous readers have
        ended.
        """
        if step >= self.steps(rank):
            return []
        readers = self._readers(rank)
        lane = list[Instruction]()
        if self.taken and step >= SLOTS:
            lane += wait_all(
                self.taken,
                (peer for peer in readers if not self.shares(rank, peer)),
                step - SLOTS + 1,
            )
        for number, part in enumerate(self.parts[rank]):
            if part.readers:
                lane += make(part.start + step, self._slot(rank, number, step))
        return lane + notify_all(rank, self.ready, readers)

    def stage_own(self, rank: int) -> Callable[[int], list[Instruction]]:
        """The instructions of a step in which a rank sends its ``a`` unchanged."""
        return lambda step: self.stage(
            rank, step, lambda number, slot: [Copy(block(rank, "a", number), slot)]
        )

    def arrivals(self, rank: int, step: int) -> list[SlotArrival]:
        """The blocks that a rank's peers send to it in a step."""
        found = []
        for peer in after(rank, self.ranks):
            acknowledge: list[Instruction] = []
            if self.taken and step + SLOTS < self.steps(peer) and not self.shares(rank, peer):
                acknowledge = notify_all(rank, self.taken, [peer])
            for number, part in enumerate(self.parts[peer]) if step < self.steps(peer) else ():
                if rank in part.readers:
                    wait = Wait(Signal(self.ready, peer), step + 1)
                    found.append(
                        SlotArrival(peer, wait, self._slot(peer, number, step), acknowledge)
                    )
        return found

    def fetch(
        self, rank: int, buffer: str, starts: Sequence[int]
    ) -> Callable[[int], list[Instruction]]:
        """The instructions of a step that copy its arrivals to a buffer, each peer's part from its
        start on.
        """

        def fetched(step: int) -> list[Instruction]:
            found: list[Instruction] = []
            for peer, wait, region, acknowledge in self.arrivals(rank, step):
                target = block(rank, buffer, starts[peer] + step)
                found += [wait, Copy(region, target), *acknowledge]
            return found

        return fetched

    def _slot(self, rank: int, part: int, step: int) -> Region:
        """The slot of a rank's part in a step."""
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
    """A stream in which every rank sends each peer its share of ``a``: the p-th to rank p."""
    parts = [[Part([p] if p != r else [], p * pieces) for p in range(ranks)] for r in range(ranks)]
    return Stream("staged", parts, pieces, taken=taken)


def pipeline(
    rank: int, streams: Sequence[Stream], stages: Sequence[Callable[[int], Iterable[Instruction]]]
) -> list[Instruction]:
    """A rank's lane: step k of the first of `stages`, then step k - 1 of the next, and so on.

    Each of `stages` is a function of the step. A stream is staged in one stage and read in the
    next.
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
