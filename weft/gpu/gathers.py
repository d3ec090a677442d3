"""Copies of a rank's rows to all ranks on a device, with the notifies and waits around them, as one
launch of `kernels.all_gather`.

So a plan whose `launch` asks for the kernel is executed as it is written and proved: its copies,
its counters and their order, by other means than a copy engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import PlanError
from weft.gpu.counters import DeviceCounters
from weft.gpu.kernels import symmetric
from weft.gpu.kernels.all_gather import Distances, GatherKernel, SignalTables
from weft.gpu.lanes import LaneOperands, Step
from weft.plan import Copy, Instruction, Launch, Notify, Region, Signal, Wait

if TYPE_CHECKING:
    from weft.gpu.program import DeviceProgram


class FanOut(NamedTuple):
    """The instructions `part` of a lane: notifies of the signal `opened`, if there are any; waits
    for `least` notifies of `awaited`; copies of `src` to `dst` on every rank; notifies of
    `arrived`, and waits for it. Every signal goes to all peers, or comes from them.
    """

    part: range
    opened: str | None
    awaited: str
    least: int
    src: Region
    dst: Region
    arrived: str


def fan_outs(lane: Sequence[Instruction], rank: int, ranks: int) -> list[FanOut]:
    """The parts of a rank's lane that the kernel executes, each instruction in one of them at most.
    Raises `PlanError` for copies to peers that it cannot execute.
    """
    groups = [tuple(group) for _, group in groupby(lane, type)]
    found = list[FanOut]()
    starts = [0, *accumulate(map(len, groups))]
    for at in range(len(groups) - 3):
        if found and starts[at] < found[-1].part.stop:
            continue  # a kernel that executed the same notifies and waits would repeat them
        waits, copies, notifies, arrivals = groups[at : at + 4]
        awaited, arrived = _waited(waits, rank, ranks), _notified(notifies, rank, ranks)
        if not (awaited and arrived and _waited(arrivals, rank, ranks) == (arrived, 1)):
            continue
        opened = _notified(groups[at - 1], rank, ranks) if at else None
        own = [i for i in copies if isinstance(i, Copy) and i.dst.rank == rank]
        if {*copies} == {Copy(i.src, i.dst._replace(rank=r)) for i in own for r in range(ranks)}:
            start = starts[at - (opened is not None)]
            stop = starts[at + 4]
            found.append(
                FanOut(range(start, stop), opened, *awaited, own[0].src, own[0].dst, arrived)
            )
    launched = {at for each in found for at in each.part}
    for at, i in enumerate(lane):
        if isinstance(i, Copy) and i.dst.rank != rank and at not in launched:
            raise PlanError(
                "a kernel puts rows to all ranks, after waits for all peers, and before notifies "
                f"of all and waits for them; so it cannot execute this instruction: {i}"
            )
    return found


def _notified(group: Sequence[Instruction], rank: int, ranks: int) -> str | None:
    """The signal that a group of notifies raises on all peers; None for other instructions."""
    names = {i.signal.name for i in group if isinstance(i, Notify)}
    every = {Notify(r, Signal(name, rank)) for name in names for r in range(ranks) if r != rank}
    return next(iter(names)) if len(names) == 1 and {*group} == every else None


def _waited(group: Sequence[Instruction], rank: int, ranks: int) -> tuple[str, int] | None:
    """The signal and the count for which a group of waits waits, from all peers; None for other
    instructions.
    """
    waited = {(i.signal.name, i.count) for i in group if isinstance(i, Wait)}
    every = {Wait(Signal(n, r), count) for n, count in waited for r in range(ranks) if r != rank}
    return next(iter(waited)) if len(waited) == 1 and {*group} == every else None


class GatherLaunch:
    """The launch of the kernel in a program, for a part of its compute lane."""

    def __init__(self, part: FanOut, program: DeviceProgram, launch: Launch) -> None:
        world = program.world
        engine = program.engine
        counters = program.engine.counters
        assert isinstance(counters, DeviceCounters)
        self.counters = counters
        self.source = part.src
        shard, gathered = program.geometry[part.src.buffer], program.geometry[part.dst.buffer]
        segment, begin = program.place(part.dst.buffer)
        row = shard.columns * shard.dtype.itemsize
        place = begin + part.dst.start * gathered.stride
        self.segment = segment.bytes(world.rank)
        self.bases = symmetric.bases_of(world, segment)

        def index(name: str) -> int:
            return engine.index(Signal(name, 0))

        self.kernel = GatherKernel(
            Distances(part.src.rows, row, shard.stride, gathered.stride, place),
            shard.dtype.itemsize,
            SignalTables(
                -1 if part.opened is None else index(part.opened),
                index(part.awaited),
                part.least,
                index(part.arrived),
            ),
            launch,
            world.rank,
            world.ranks,
            world.device,
        )

    def step(self, operands: LaneOperands, idle: bool = False) -> Step:
        """The launch with these operands; an `idle` launch only loads the kernel."""
        buffer, start, stop = self.source[1:]
        shard = operands.tensors[buffer][start:stop]
        limit = symmetric.time_limit(operands.timeout)
        tables = self.counters.tables
        return lambda: self.kernel(shard, self.segment, self.bases, tables, limit, idle)
