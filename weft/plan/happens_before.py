"""One greedy run of plans, with a vector clock per lane and symbols in place of numbers.

A plan obeys the rules of `weft.plan`, so one run stands for all interleavings: accesses that the
vector clocks do not order could happen in either order, and are a race. Rows carry symbols (an
input row, times the weight of a rank), so a run also shows the terms of every output row. The
clocks were invented by Mattern and Fidge; the race check is the happens-before test of Lamport's
"Time, Clocks, and the Ordering of Events".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from weft.plan import (
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Term,
    Wait,
    reads,
    writes,
)
from weft.plan.language import ANY_BLOCK, accumulates, aligned, is_port
from weft.plan.messages import at_the_end, ending, is_channel
from weft.plan.symbols import Cell, Pieces, Read, RowsOfValue, every, joined
from weft.plan.values import ordered, reduced, shifted, text

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


class Run:
    """One greedy run of a sequence of well-formed plans, in which each rank proceeds by itself."""

    def __init__(
        self,
        plans: list[Plan],
        ended: Callable[[], object] = lambda: None,
        where: Where | None = None,
    ) -> None:
        """`ended` is called when a rank ends a plan; `where` names instructions in problems, by
        default by their lanes.
        """
        self.plans, self.ended, self.where = plans, ended, where
        self.found: dict[str, bool] = {}  # in order, and whether it has been reported
        ranks = range(plans[0].ranks)
        self.lanes: list[list[str]] = [
            sorted({name for plan in plans for name in plan.lanes[r]} | {"compute"}) for r in ranks
        ]
        every = [(r, name) for r in ranks for name in self.lanes[r]]
        every += [(r, ending(name)) for r, name in every if is_channel(name)]
        # the number of each lane
        self.index: dict[tuple[int, str], int] = {lane: i for i, lane in enumerate(every)}
        self.endings = {
            i: self.index[r, ending(name)]
            for (r, name), i in self.index.items()
            if (r, ending(name)) in self.index
        }
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
        # what the flags of rows have told a rank in its execution, which its lanes know afterwards
        self.told: list[Knowledge] = [Knowledge([0] * len(every), set()) for _ in ranks]
        # the numbers of the blocks in the slots of a buffer, by slot
        self.held: dict[tuple[int, int, str], dict[int, int]] = {}
        self.slots = [
            {name for name, b in plan.buffers.items() if any(ANY_BLOCK in n for n in b.blocks)}
            for plan in plans
        ]
        self.uses: dict[tuple[int, int], dict[int, Use]] = {}
        self.raised: dict[tuple[int, Signal], list[Knowledge]] = {}
        self.writers: dict[tuple[int, int, Signal], int] = {}
        self.base: list[dict[Signal, int]] = [{} for _ in ranks]
        self.starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.ends: dict[tuple[int, int], tuple[Clock, dict[Signal, int]]] = {}
        self.promised = [plan.notified for plan in plans]

    def problems(self) -> Iterator[str]:
        """Run the plans; yields problems soon after they are found, each once."""
        ranks = [self.run_rank(r) for r in range(self.plans[0].ranks)]
        stuck: dict[int, list[str]] = {r: [] for r in range(len(ranks))}
        moved = True
        # each generator runs until all its lanes wait, and yields whether it proceeded, and its
        # waits
        while moved and stuck:
            moved = False
            for r in list(stuck):
                progress = next(ranks[r], None)
                if progress is None:
                    del stuck[r]
                    moved = True
                else:
                    moved |= progress[0]
                    stuck[r] = progress[1]
                yield from self.reported()
        for waits in stuck.values():
            for wait in waits:
                self.complain(f"deadlock: {wait}")
        if not stuck:
            self.check_workspaces()
            self.check_leaving()
            self.check_synchronizing()
        yield from self.reported()

    def complain(self, problem: str) -> None:
        self.found.setdefault(problem, False)

    def reported(self) -> Iterator[str]:
        """The problems that are not yet reported."""
        for problem, before in self.found.items():
            if not before:
                self.found[problem] = True
                yield problem

    def run_rank(self, rank: int) -> Iterator[tuple[bool, list[str]]]:
        moved = False
        for execution, plan in enumerate(self.plans):
            self.join(rank)
            self.use_by_caller(execution, rank)
            compute = self.index[rank, "compute"]
            self.begun[execution, rank] = Knowledge([*self.clocks[compute]], {*self.known[compute]})
            self.fork(rank)
            self.starts[execution, rank] = [
                (i, self.clocks[i][i])
                for i in (self.index[rank, name] for name in self.lanes[rank])
            ]
            left = {
                self.index[rank, name]: [*reversed(lane)]
                for name, lane in plan.lanes[rank].items()
                if lane
            }
            for i in left:
                self.position[i] = 0
            while left:
                for i, lane in left.items():
                    while lane and self.step(execution, i, lane[-1]):
                        lane.pop()
                        self.position[i] += 1
                        moved = True
                if left := {i: lane for i, lane in left.items() if lane}:
                    yield (
                        moved,
                        [self.waiting(execution, i, lane[-1]) for i, lane in left.items()],
                    )
                    moved = False
            self.join(rank)
            self.check_result(execution, rank)
            self.use_by_caller(execution, rank)
            for signal, count in self.promised[execution][rank].items():
                self.base[rank][signal] = self.base[rank].get(signal, 0) + count
            self.ends[execution, rank] = (
                [*self.clocks[self.index[rank, "compute"]]],
                dict(self.base[rank]),
            )
            self.ended()

    def waiting(self, execution: int, lane: int, instruction: Instruction) -> str:
        """The state of a lane that waits: the count it waits for, and the count so far; or the rows
        whose flags it waits for.
        """
        rank = self.rank_of[lane]
        if not isinstance(instruction, Wait):
            missing, later = self.missing(execution, instruction)
            lost = ", which a later execution has overwritten" if later else ""
            return f"{self.place(lane)} ({instruction}) waits for {missing}{lost}"
        wait = instruction
        raised = len(self.raised.get((rank, wait.signal), ())) - self.base[rank].get(wait.signal, 0)
        return f"{self.place(lane)} waits for {wait.count} of {wait.signal}, {raised} arrive"

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

    def join(self, rank: int) -> None:
        """Order all lanes of a rank after the previous execution, but for what its ports have still
        to do: their clocks become the maximum.
        """
        mine = [self.index[rank, name] for name in self.lanes[rank] if not is_port(name)]
        clocks = [*(self.clocks[i] for i in mine), self.told[rank].clock]
        joined = [max(times) for times in zip(*clocks, strict=True)]
        known = self.told[rank].reads.union(*(self.known[i] for i in mine))
        for i in mine:
            self.clocks[i], self.known[i] = [*joined], {*known}
        for i in (self.index[rank, name] for name in self.lanes[rank] if is_port(name)):
            self.clocks[i] = [*map(max, self.clocks[i], joined)]
            self.known[i] |= known

    def fork(self, rank: int) -> None:
        """Start the lanes of a rank: from now on only signals order one after another."""
        for name in self.lanes[rank]:
            i = self.index[rank, name]
            self.clocks[i][i] += 1

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

    def step(self, execution: int, lane: int, instruction: Instruction) -> bool:
        """Execute one instruction of a lane; False if it must wait."""
        rank, i, end = self.rank_of[lane], lane, self.endings.get(lane, lane)
        if end != lane:
            self.clocks[end] = [*map(max, self.clocks[end], self.clocks[lane])]
            if at_the_end(rank, instruction):
                i = end
        clock = self.clocks[i]
        match instruction:
            case Wait(signal, count):
                raised = self.raised.get((rank, signal), [])
                target = self.base[rank].get(signal, 0) + count
                if len(raised) < target:
                    return False
                if target:
                    clock[:] = map(max, clock, raised[target - 1].clock)
                    self.known[i] |= raised[target - 1].reads
            case Notify(peer, signal, relaxed):
                if i != lane and not self.knows_start(clock, execution, peer):
                    self.complain(
                        f"{self.place(i)}: {instruction}: rank {peer} may still wait for one of an "
                        "earlier call"
                    )
                if (
                    signal.source != rank
                    or self.writers.setdefault((execution, peer, signal), i) != i
                ):
                    other = self.names[self.writers.get((execution, peer, signal), i)]
                    self.complain(
                        f"counter {signal} of rank {peer} has a second writer: {self.names[i]} "
                        f"and {other}"
                    )
                told = (
                    self.begun[execution, rank]
                    if relaxed
                    else Knowledge([*clock], {*self.known[i]})
                )
                self.raised.setdefault((peer, signal), []).append(told)
            case _:
                if self.flagged[execution] and self.missing(execution, instruction)[0]:
                    return False
                self.move(execution, i, end, instruction)
                self.clocks[end][end] += i != end
        clock[i] += 1
        return True

    def knows_start(self, clock: Clock, execution: int, rank: int) -> bool:
        """Whether the start of an execution on a rank happens before this clock."""
        return any(clock[lane] >= time for lane, time in self.starts.get((execution, rank), ()))

    def move(self, execution: int, lane: int, end: int, instruction: Instruction) -> None:
        """Compute the values of a Copy, Compute or Reduce: `lane` reads them, and `end` writes
        them, which differs from `lane` for a channel.
        """
        match instruction:
            case Copy(src, dst):
                pieces = self.read(execution, lane, instruction, src)
            case Compute(kernel, srcs, dst, name):
                weight = None if name is None else (self.rank_of[lane], name)
                sources = [self.read(execution, lane, instruction, src) for src in srcs]
                for at, src in enumerate(srcs):
                    if at in kernel.whole:
                        value = every(sources[at], self.plans[execution].numbers(src))
                        sources[at] = [(0, dst.rows, value)]
                pieces = [(a, b, kernel.value(values, weight)) for a, b, values in joined(sources)]
            case Reduce(srcs, dst, op):
                sources = [self.read(execution, lane, instruction, src) for src in srcs]
                ranks = self.plans[execution].ranks
                pieces = [(a, b, reduced(op, values, ranks)) for a, b, values in joined(sources)]
            case _:
                return
        if self.slots[execution]:
            self.check_slots(execution, lane, instruction)
        flagged = self.flagged[execution]
        rows, again = self.buffer(execution, dst.rank, dst.buffer), accumulates(instruction)
        for start, stop, value in pieces:
            moved = shifted(value, -dst.start)
            for a, b, cell in rows.over(dst.start + start, dst.start + stop):
                if flagged:
                    cell.made_of = self.made_of(execution, lane, instruction, a, b)
                    self.forget(execution, cell, (dst.rank, dst.buffer, a, b))
                self.touch(
                    execution, end, instruction, (dst.rank, dst.buffer, a, b), cell, write=True
                )
                if cell.execution != execution:
                    cell.execution, cell.writes = execution, 0
                elif dst.buffer in self.flagged[execution]:
                    self.complain(
                        f"{self.place(lane)}: {instruction}: {dst} is written twice, with one flag"
                    )
                cell.value, cell.writes = moved, cell.writes + (not again)

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
        if self.plans[execution].buffers[buffer].role == "workspace":
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
            self.tell(execution, lane, region, cell)
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

    def tell(self, execution: int, lane: int, region: Place, cell: Cell) -> None:
        """Let the flags of rows tell their reader's rank that their writer has begun, and all reads
        that the rows follow from. Other threads of the lane may not know it in this execution.
        """
        assert cell.writer is not None
        told, (_, _, start, stop) = self.told[self.rank_of[lane]], region
        begun = self.begun[execution, self.rank_of[cell.writer[0]]]
        told.clock[:] = map(max, told.clock, begun.clock)
        told.reads.update(begun.reads)
        told.reads.update(
            each._replace(shift=row + each.shift)
            for each in cell.made_of
            for row in range(start, stop)
        )

    def check_result(self, execution: int, rank: int) -> None:
        for region, value in self.plans[execution].result.items():
            if region.rank != rank:
                continue
            for a, b, cell in self.buffer(execution, rank, region.buffer).over(
                region.start, region.stop
            ):
                here = region._replace(start=a, stop=b)
                if (
                    cell.writes != 1
                    and self.plans[execution].buffers[region.buffer].role == "output"
                ):
                    self.complain(f"output {here} is written {cell.writes} times")
                elif ordered(cell.value or ()) != ordered(value):
                    self.complain(
                        f"output {here} holds {text(cell.value)} instead of {text(value)}"
                    )

    def check_workspaces(self) -> None:
        for (rank, execution), users in self.uses.items():
            for (owner, before), earlier in self.uses.items():
                if owner != rank or before >= execution:
                    continue
                for lane, use in users.items():
                    for other, past in earlier.items():
                        if use.first[other] < past.last:
                            self.complain(
                                f"workspace of rank {rank}: {self.names[lane]} in "
                                f"{self.plans[execution].operator} does not wait "
                                f"until {self.names[other]} is done with it in the "
                                f"{self.plans[before].operator} before"
                            )

    def check_leaving(self) -> None:
        """Check that one rank's "free" notifies all others of each use of a workspace, unless it
        happens before they leave.

        Each rank of the next plan that uses workspaces waits for the "free" of every rank.
        """
        ranks = range(len(self.base))
        for execution, plan in enumerate(self.plans):
            notified = [[self.clock_after(execution, of, at) for at in ranks] for of in ranks]
            for owner in ranks:
                for lane, use in self.uses.get((owner, execution), {}).items():
                    if not any(
                        all(clock[lane] >= use.last for clock in clocks) for clocks in notified
                    ):
                        self.complain(
                            f"workspace of rank {owner}: {plan.operator} leaves without notifying "
                            f"all that {self.names[lane]} is done with it"
                        )

    def clock_after(self, execution: int, of: int, at: int) -> Clock:
        """The clock of rank `at` after it has left an execution and waited for the "free" of rank
        `of`.
        """
        clock, promised = self.ends[execution, at]
        free = Signal("free", of)
        if not promised.get(free):
            return clock
        return [*map(max, clock, self.raised[at, free][promised[free] - 1].clock)]

    def check_synchronizing(self) -> None:
        """Check that all ranks begin a synchronizing plan before any rank ends it."""
        for execution, plan in enumerate(self.plans):
            for rank, of in permutations(range(plan.ranks), 2) if plan.synchronizes else ():
                clock, _ = self.ends[execution, rank]
                if not self.knows_start(clock, execution, of):
                    self.complain(
                        f"rank {rank} ends {plan.operator} before rank {of} must have begun it"
                    )
