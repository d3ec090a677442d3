"""The rows that plans access in a run: what they hold, and whether accesses to them are ordered.

Each lane has a vector clock. Accesses that the clocks do not order could happen in either order,
and are a race. The clocks were invented by Mattern and Fidge; the race check is the happens-before
test of Lamport's "Time, Clocks, and the Ordering of Events". Rows with flags order more: who reads
one knows that its writer has begun, and the reads that the row follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.plan import Compute, Copy, Instruction, Plan, Reduce, Region, Term, reads, writes
from weft.plan.language import ANY_BLOCK, aligned
from weft.plan.messages import ending, is_channel
from weft.plan.symbols import Cell, Pieces, Read, RowsOfValue
from weft.plan.values import shifted

Clock = list[int]

Place = tuple[int, str, int, int]
"""A region as a plain tuple, which costs less: a proof makes millions of them."""

Where = Callable[[int, str, int], str]
"""Names an instruction, by its rank, its lane and its position there, as users know it."""


class Knowledge(NamedTuple):
    """What a lane knows of: all up to a clock, and single reads; their `shift` is the row."""

    clock: Clock
    reads: set[Read]


def known(reads: Collection[Read], lane: int, time: int, region: Place) -> bool:
    """Whether a lane's read of a region at a time is among those that are known."""
    rank, buffer, start, stop = region
    return bool(reads) and all(
        Read(lane, time, rank, buffer, row) in reads for row in range(start, stop)
    )


@dataclass
class Use:
    """A lane's use of a rank's workspace in one execution: its clock at the first access and its
    time at the last.
    """

    first: Clock
    last: int


class Accesses:
    """The lanes of a sequence of plans, and their accesses to rows. `where` names instructions in
    problems, by default by their lanes.
    """

    def __init__(self, plans: list[Plan], where: Where | None) -> None:
        self.plans, self.where = plans, where
        self.found: dict[str, bool] = {}  # in order, and whether it has been reported
        ranks = range(plans[0].ranks)
        self.lanes: list[list[str]] = [
            sorted({name for plan in plans for name in plan.lanes[r]} | {"compute"}) for r in ranks
        ]
        every = [(r, name) for r in ranks for name in self.lanes[r]]
        every += [(r, ending(name)) for r, name in every if is_channel(name)]
        # the number of each lane
        self.index: dict[tuple[int, str], int] = {lane: i for i, lane in enumerate(every)}
        self.rank_of = [r for r, _ in every]
        self.names = [f"rank {r} {name}" for r, name in every]
        self.lane_names = [name for _, name in every]
        # of each lane the position of its instruction, and those of earlier accesses by their time
        self.position = [0] * len(every)
        self.accessed: list[dict[int, int]] = [{} for _ in every]
        self.clocks: list[Clock] = [[0] * len(every) for _ in every]
        self.rows: dict[tuple[int, int, int, str], RowsOfValue] = {}
        self.turns = [
            sum(earlier is plan for earlier in plans[:number]) for number, plan in enumerate(plans)
        ]
        self.flagged = [
            {name for name, buffer in plan.buffers.items() if buffer.flagged} for plan in plans
        ]
        # what is known of a rank that has begun an execution
        self.begun: dict[tuple[int, int], Knowledge] = {}
        # the reads that a lane knows of besides those that its clock orders
        self.known: list[set[Read]] = [set() for _ in every]
        # what a rank has learned from the flags of rows in its execution, which its lanes know
        # afterwards
        self.learned: list[Knowledge] = [Knowledge([0] * len(every), set()) for _ in ranks]
        # the numbers of the blocks in the slots of a buffer, by slot
        self.held: dict[tuple[int, int, str], dict[int, int]] = {}
        self.slots = [
            {name for name, b in plan.buffers.items() if any(ANY_BLOCK in n for n in b.blocks)}
            for plan in plans
        ]
        self.uses: dict[tuple[int, int], dict[int, Use]] = {}
        # the last access of each lane to a rank's eager buffers in one execution
        self.eager_uses: dict[tuple[int, int], dict[int, int]] = {}

    def complain(self, problem: str) -> None:
        self.found.setdefault(problem, False)

    def reported(self) -> Iterator[str]:
        """The problems that are not yet reported."""
        for problem, before in self.found.items():
            if not before:
                self.found[problem] = True
                yield problem

    def place(self, lane: int, time: int | None = None) -> str:
        """Where a lane is, or was at the time of an access."""
        at = self.position[lane] if time is None else self.accessed[lane].get(time)
        if self.where is None or at is None:
            return self.names[lane]
        return self.where(self.rank_of[lane], self.lane_names[lane], at)

    def missing(self, execution: int, instruction: Instruction) -> tuple[Region | None, bool]:
        """Rows with flags that an instruction reads and this execution has not written, if there
        are some, and whether a later one has.
        """
        for src in reads(instruction):
            if src.buffer in self.flagged[execution]:
                rows = self.buffer(execution, src.rank, src.buffer)
                for a, b, cell in rows.over(src.start, src.stop):
                    if cell.execution != execution:
                        return src._replace(start=a, stop=b), cell.execution > execution
        return None, False

    def buffer(self, execution: int, rank: int, name: str) -> RowsOfValue:
        plan = self.plans[execution]
        buffer = plan.buffers[name]
        if buffer.role == "private":
            key = id(plan), self.turns[execution] % buffer.copies, rank, name
        else:
            key = execution, 0, rank, name
        if key not in self.rows:
            self.rows[key] = RowsOfValue(buffer.rows[rank])
        return self.rows[key]

    def use_by_caller(self, execution: int, rank: int) -> None:
        """Access all inputs and outputs as the caller does before and after an execution: it may
        write to them.
        """
        lane = self.index[rank, "compute"]
        for name, buffer in self.plans[execution].buffers.items():
            if not buffer.given:
                continue
            for start, stop, cell in self.buffer(execution, rank, name).over(0, buffer.rows[rank]):
                self.order(
                    execution, lane, "the caller's use", (rank, name, start, stop), cell, write=True
                )
                cell.value = (Term(rank, name, 0),) if buffer.role != "output" else None
                cell.execution = execution

    def read(self, execution: int, lane: int, instruction: Instruction, src: Region) -> Pieces:
        """The values of a region's rows, in pieces counted from its start."""
        pieces = []
        for a, b, cell in self.buffer(execution, src.rank, src.buffer).over(src.start, src.stop):
            region = src.rank, src.buffer, a, b
            if cell.value is None or cell.execution != execution:
                self.complain(
                    f"{self.place(lane)}: {instruction}: {Region(*region)} was not written in this "
                    "execution"
                )
            self.touch(execution, lane, instruction, region, cell, write=False)
            pieces.append((a - src.start, b - src.start, shifted(cell.value or (), src.start)))
        return pieces

    def made_of(
        self, execution: int, lane: int, instruction: Instruction, start: int, stop: int
    ) -> frozenset[Read]:
        """The reads that rows of the destination follow from, each of the same row: those of this
        instruction, and those that the rows which it reads follow from.
        """
        (dst,), time = writes(instruction), self.clocks[lane][lane]
        found = set[Read]()
        for src in reads(instruction):
            by = src.start - dst.start
            found.add(Read(lane, time, src.rank, src.buffer, by))
            for _, _, cell in self.buffer(execution, src.rank, src.buffer).over(
                start + by, stop + by
            ):
                found |= {each._replace(shift=each.shift + by) for each in cell.made_of}
        return frozenset(found)

    def forget(self, execution: int, cell: Cell, region: Place) -> None:
        """Forget the earlier accesses of rows that are about to be written with a value which
        follows from them: from what they have read here, or from reads of ranks that had begun this
        execution, and all that these then knew.
        """
        followed = {
            (each.lane, each.time)
            for each in cell.made_of
            if (each.rank, each.buffer, each.shift) == (*region[:2], 0)
        }
        begun = [self.begun[execution, r] for r in {self.rank_of[e.lane] for e in cell.made_of}]

        def follows(access: tuple[int, int]) -> bool:
            lane, time = access
            return access in followed or any(
                each.clock[lane] >= time or known(each.reads, lane, time, region) for each in begun
            )

        # who has read the rows has done so after they were written
        if cell.writer and (follows(cell.writer) or followed & cell.readers.items()):
            cell.writer = None
        cell.readers = {
            other: time for other, time in cell.readers.items() if not follows((other, time))
        }

    def check_slots(self, execution: int, lane: int, instruction: Copy | Compute | Reduce) -> None:
        """Complain about slots that are read as other blocks than they hold, which may have another
        number of rows, and note the blocks that slots are written with.
        """
        plan, slots = self.plans[execution], self.slots[execution]
        numbers = plan.numbers(plan.sizing_region(instruction))
        dst, *sources = aligned(instruction)
        for src in sources:
            held = self.held.get((execution, src.rank, src.buffer), {})
            if src.buffer in slots and any(
                held.get(at, number) != number for at, number in enumerate(numbers, src.start)
            ):
                self.complain(f"{self.place(lane)}: {instruction}: {src} holds other blocks")
        if dst.buffer in slots:
            held = self.held.setdefault((execution, dst.rank, dst.buffer), {})
            held.update(enumerate(numbers, dst.start))

    def touch(
        self,
        execution: int,
        lane: int,
        instruction: Instruction,
        region: Place,
        cell: Cell,
        write: bool,
    ) -> None:
        rank, buffer, *_ = region
        role = self.plans[execution].buffers[buffer].role
        if role == "eager":
            self.eager_uses.setdefault((rank, execution), {})[lane] = self.clocks[lane][lane]
        if role == "workspace":
            users = self.uses.setdefault((rank, execution), {})
            if lane not in users:
                users[lane] = Use([*self.clocks[lane]], 0)
            users[lane].last = self.clocks[lane][lane]
        self.order(execution, lane, instruction, region, cell, write)

    def order(
        self, execution: int, lane: int, access: object, region: Place, cell: Cell, write: bool
    ) -> None:
        """Complain unless this access happens after the last write and, if it writes, after all
        reads since. A read of rows with flags does, and learns that their writer has begun.
        """
        clock = self.clocks[lane]
        if self.where is not None:
            self.accessed[lane][clock[lane]] = self.position[lane]
        flagged = region[1] in self.flagged[execution]
        earlier = [cell.writer] if cell.writer else []
        if flagged and not write and cell.writer:  # the flag has come with the rows
            self.learn(execution, lane, region, cell)
            earlier = []
        if write:
            earlier += cell.readers.items()
        for other, time in earlier:
            if clock[other] < time and not known(self.known[lane], other, time, region):
                after = self.place(other, time)
                self.complain(
                    f"race on {Region(*region)}: {self.place(lane)} ({access}) is not ordered "
                    "after "
                    f"{after}"
                )
        if write:
            cell.writer, cell.readers = (lane, clock[lane]), {}
        else:
            cell.readers[lane] = clock[lane]

    def learn(self, execution: int, lane: int, region: Place, cell: Cell) -> None:
        """Note that the reader's rank learns from the flags of rows that their writer has begun,
        and all reads that the rows follow from. Other threads of the lane may not know it in this
        execution.
        """
        assert cell.writer is not None
        learned, (_, _, start, stop) = self.learned[self.rank_of[lane]], region
        begun = self.begun[execution, self.rank_of[cell.writer[0]]]
        learned.clock[:] = map(max, learned.clock, begun.clock)
        learned.reads.update(begun.reads)
        learned.reads.update(
            each._replace(shift=row + each.shift)
            for each in cell.made_of
            for row in range(start, stop)
        )
