"""The simulator: a plan under a machine model, as a trace of what would run when.

A discrete-event run of all lanes. A lane takes its instructions in order. Products, copies and sums
are *activities* with so many seconds of work; activities that use the same link share it, and a
rank's comm lanes and its compute lane slow each other down, so an activity's pace changes whenever
another begins or ends. Signals connect lanes as they do in reality, so the order of events obeys
the plan.

Where ranks are equal it is enough to plan and simulate the first few (`Plan.lanes` of the others
are empty): a rotation of all ranks by that number changes nothing, so what a rank sends to another
is also what its counterpart sends to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from weft.errors import PlanError
from weft.plan import Compute, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Wait
from weft.plan.kernel import Load
from weft.plan.messages import is_receive_gate
from weft.plan.trace import Span, Trace
from weft.predict.machine import ITEMSIZE, Link, Machine
from weft.schedules.workload import Rows

Resource = tuple[str, int, int]


def simulate(
    plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool = True, title: str = ""
) -> Trace:
    """Run `plan` on `machine`; `rows` tells what every buffer holds, and `packed` whether weights
    are packed.

    Weights have the dtype of the rows they multiply. The trace has the ranks whose lanes are
    planned, and times in nanoseconds since the call. Raises `PlanError` if the plan comes to a
    standstill.
    """
    run = _Run(plan, machine, rows, packed)
    return Trace(title or plan.algorithm, tuple(sorted(run.trace(), key=lambda span: span.start)))


def seconds(plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool = True) -> float:
    """The time from the call to the last rank's end, as `simulate` finds it."""
    return max((lane.begun for lane in _Run(plan, machine, rows, packed).lanes), default=0.0)


class _Lane:
    """A lane, the instruction it is `at` and since when, and when it last did anything but copy:
    its rows are `ready` since.
    """

    __slots__ = ("at", "begun", "compute", "instructions", "name", "rank", "ready", "spans")

    def __init__(self, rank: int, name: str, instructions: Sequence[Instruction]) -> None:
        self.rank, self.name, self.instructions = rank, name, instructions
        self.compute = name == "compute"
        self.at, self.begun, self.ready = 0, 0.0, 0.0
        self.spans: list[tuple[float, float]] = []


@dataclass(eq=False, slots=True)
class _Activity:
    """Work of a lane under way: `left` seconds of it at the time `since`, at a `pace`; not over
    before `until`.

    It uses `links` and keeps the cores of `ranks` busy, its own unless said; a transfer between
    hosts only for the part `core` of its time.
    """

    lane: _Lane
    since: float
    left: float
    links: tuple[Resource, ...] = ()
    until: float = 0.0
    ranks: tuple[int, ...] = ()
    core: float = 0.0
    pace: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.lane.rank,)


Users = dict[_Activity, None]  # a set that keeps its order, so that a run is always the same


class _Run:
    """A simulation, run to its end; while it lasts it is at the time `now`, in seconds."""

    def __init__(
        self, plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool
    ) -> None:
        self.plan, self.machine, self.rows, self.packed = plan, machine, rows, packed
        self.lanes = [
            _Lane(r, name, lane)
            for r, lanes in enumerate(plan.lanes)
            for name, lane in lanes.items()
        ]
        self.ranks_planned = max((lane.rank + 1 for lane in self.lanes), default=1)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.scheduled = 0
        self.counters: dict[tuple[int, Signal], int] = defaultdict(int)
        self.waiting: dict[tuple[int, Signal], list[_Lane]] = {}
        self.users: dict[Resource, Users] = defaultdict(dict)
        self.working: dict[tuple[int, bool], Users] = defaultdict(
            dict
        )  # by rank, and whether in its compute lane
        self.free: dict[int, float] = defaultdict(float)  # when a rank's idle link is
        self.queued: dict[int, list[_Lane]] = defaultdict(
            list
        )  # comm lanes that could go on, by rank, once they have the core
        self.go()

    def go(self) -> None:
        """Run to the end."""
        several = {lane.rank for lane in self.lanes if not lane.compute}
        for lane in self.lanes:
            late = self.machine.launch_us + (self.machine.lane_us if lane.rank in several else 0.0)
            self.schedule(late * 1e-6, self.launch, lane)
        while self.events:
            self.now, _, happen, what = heappop(self.events)
            happen(what)
        stuck = [
            f"rank {lane.rank} {lane.name} at: {lane.instructions[lane.at]}"
            for lane in self.lanes
            if self.goes_on(lane)
        ]
        if stuck:
            raise PlanError(
                f"{self.plan.operator}/{self.plan.algorithm} deadlocks: {'; '.join(stuck[:5])}"
            )

    def trace(self) -> Iterator[Span]:
        """The spans of all lanes."""
        for lane in self.lanes:
            for instruction, (start, stop) in zip(lane.instructions, lane.spans, strict=True):
                yield Span.of(
                    lane.rank, lane.name, instruction, round(start * 1e9), round(stop * 1e9)
                )

    def schedule(self, time: float, happen: Callable[[Any], None], what: object) -> None:
        """Let something happen later; what is due at one time happens in the order of the calls."""
        self.scheduled += 1
        heappush(self.events, (time, self.scheduled, happen, what))

    def launch(self, lane: _Lane) -> None:
        lane.begun = lane.ready = self.now
        self.proceed(lane)

    def goes_on(self, lane: _Lane) -> bool:
        return lane.at < len(lane.instructions)

    def proceed(self, lane: _Lane) -> None:
        """Take a lane's instructions until one takes time."""
        while self.goes_on(lane):
            instruction = lane.instructions[lane.at]
            if isinstance(instruction, Wait):
                counter = lane.rank, instruction.signal
                if instruction.count > self.counters[counter]:
                    self.waiting.setdefault(counter, []).append(lane)
                    break
            elif isinstance(instruction, Notify):
                # If the notified rank is not planned: what its planned counterpart gets from this
                # rank's counterpart.
                here = instruction.rank % self.ranks_planned
                source = (instruction.signal.source - instruction.rank + here) % self.plan.ranks
                counter = here, instruction.signal._replace(source=source)
                if is_receive_gate(lane.name):  # not sent
                    self.schedule(self.now, self.count, counter)
                    self.done(lane)
                    continue
                raised = self.now + self.machine.line_us(lane.rank, instruction.rank) * 1e-6
                self.schedule(
                    raised + self.machine.signal_us(lane.rank, instruction.rank) * 1e-6,
                    self.count,
                    counter,
                )
                if raised > self.now:
                    self.schedule(raised, self.leave, lane)
                    return
            else:
                self.begin(lane, instruction)
                return
            self.done(lane)
        if lane.compute:  # it leaves the core to others
            for other in self.queued.pop(lane.rank, ()):
                self.proceed(other)

    def done(self, lane: _Lane) -> None:
        """Note that a lane is through with an instruction."""
        lane.spans.append((lane.begun, self.now))
        if lane.begun < self.now and not isinstance(lane.instructions[lane.at], Copy):
            lane.ready = self.now
        lane.at += 1
        lane.begun = self.now

    def count(self, counter: tuple[int, Signal]) -> None:
        """Add 1 to a counter; whoever waits for it looks again."""
        self.counters[counter] += 1
        for lane in self.waiting.pop(counter, ()):
            if self.machine.turn_us and not lane.compute and self.working[lane.rank, True]:
                self.queued[lane.rank].append(lane)
                self.schedule(self.now + self.machine.turn_us * 1e-6, self.take_turn, lane)
            else:
                self.proceed(lane)

    def take_turn(self, lane: _Lane) -> None:
        """Let a comm lane go on that has not done so yet."""
        if lane in self.queued[lane.rank]:
            self.queued[lane.rank].remove(lane)
            self.proceed(lane)

    def begin(self, lane: _Lane, instruction: Copy | Compute | Reduce) -> None:
        """Begin an instruction that takes time."""
        activity = self.activity(lane, instruction)
        for among in self.places(activity):
            among[activity] = None
        self.repace(activity)

    def finish(self, due: tuple[_Activity, int]) -> None:
        """End an activity, unless its pace has changed since this end was foreseen."""
        activity, version = due
        if version != activity.version:
            return
        for among in self.places(activity):
            del among[activity]
        self.repace(activity)
        if activity.until > self.now:
            self.schedule(activity.until + self.machine.wake_us * 1e-6, self.leave, activity.lane)
        else:
            self.leave(activity.lane)

    def places(self, activity: _Activity) -> list[Users]:
        """What works where an activity does: on its links, and in such lanes on its cores."""
        links = [self.users[link] for link in activity.links]
        return links + [self.working[rank, activity.lane.compute] for rank in activity.ranks]

    def leave(self, lane: _Lane) -> None:
        """Go on after an instruction that took time."""
        self.done(lane)
        self.proceed(lane)

    def repace(self, changed: _Activity) -> None:
        """Let all that share a link or a core with what has begun or ended go on at their new pace,
        to ends foreseen anew.
        """
        affected: Users = {}
        for link in changed.links:
            affected |= self.users[link]
        for rank in {
            *changed.ranks,
            *(rank for other in affected if other.core for rank in other.ranks),
        }:
            affected |= self.working[rank, True] | self.working[rank, False]
        for activity in affected:
            pace = 1.0
            for link in activity.links:
                pace = min(pace, 1 / len(self.users[link]))
            pace *= self.left_beside(activity)
            if pace != activity.pace:
                activity.left -= (self.now - activity.since) * activity.pace
                activity.since, activity.pace = self.now, pace
                activity.version += 1
                self.schedule(
                    self.now + max(activity.left, 0.0) / pace,
                    self.finish,
                    (activity, activity.version),
                )

    def left_beside(self, activity: _Activity) -> float:
        """The part of its pace that what works beside an activity leaves it."""
        lane = activity.lane
        # a core is shared evenly with the product on it, where a transfer needs more than half of
        # it
        if activity.core:
            busy = max(
                (self.moving(rank) for rank in activity.ranks if self.working[rank, True]),
                default=0.0,
            )
            return 0.5 / max(0.5, busy)
        others = self.working[lane.rank, not lane.compute]
        if lane.compute:
            copying = any(not other.core for other in others)
            return (1 - min(0.5, self.moving(lane.rank))) / (
                self.machine.compute_slowdown if copying else 1.0
            )
        return 1 / self.machine.communicate_slowdown if others else 1.0

    def moving(self, rank: int) -> float:
        """The part of a rank's core that its transfers to and from other hosts need."""
        beside = (other for other in self.working[rank, False] if other.core)
        return sum(
            other.core / max(len(self.users[link]) for link in other.links) for other in beside
        )

    def activity(self, lane: _Lane, instruction: Copy | Compute | Reduce) -> _Activity:
        """The work of an instruction that begins now."""
        machine, rank, begin = self.machine, lane.rank, partial(_Activity, lane, self.now)
        match instruction:
            case Compute(kernel, srcs, dst):
                columns = tuple(self.rows[region.buffer].columns for region in (*srcs, dst))
                dtype, size = self.rows[srcs[0].buffer].dtype, sum(map(self.size, srcs))
                work = kernel.seconds(machine, Load(dst.rows, columns, dtype, size, self.packed))
                return begin(max(work, self.fetching(rank, (*srcs, dst))))
            case Reduce(srcs):
                return begin(
                    max(machine.reduce(sum(map(self.size, srcs))), self.fetching(rank, srcs))
                )
            case Copy(src, dst):
                size, link = self.size(src), machine.link(src.rank, dst.rank)
                if src.rank == dst.rank:
                    return begin(machine.copy(size))
                if link.idle:
                    self.free[rank] = max(self.free[rank], lane.ready) + link.seconds(size)
                    return begin(machine.copy(size), until=self.free[rank])
                used = self.resources(link, src.rank, dst.rank)
                if not machine.on_other_hosts(src.rank, dst.rank):
                    return begin(link.seconds(size) + link.line_us * 1e-6, used)
                # Its latency is the signal's: messages follow each other without it. It has one end
                # here, if it sends to its counterpart, as it is sent to by it.
                ends = tuple({rank, dst.rank % self.ranks_planned})
                busy: dict[str, Any] = (
                    {"ranks": ends, "core": link.core * 2 / len(ends)} if link.core else {}
                )
                return begin(link.passing(size), used, **busy)

    def size(self, region: Region) -> int:
        columns, dtype = self.rows[region.buffer]
        return region.rows * columns * ITEMSIZE[dtype]

    def fetching(self, rank: int, regions: Iterable[Region]) -> float:
        """How long peers' rows that are read or written in place take to pass the links."""
        links = [
            (self.machine.link(rank, there.rank), self.size(there))
            for there in regions
            if there.rank != rank
        ]
        passing = sum(0.0 if link.idle else link.passing(size) for link, size in links)
        return passing + sum(link.line_us for link, _ in links) * 1e-6 / self.machine.fetches

    def resources(self, link: Link, src: int, dst: int) -> tuple[Resource, ...]:
        """The links that a transfer shares with others; a rank that is not planned uses those of
        its counterpart.
        """
        if (hosts := self.machine.hosts) and self.machine.on_other_hosts(src, dst):
            return ("out", hosts[src % self.ranks_planned], -1), (
                "in",
                hosts[dst % self.ranks_planned],
                -1,
            )
        if link.shared:
            return ("out", src % self.ranks_planned, link.reach or 0), (
                "in",
                dst % self.ranks_planned,
                link.reach or 0,
            )
        here = src % self.ranks_planned
        return (("link", here, (dst - src + here) % self.plan.ranks),)
