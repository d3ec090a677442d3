"""One greedy run of plans, with a vector clock per lane and symbols in place of numbers.

A plan obeys the rules of `weft.plan`, so one run stands for all interleavings: accesses that the
vector clocks do not order could happen in either order, and are a race. Rows carry symbols (an
input row, times the weight of a rank), so a run also shows the terms of every output row. The
clocks were invented by Mattern and Fidge; the race check is the happens-before test of Lamport's
"Time, Clocks, and the Ordering of Events".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

from weft.plan import Compute, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Term, Wait
from weft.plan.language import ANY_BLOCK, accumulates, aligned
from weft.plan.messages import at_the_end, ending, is_channel
from weft.plan.symbols import Cell, Pieces, RowsOfValue, every, joined
from weft.plan.values import ordered, reduced, shifted, text

Clock = list[int]


Place = tuple[int, str, int, int]
"""A region as a plain tuple, which costs less: a proof makes millions of them."""


@dataclass
class Use:
    """A lane's use of a rank's workspace in one execution: its clock at the first access and its
    time at the last.
    """

    first: Clock
    last: int


class Run:
    """One greedy run of a sequence of well-formed plans, in which each rank proceeds by itself."""

    def __init__(self, plans: list[Plan], ended: Callable[[], object] = lambda: None) -> None:
        """`ended` is called when a rank ends a plan."""
        self.plans, self.ended = plans, ended
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
        self.clocks: list[Clock] = [[0] * len(every) for _ in every]
        self.rows: dict[tuple[int, int, str], RowsOfValue] = {}
        # the numbers of the blocks in the slots of a buffer, by slot
        self.held: dict[tuple[int, int, str], dict[int, int]] = {}
        self.slots = [
            {name for name, b in plan.buffers.items() if any(ANY_BLOCK in n for n in b.blocks)}
            for plan in plans
        ]
        self.uses: dict[tuple[int, int], dict[int, Use]] = {}
        self.raised: dict[tuple[int, Signal], list[Clock]] = {}
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
            while left:
                for i, lane in left.items():
                    while lane and self.step(execution, i, lane[-1]):
                        lane.pop()
                        moved = True
                if left := {i: lane for i, lane in left.items() if lane}:
                    yield moved, [self.waiting(i, lane[-1]) for i, lane in left.items()]
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

    def waiting(self, lane: int, wait: Instruction) -> str:
        """The state of a lane that waits: the count it waits for, and the count so far."""
        assert isinstance(wait, Wait)
        rank = self.rank_of[lane]
        raised = len(self.raised.get((rank, wait.signal), ())) - self.base[rank].get(wait.signal, 0)
        return f"{self.names[lane]} waits for {wait.count} of {wait.signal}, {raised} arrive"

    def join(self, rank: int) -> None:
        """Order all lanes of a rank after the previous execution: their clocks become the
        maximum.
        """
        mine = [self.index[rank, name] for name in self.lanes[rank]]
        joined = [max(times) for times in zip(*(self.clocks[i] for i in mine), strict=True)]
        for i in mine:
            self.clocks[i] = [*joined]

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
                self.order(lane, "the caller's use", (rank, name, start, stop), cell, write=True)
                cell.value = (Term(rank, name, 0),) if buffer.role == "input" else None

    def buffer(self, execution: int, rank: int, name: str) -> RowsOfValue:
        key = execution, rank, name
        if key not in self.rows:
            self.rows[key] = RowsOfValue(self.plans[execution].buffers[name].rows[rank])
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
                    clock[:] = map(max, clock, raised[target - 1])
            case Notify(peer, signal):
                if i != lane and not self.knows_start(clock, execution, peer):
                    self.complain(
                        f"{self.names[i]}: {instruction}: rank {peer} may still wait for one of an "
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
                self.raised.setdefault((peer, signal), []).append([*clock])
            case _:
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
        rows, again = self.buffer(execution, dst.rank, dst.buffer), accumulates(instruction)
        for start, stop, value in pieces:
            moved = shifted(value, -dst.start)
            for a, b, cell in rows.over(dst.start + start, dst.start + stop):
                self.touch(
                    execution, end, instruction, (dst.rank, dst.buffer, a, b), cell, write=True
                )
                cell.value, cell.writes = moved, cell.writes + (not again)

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
                self.complain(f"{self.names[lane]}: {instruction}: {src} holds other blocks")
        if dst.buffer in slots:
            held = self.held.setdefault((execution, dst.rank, dst.buffer), {})
            held.update(enumerate(numbers, dst.start))

    def read(self, execution: int, lane: int, instruction: Instruction, src: Region) -> Pieces:
        """The values of a region's rows, in pieces counted from its start."""
        pieces = []
        for a, b, cell in self.buffer(execution, src.rank, src.buffer).over(src.start, src.stop):
            region = src.rank, src.buffer, a, b
            if cell.value is None:
                self.complain(
                    f"{self.names[lane]}: {instruction}: {Region(*region)} was not written in this "
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
        self.order(lane, instruction, region, cell, write)

    def order(self, lane: int, access: object, region: Place, cell: Cell, write: bool) -> None:
        """Complain unless this access happens after the last write and, if it writes, after all
        reads since.
        """
        clock = self.clocks[lane]
        earlier = [cell.writer] if cell.writer else []
        if write:
            earlier += cell.readers.items()
        for other, time in earlier:
            if clock[other] < time:
                after = self.names[other]
                self.complain(
                    f"race on {Region(*region)}: {self.names[lane]} ({access}) is not ordered "
                    "after "
                    f"{after}"
                )
        if write:
            cell.writer, cell.readers = (lane, clock[lane]), {}
        else:
            cell.readers[lane] = clock[lane]

    def check_result(self, execution: int, rank: int) -> None:
        for region, value in self.plans[execution].result.items():
            if region.rank != rank:
                continue
            for a, b, cell in self.buffer(execution, rank, region.buffer).over(
                region.start, region.stop
            ):
                here = region._replace(start=a, stop=b)
                if cell.writes != 1:
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
        return [*map(max, clock, self.raised[at, free][promised[free] - 1])]

    def check_synchronizing(self) -> None:
        """Check that all ranks begin a synchronizing plan before any rank ends it."""
        for execution, plan in enumerate(self.plans):
            for rank, of in permutations(range(plan.ranks), 2) if plan.synchronizes else ():
                clock, _ = self.ends[execution, rank]
                if not self.knows_start(clock, execution, of):
                    self.complain(
                        f"rank {rank} ends {plan.operator} before rank {of} must have begun it"
                    )
