"""One greedy run of plans, with a vector clock per lane and symbols in place of numbers.

A plan obeys the rules of `weft.plan`, so one run stands for all interleavings: a race is a pair of
accesses that the clocks do not order (`weft.plan.access_order`). Rows carry symbols (an input row,
times the weight of a rank), so a run also shows the terms of every output row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

from weft.plan import Compute, Copy, Instruction, Notify, Plan, Reduce, Signal, Wait
from weft.plan.access_order import Accesses, Clock, Knowledge, Where
from weft.plan.language import accumulates, is_port
from weft.plan.messages import at_the_end, ending
from weft.plan.symbols import every, joined
from weft.plan.values import ordered, reduced, shifted, text


class Run(Accesses):
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
        super().__init__(plans, where)
        self.ended = ended
        self.endings = {
            i: self.index[r, ending(name)]
            for (r, name), i in self.index.items()
            if (r, ending(name)) in self.index
        }
        self.raised: dict[tuple[int, Signal], list[Knowledge]] = {}
        self.writers: dict[tuple[int, int, Signal], int] = {}
        self.base: list[dict[Signal, int]] = [{} for _ in self.lanes]
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

    def join(self, rank: int) -> None:
        """Order all lanes of a rank after the previous execution, but for what its ports have still
        to do: their clocks become the maximum.
        """
        mine = [self.index[rank, name] for name in self.lanes[rank] if not is_port(name)]
        clocks = [*(self.clocks[i] for i in mine), self.learned[rank].clock]
        joined = [max(times) for times in zip(*clocks, strict=True)]
        known = self.learned[rank].reads.union(*(self.known[i] for i in mine))
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
                knowledge = (
                    self.begun[execution, rank]
                    if relaxed
                    else Knowledge([*clock], {*self.known[i]})
                )
                self.raised.setdefault((peer, signal), []).append(knowledge)
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
        """Check that all ranks begin a synchronizing plan before any rank ends it, and that its
        accesses to eager buffers, which the plan after the next uses again, are over by then: those
        of messages between hosts, which outlive their sender's lane, as some rank's end must know.
        """
        for execution, plan in enumerate(self.plans):
            for rank, of in permutations(range(plan.ranks), 2) if plan.synchronizes else ():
                clock, _ = self.ends[execution, rank]
                if not self.knows_start(clock, execution, of):
                    self.complain(
                        f"rank {rank} ends {plan.operator} before rank {of} must have begun it"
                    )
        for (owner, execution), last in self.eager_uses.items():
            plan = self.plans[execution]
            ends = [self.ends[execution, rank][0] for rank in range(plan.ranks)]
            for lane, time in last.items():
                if all(clock[lane] < time for clock in ends):
                    self.complain(
                        f"eager buffer of rank {owner}: {plan.operator} may end before "
                        f"{self.names[lane]} is done with it"
                    )
