"""The simulator: a discrete-event run of a plan on a machine model, which gives a trace.

A lane executes its instructions in order. Products, copies and sums are *activities* with a number
of seconds of work. Activities that use the same link share it, and a rank's comm lanes and its
compute lane slow each other down, so the pace of an activity changes whenever another one starts or
ends. Signals connect lanes as in an execution, so the order of events obeys the plan.

If a rotation of the ranks by some number changes nothing, only that number of ranks is planned and
simulated (`Plan.lanes` of the others are empty). The counterpart of an unplanned rank is the
planned rank with the same number modulo the number of planned ranks: the unplanned rank sends the
same as its counterpart, to ranks at the same distances.
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
from weft.plan.compression import row_bytes
from weft.plan.kernel import Load
from weft.plan.messages import is_receive_gate
from weft.plan.trace import Span, Trace
from weft.schedules.workload import Rows
from weft_tools.predict.machine import LinkRate, Machine
from weft_tools.predict.rates import ITEMSIZE

Resource = tuple[str, int, int]


def simulate(
    plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool = True, title: str = ""
) -> Trace:
    """Run `plan` on `machine`; `rows` are the columns and dtype of every buffer, and `packed` is
    whether weights are packed.

    Weights have the dtype of the rows they multiply. The trace has the ranks whose lanes are
    planned, and times in nanoseconds since the call. Raises `PlanError` if the plan deadlocks.
    """
    run = _Run(plan, machine, rows, packed)
    return Trace(title or plan.algorithm, tuple(sorted(run.trace(), key=lambda span: span.start)))


def seconds(plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool = True) -> float:
    """The time from the call to the end of the last rank in a simulation."""
    return max((lane.started for lane in _Run(plan, machine, rows, packed).lanes), default=0.0)


class _Lane:
    """A lane: the index of its current instruction (`position`) and the time at which it `started`;
    rows to send have been `ready` since its last instruction that took time and was no copy.
    """

    __slots__ = (
        "compute",
        "instructions",
        "name",
        "position",
        "rank",
        "ready",
        "spans",
        "started",
    )

    def __init__(self, rank: int, name: str, instructions: Sequence[Instruction]) -> None:
        self.rank = rank
        self.name = name
        self.instructions = instructions
        self.compute = name == "compute"
        self.position = 0
        self.started = 0.0
        self.ready = 0.0
        self.spans: list[tuple[float, float]] = []


@dataclass(eq=False, slots=True)
class _Activity:
    """Work of a lane in progress: `left` seconds of it at the time `since`, done at a `pace`, and
    over not before `until`.

    It uses `links` and the cores of `ranks`, by default its own rank's; a transfer between hosts
    uses a core only for the part `core` of its time. It needs the part `demand` of its links: all
    of them if it is a transfer, less if it makes rows more slowly than the links take them.
    """

    lane: _Lane
    since: float
    left: float
    links: tuple[Resource, ...] = ()
    until: float = 0.0
    ranks: tuple[int, ...] = ()
    core: float = 0.0
    demand: float = 1.0
    pace: float = 0.0
    version: int = 0

    def __post_init__(self) -> None:
        self.ranks = self.ranks or (self.lane.rank,)


Users = dict[_Activity, None]  # an ordered set, so that runs are deterministic


class _Run:
    """A simulation, run to its end when made; `now` is the simulated time in seconds."""

    def __init__(
        self, plan: Plan, machine: Machine, rows: Mapping[str, Rows], packed: bool
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.rows = rows
        self.packed = packed
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
        self.demanded: dict[Resource, float] = {}
        # activities by rank, and whether they are in its compute lane
        self.working: dict[tuple[int, bool], Users] = defaultdict(dict)
        self.free: dict[int, float] = defaultdict(float)  # the time from which an idle link is free
        # comm lanes by rank that wait for the core
        self.queued: dict[int, list[_Lane]] = defaultdict(list)
        self.run()

    def run(self) -> None:
        """Process all events."""
        with_comm = {lane.rank for lane in self.lanes if not lane.compute}
        for lane in self.lanes:
            delay = self.machine.launch_us
            delay += self.machine.lane_us if lane.rank in with_comm else 0.0
            self.schedule(delay * 1e-6, self.launch, lane)
        while self.events:
            self.now, _, action, argument = heappop(self.events)
            action(argument)
        stuck = [
            f"rank {lane.rank} {lane.name} at: {lane.instructions[lane.position]}"
            for lane in self.lanes
            if self.unfinished(lane)
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

    def schedule(self, time: float, action: Callable[[Any], None], argument: object) -> None:
        """Add an event; events of the same time are processed in the order of the calls."""
        self.scheduled += 1
        heappush(self.events, (time, self.scheduled, action, argument))

    def launch(self, lane: _Lane) -> None:
        lane.started = lane.ready = self.now
        self.proceed(lane)

    def unfinished(self, lane: _Lane) -> bool:
        return lane.position < len(lane.instructions)

    def proceed(self, lane: _Lane) -> None:
        """Execute a lane's instructions until one takes time."""
        while self.unfinished(lane):
            instruction = lane.instructions[lane.position]
            if isinstance(instruction, Wait):
                counter = lane.rank, instruction.signal
                if instruction.count > self.counters[counter]:
                    self.waiting.setdefault(counter, []).append(lane)
                    break
            elif isinstance(instruction, Notify):
                # If the notified rank is not planned, the signal is the one that its planned
                # counterpart receives from this rank's counterpart.
                here = instruction.rank % self.ranks_planned
                source = (instruction.signal.source - instruction.rank + here) % self.plan.ranks
                counter = here, instruction.signal._replace(source=source)
                if is_receive_gate(lane.name):  # local, so it takes no time
                    self.schedule(self.now, self.count, counter)
                    self.finish(lane)
                    continue
                raised = self.now + self.machine.line_us(lane.rank, instruction.rank) * 1e-6
                self.schedule(
                    raised + self.machine.signal_us(lane.rank, instruction.rank) * 1e-6,
                    self.count,
                    counter,
                )
                if raised > self.now:
                    self.schedule(raised, self.resume, lane)
                    return
            else:
                self.start(lane, instruction)
                return
            self.finish(lane)
        if lane.compute:  # the core is free for waiting comm lanes
            for other in self.queued.pop(lane.rank, ()):
                self.proceed(other)

    def finish(self, lane: _Lane) -> None:
        """Record the span of a lane's current instruction, and move to the next."""
        lane.spans.append((lane.started, self.now))
        if lane.started < self.now and not isinstance(lane.instructions[lane.position], Copy):
            lane.ready = self.now
        lane.position += 1
        lane.started = self.now

    def count(self, counter: tuple[int, Signal]) -> None:
        """Add 1 to a counter, and let the lanes that wait for it check it again."""
        self.counters[counter] += 1
        for lane in self.waiting.pop(counter, ()):
            if self.machine.turn_us and not lane.compute and self.working[lane.rank, True]:
                self.queued[lane.rank].append(lane)
                self.schedule(self.now + self.machine.turn_us * 1e-6, self.run_queued, lane)
            else:
                self.proceed(lane)

    def run_queued(self, lane: _Lane) -> None:
        """Run a comm lane if it is still in the queue for the core."""
        if lane in self.queued[lane.rank]:
            self.queued[lane.rank].remove(lane)
            self.proceed(lane)

    def start(self, lane: _Lane, instruction: Copy | Compute | Reduce) -> None:
        """Start an instruction that takes time."""
        activity = self.activity(lane, instruction)
        for users in self.sharing(activity):
            users[activity] = None
        self.repace(activity)

    def end(self, event: tuple[_Activity, int]) -> None:
        """End an activity, unless its pace has changed since this event was scheduled."""
        activity, version = event
        if version != activity.version:
            return
        for users in self.sharing(activity):
            del users[activity]
        self.repace(activity)
        if activity.until > self.now:
            self.schedule(activity.until + self.machine.wake_us * 1e-6, self.resume, activity.lane)
        else:
            self.resume(activity.lane)

    def sharing(self, activity: _Activity) -> list[Users]:
        """The sets of activities to which an activity belongs: of its links, and of lanes of its
        kind on its cores.
        """
        links = [self.users[link] for link in activity.links]
        return links + [self.working[rank, activity.lane.compute] for rank in activity.ranks]

    def resume(self, lane: _Lane) -> None:
        """Continue a lane after an instruction that took time."""
        self.finish(lane)
        self.proceed(lane)

    def repace(self, changed: _Activity) -> None:
        """Update the pace of all activities that share a link or a core with one that has started
        or ended, and schedule their new ends.
        """
        affected: Users = {}
        for link in changed.links:
            affected |= self.users[link]
            self.demanded[link] = sum(user.demand for user in self.users[link])
        for rank in {
            *changed.ranks,
            *(rank for other in affected if other.core for rank in other.ranks),
        }:
            affected |= self.working[rank, True] | self.working[rank, False]
        for activity in affected:
            pace = 1.0
            for link in activity.links:
                pace = min(pace, 1 / max(1.0, self.demanded[link]))
            pace *= self.core_share(activity)
            if pace != activity.pace:
                activity.left -= (self.now - activity.since) * activity.pace
                activity.since = self.now
                activity.pace = pace
                activity.version += 1
                self.schedule(
                    self.now + max(activity.left, 0.0) / pace,
                    self.end,
                    (activity, activity.version),
                )

    def core_share(self, activity: _Activity) -> float:
        """The factor of an activity's pace due to concurrent work on its cores."""
        lane = activity.lane
        # if transfers need more than half of a core, they share it evenly with a product
        if activity.core:
            busy = max(
                (self.transfer_load(rank) for rank in activity.ranks if self.working[rank, True]),
                default=0.0,
            )
            return 0.5 / max(0.5, busy)
        others = self.working[lane.rank, not lane.compute]
        if lane.compute:
            copying = any(not other.core for other in others)
            return (1 - min(0.5, self.transfer_load(lane.rank))) / (
                self.machine.compute_slowdown if copying else 1.0
            )
        return 1 / self.machine.communicate_slowdown if others else 1.0

    def transfer_load(self, rank: int) -> float:
        """The part of a rank's core that its transfers to and from other hosts need."""
        return sum(
            transfer.core / max(len(self.users[link]) for link in transfer.links)
            for transfer in self.working[rank, False]
            if transfer.core
        )

    def activity(self, lane: _Lane, instruction: Copy | Compute | Reduce) -> _Activity:
        """The work of an instruction that starts now."""
        machine = self.machine
        rank = lane.rank
        make = partial(_Activity, lane, self.now)
        match instruction:
            case Compute(kernel, srcs, dst):
                columns = tuple(self.rows[region.buffer].columns for region in (*srcs, dst))
                dtype = self.rows[srcs[0].buffer].dtype
                size = sum(map(self.size, srcs))
                work = kernel.seconds(machine, Load(dst.rows, columns, dtype, size, self.packed))
                return self.making(lane, max(work, self.fetching(rank, srcs)), dst)
            case Reduce(srcs):
                return make(
                    max(machine.reduce(sum(map(self.size, srcs))), self.fetching(rank, srcs))
                )
            case Copy(src, dst, compress):
                size = self.compressed_size(src) if compress else self.size(src)
                link = machine.link(src.rank, dst.rank)
                if src.rank == dst.rank:
                    return make(machine.copy(size))
                if link.idle:
                    self.free[rank] = max(self.free[rank], lane.ready) + link.seconds(size)
                    return make(machine.copy(size), until=self.free[rank])
                used = self.resources(link, src.rank, dst.rank)
                if not machine.on_other_hosts(src.rank, dst.rank):
                    return make(link.seconds(size) + link.line_us * 1e-6, used)
                # The signal has the latency: messages follow each other without one. If the
                # receiver is a counterpart of this rank, both ends load this rank's core.
                ends = tuple({rank, dst.rank % self.ranks_planned})
                busy: dict[str, Any] = (
                    {"ranks": ends, "core": link.core * 2 / len(ends)} if link.core else {}
                )
                return make(link.passing(size), used, **busy)

    def making(self, lane: _Lane, work: float, dst: Region) -> _Activity:
        """The work of making rows: stores to a peer leave while the rows are made, so the slower of
        both counts, and the last row arrives a latency later. Where peers' memory is not used like
        own memory they slow the work as transfers do.
        """
        link = self.machine.link(lane.rank, dst.rank)
        if dst.rank == lane.rank or link.idle:
            return _Activity(lane, self.now, work)
        passing = link.passing(self.size(dst))
        work *= 1.0 if self.machine.in_place else self.machine.compute_slowdown
        work = max(work, passing) + link.latency_us * 1e-6 + link.line_us * 1e-6
        used = self.resources(link, lane.rank, dst.rank)
        return _Activity(lane, self.now, work, used, demand=passing / work if work else 0.0)

    def size(self, region: Region) -> int:
        columns, dtype = self.rows[region.buffer]
        return region.rows * columns * ITEMSIZE[dtype]

    def compressed_size(self, region: Region) -> int:
        return region.rows * row_bytes(self.rows[region.buffer].columns)

    def fetching(self, rank: int, regions: Iterable[Region]) -> float:
        """Seconds for which peers' rows, read in place, pass the links: those of each peer over its
        own, of as many peers at a time as the rank has lanes.
        """
        links = [
            (self.machine.link(rank, region.rank), self.size(region))
            for region in regions
            if region.rank != rank
        ]
        passing = [0.0 if link.idle else link.passing(size) for link, size in links]
        longest = max(*passing, sum(passing) / self.machine.lanes) if passing else 0.0
        return longest + sum(link.line_us for link, _ in links) * 1e-6 / self.machine.fetches

    def resources(self, link: LinkRate, src: int, dst: int) -> tuple[Resource, ...]:
        """The links that a transfer shares with others; an unplanned rank uses the links of its
        counterpart.
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
