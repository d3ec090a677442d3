"""Plans of collectives in the form of MSCCL++'s execution plans: the plan that such a file is read
as.

Lanes become thread blocks, workspaces scratch, and each counter that a lane waits for a separate
channel, since a wait consumes what it waits for. weft's waits for earlier plans, which share its
workspaces, become a signal of each rank that it has begun. A sum of peers' rows begins with the
rank's own, so its last bits may differ from weft's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Value, Wait
from weft.plan.language import thread_block
from weft.plan.values import Term, mapped
from weft_tools.formats.mscclpp.collectives import INPUT, OUTPUT, SCRATCH, Shape

_COLLECTIVES = {
    "all_gather": "allgather",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "reduce_scatter": "reducescatter",
}

_BEGUN = "begun"


class Counted(NamedTuple):
    """A counter of a rank as one of its lanes waits for it."""

    rank: int
    signal: Signal
    lane: str


def exported(plan: Plan) -> Plan:
    """The plan over rows in the form of an execution plan.

    Raises `ValueError` that names the parts which execution plans cannot express.
    """
    return _Exported(plan).made()


class _Exported:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        letters = {"input": INPUT, "output": OUTPUT}
        self.letters = {
            name: letters.get(buffer.role, SCRATCH) for name, buffer in plan.buffers.items()
        }
        for letter in letters.values():
            named = [name for name, each in self.letters.items() if each == letter]
            if len(named) != 1:
                raise ValueError(
                    f"an execution plan has one input and one output; this one has {named}"
                )
        if any(buffer.role in ("inout", "private") for buffer in plan.buffers.values()):
            raise ValueError("the plan is one of another system")
        self.starts = [self.scratch(rank) for rank in range(plan.ranks)]
        self.waiting = [*self.counters()]
        self.names = self.named()

    def made(self) -> Plan:
        plan = self.plan
        rows = {self.letters[name]: each.rows for name, each in plan.buffers.items() if each.given}
        buffers = {
            INPUT: Buffer("input", rows[INPUT]),
            OUTPUT: Buffer("output", rows[OUTPUT]),
        }
        scratch = tuple(starts[""] for starts in self.starts)
        if any(scratch):
            eager = any(each.role == "eager" for each in plan.buffers.values())
            buffers[SCRATCH] = Buffer("private", scratch, copies=1 + eager)
        lanes = [self.lanes(rank) for rank in range(plan.ranks)]
        collective = _COLLECTIVES.get(plan.operator, "custom")
        name = f"weft_{plan.operator}_{plan.algorithm}".replace(" ", "_")
        result: Mapping[Region, Value] = {
            self.region(region): mapped(value, self.term) for region, value in plan.result.items()
        }
        if collective != "custom":
            shape = Shape(collective, plan.ranks, rows[INPUT][0], rows[OUTPUT][0], False)
            shape.check()
            result = shape.promise()
        return Plan(collective, name, buffers, tuple(lanes), result)

    def scratch(self, rank: int) -> dict[str, int]:
        """Where each workspace of a rank begins in its scratch, and, without a name, the end."""
        names = [name for name, letter in self.letters.items() if letter == SCRATCH]
        rows = [self.plan.buffers[name].rows[rank] for name in names]
        return dict(zip([*names, ""], accumulate(rows, initial=0), strict=True))

    def region(self, region: Region) -> Region:
        by = self.starts[region.rank].get(region.buffer, 0)
        letter = self.letters[region.buffer]
        return Region(region.rank, letter, region.start + by, region.stop + by)

    def term(self, term: Term) -> Term:
        return term._replace(buffer=self.letters[term.buffer])

    def counters(self) -> Iterator[Counted]:
        """The counters for which lanes wait; those of earlier plans have the name ``begun``."""
        found: dict[Counted, None] = {}
        for rank, lanes in enumerate(self.plan.lanes):
            for name, lane in lanes.items():
                for instruction in lane:
                    match instruction:
                        case Wait(Signal("free", source), 0) if source != rank:
                            found[Counted(rank, Signal(_BEGUN, source), name)] = None
                        case Wait(_, 0):
                            raise ValueError(f"{instruction} is for an earlier plan")
                        case Wait(signal):
                            found[Counted(rank, signal, name)] = None
        yield from found

    def named(self) -> Mapping[Counted, Signal]:
        """The signals of counters: the number-th channel between two ranks, or semaphore of one."""
        numbers: Counter[tuple[int, int]] = Counter()
        found = {}
        for counted in self.waiting:
            source = counted.signal.source
            what = "semaphore" if source == counted.rank else "memory"
            number = numbers[source, counted.rank]
            numbers[source, counted.rank] += 1
            found[counted] = Signal(f"{what} {number}", source)
        return found

    def lanes(self, rank: int) -> Mapping[str, tuple[Instruction, ...]]:
        """The thread blocks of a rank; the first one tells that the rank has begun."""
        begun = [
            Notify(counted.rank, signal, relaxed=True)
            for counted, signal in self.names.items()
            if counted.signal == Signal(_BEGUN, rank)
        ]
        own = self.plan.lanes[rank]
        made = {}
        for number, (name, lane) in enumerate(own.items()):
            first: Sequence[Instruction] = begun if number == 0 else []
            made[thread_block(number)] = (*first, *self.lane(rank, name, lane))
        if begun and not own:
            made[thread_block(0)] = tuple(begun)
        return made

    def lane(self, rank: int, name: str, lane: Sequence[Instruction]) -> Iterator[Instruction]:
        waited: Counter[Signal] = Counter()
        mine = {
            each.signal: sig
            for each, sig in self.names.items()
            if (each.rank, each.lane) == (rank, name)
        }
        for instruction in lane:
            match instruction:
                case Wait(Signal("free", source), 0):
                    signal = mine[Signal(_BEGUN, source)]
                    if not waited[signal]:
                        waited[signal] = 1
                        yield Wait(signal, 1)
                case Wait(signal, count):
                    while waited[mine[signal]] < count:
                        waited[mine[signal]] += 1
                        yield Wait(mine[signal], waited[mine[signal]])
                case Notify(peer, signal):
                    for counted, named in self.names.items():
                        if counted[:2] == (peer, signal):
                            yield replace(instruction, signal=named)
                case _:
                    yield self.move(rank, instruction)
        for signal, named in mine.items():  # what is left would end waits of the next execution
            many = self.plan.notified[rank].get(signal, 1 if signal.name == _BEGUN else 0)
            while waited[named] < many:
                waited[named] += 1
                yield Wait(named, waited[named])

    def move(self, rank: int, instruction: Instruction) -> Copy | Reduce:
        match instruction:
            case Reduce((src,), dst) if src != dst:
                return self.move(rank, Copy(src, dst))
            case Copy(src, dst) if rank in (src.rank, dst.rank):
                return Copy(self.region(src), self.region(dst))
            case Reduce(srcs, dst, op) if op in ("sum", "max", "min"):
                # an execution plan begins a sum of rows of peers with the rank's own
                ordered = sorted(srcs, key=lambda src: src.rank != rank)
                many = sum(src.rank == rank for src in srcs)
                if dst.rank == rank and many in (1, len(srcs)):
                    return Reduce(tuple(map(self.region, ordered)), self.region(dst), op)
        raise ValueError(f"an execution plan has no words for {instruction} of rank {rank}")
