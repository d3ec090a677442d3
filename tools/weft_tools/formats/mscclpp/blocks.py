"""A thread block while it is read: its lane, in the order that its threads guarantee.

What its threads do not order the lane does not order either: without a ``nop`` between them

- a signal does not cover the rows that the block moves before it: it is a relaxed notify;
- a wait does not hold back the rows that the block moves after it: it comes after them;
- two operations of a block on the same rows are a defect; one that waits for packets may follow
  from the other, so it has its own lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft.plan import Instruction, Notify, Signal, Wait
from weft.plan.language import thread_block

DEFERRED = 1_000_000
"""Added to the number of a thread block in the names of further lanes of it."""


class Placed(NamedTuple):
    """An instruction, and the number of its operation."""

    instruction: Instruction
    number: int


def deferred(block: int, number: int) -> str:
    """The name of the lane of an operation that comes when other threads of its thread block may
    still be in the operations before: ``tb1000005`` is the second such lane, of thread block 5.
    """
    return thread_block((number + 1) * DEFERRED + block)


@dataclass
class Block:
    """A thread block while it is read: its lane, and since its threads last met the instructions
    that move rows, the threads that wait, and the waits that hold back only what comes after the
    next meeting.
    """

    rank: int
    number: int
    lane: list[Placed] = field(default_factory=list)
    moves: list[Placed] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    waits: list[Placed] = field(default_factory=list)
    start: int = 0
    deferred_lanes: list[list[Placed]] = field(default_factory=list)
    deferred_of: dict[int | None, int] = field(default_factory=dict)
    met: int = 0

    ordered: bool = False

    def meet(self) -> None:
        """All threads of the block meet."""
        self.order()
        for number, deferred in enumerate(self.deferred_lanes[self.met :], self.met):
            done = Signal(f"turned {number} of {self.number}", self.rank)
            deferred.append(Placed(Notify(self.rank, done), deferred[-1].number))
            self.lane.append(Placed(Wait(done, 1), deferred[-1].number))
        self.met = len(self.deferred_lanes)
        self.deferred_of.clear()
        self.start = len(self.lane)
        self.moves.clear()
        self.waiting.clear()
        self.ordered = False

    def deferred(self, moves: Sequence[Placed], after: int | None) -> None:
        """Let instructions come after the operations before them, but know of those only what the
        block has done before its threads last met, and what it did in operation `after`.
        """
        self.order()
        at, number = moves[0].number, self.deferred_of.get(after, len(self.deferred_lanes))
        knows, comes = (
            Signal(f"{what} {number} of {self.number}", self.rank) for what in ("deferred", "turn")
        )
        if number == len(self.deferred_lanes):
            self.lane.insert(self.start, Placed(Notify(self.rank, knows), at))
            self.deferred_lanes.append([Placed(Wait(knows, 1), at)])
        turns = sum(i == Notify(self.rank, comes, relaxed=True) for i, _ in self.lane)
        self.lane.append(Placed(Notify(self.rank, comes, relaxed=True), at))
        self.deferred_lanes[number] += [Placed(Wait(comes, turns + 1), at), *moves]
        self.deferred_of[at] = number

    def order(self) -> None:
        """Let what comes next come after the waits."""
        self.ordered = self.ordered or bool(self.waits)
        self.lane += self.waits
        self.waits.clear()

    def wait(self, thread: int, wait: Wait, at: int) -> None:
        self.waiting.add(thread)
        self.waits.append(Placed(wait, at))

    def notify(self, thread: int, notify: Notify, at: int) -> None:
        """Notify by one thread, which knows what the block has done before the last meeting, and
        what it has waited for itself.
        """
        self.order()
        alone = self.moves or self.waiting - {thread}
        self.lane.append(Placed(replace(notify, relaxed=notify.relaxed or bool(alone)), at))
