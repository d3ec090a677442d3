"""Reads an execution plan of MSCCL++ as a plan.

Each thread block becomes a lane, and each port channel one more. A row of the plan is a chunk, or
the slice of one that a thread block of a group works on; all chunks have one size, so a proof holds
for every size that the executor takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from weft.plan import Buffer, Notify, Plan, Region, Signal, Value
from weft_tools.formats.mscclpp.blocks import DEFERRED, Placed
from weft_tools.formats.mscclpp.collectives import (
    BOTH,
    COLLECTIVES,
    INPUT,
    MOST_CHANNELS,
    MOST_OPERATIONS,
    MOST_RANKS,
    MOST_ROWS,
    OUTPUT,
    REGISTERS,
    SCRATCH,
    Shape,
    at_most,
    whole,
)
from weft_tools.formats.mscclpp.operations import PACKETS, Channel, Json, Rank, Reading, place

_REFUSED = {
    "pipeline": "its operations overlap in units of a size that is known only at run time",
    **dict.fromkeys(
        ("gstore", "gstorepkt", "glre", "glres"),
        "it stores to several ranks, or adds up their rows, in the switch between them",
    ),
}


@dataclass(frozen=True)
class Imported:
    """A plan that was read.

    `operations` has the number of the operation that each instruction is of, by rank and lane, and
    `size` the number of all. `defects` are those of the plan's form, which a proof does not see.
    `shared` tells that its scratch is shared with other plans, of which a proof knows nothing.
    """

    plan: Plan
    operations: Sequence[Mapping[str, Sequence[int]]]
    defects: Sequence[str]
    rows_per_chunk: int
    size: int
    shared: bool

    def where(self, rank: int, lane: str, position: int) -> str:
        """Where an instruction is in the file."""
        if lane not in self.operations[rank]:
            return f"rank {rank}"
        kind = lane.rstrip("0123456789")
        block = {"tb": "thread block", "port": "port channel"}[kind]
        of = "" if kind == "tb" else " posted by"
        number = self.operations[rank][lane][position]
        return f"rank {rank}, {block} {int(lane[len(kind) :]) % DEFERRED},{of} operation {number}"

    @property
    def thread_blocks(self) -> int:
        """The most thread blocks of a rank."""
        return max(
            len({int(name[2:]) % DEFERRED for name in lanes if name.startswith("tb")})
            for lanes in self.operations
        )


def read(
    file: object,
    collective: str | None = None,
    result: Mapping[Region, Value] | None = None,
) -> Imported:
    """The plan of an execution plan, the object of its JSON. `collective` is what it promises, by
    default what it says; `result` is what it promises if it is no collective.

    Raises `ValueError` for another object, and for a plan with parts that weft has no words for,
    naming them.
    """
    try:
        return _Reader(file, collective, result).imported()  # type: ignore[arg-type]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"it is no execution plan of MSCCL++ ({what})") from None


def chunks(gpu: Json, buffer: str) -> int:
    """The chunks of a buffer of a rank."""
    key = f"{buffer}_chunks"
    return whole(gpu[key], f"rank {gpu['id']}: {key}")


class _Reader:
    def __init__(
        self, file: Json, collective: str | None, result: Mapping[Region, Value] | None
    ) -> None:
        self.file, self.gpus, self.result = file, file["gpus"], result
        self.ranks = len(self.gpus)
        at_most(self.ranks, MOST_RANKS, "ranks")
        if [gpu["id"] for gpu in self.gpus] != [*range(self.ranks)] or not self.ranks:
            raise ValueError("its gpus are not numbered from 0 on")
        operations = [
            operation
            for gpu in self.gpus
            for block in gpu["threadblocks"]
            for operation in block["ops"]
        ]
        self.size = len(operations)
        at_most(self.size, MOST_OPERATIONS, "operations")
        for operation in operations:
            if why := _REFUSED.get(operation["name"]):
                raise ValueError(f"weft has no words for {operation['name']!r}: {why}")
        self.unit = lcm(
            *(
                whole(
                    each["tbg_info"]["tbg_size"],
                    f"{place(rank, block['id'], at, each['name'])}: the size of a group",
                    1,
                )
                for rank, gpu in enumerate(self.gpus)
                for block in gpu["threadblocks"]
                for at, each in enumerate(block["ops"])
                if "tbg_info" in each
            )
        )
        every = sum(
            chunks(gpu, buffer) for gpu in self.gpus for buffer in ("input", "output", "scratch")
        )
        at_most(every * self.unit, MOST_ROWS, "chunks and parts of them")
        name = collective or file["collective"]
        if name not in COLLECTIVES and result is None:
            raise ValueError(
                f"it does not say what {name!r} promises: name one of {', '.join(COLLECTIVES)}"
            )
        sizes = {(chunks(gpu, "input"), chunks(gpu, "output")) for gpu in self.gpus}
        if len(sizes) > 1:
            raise ValueError("its ranks differ in their chunks")
        ((rows, out_rows),) = sizes
        self.shape = Shape(
            name, self.ranks, rows * self.unit, out_rows * self.unit, bool(file["inplace"])
        )
        if result is None:
            self.shape.check()
        flagged = any(each["name"] in PACKETS for each in operations)
        channels = [self.channels_of(gpu) for gpu in self.gpus]
        self.reading = Reading(self.shape, self.unit, flagged, channels)

    def channels_of(self, gpu: Json) -> Mapping[str, Sequence[Channel]]:
        """The channels of a rank by their kind. The n-th one to a peer is joined with the n-th one
        of that peer to this rank.
        """
        found: dict[str, list[Channel]] = {"memory": [], "port": []}
        for each in gpu["channels"]:
            kind = each["channel_type"]
            if kind not in found:
                raise ValueError(f"weft has no words for channels of the type {kind!r}")
            for given in each["connected_to"]:
                peer = whole(given, f"rank {gpu['id']}: the peer of a channel", 0, self.ranks)
                at_most(len(found[kind]) + 1, MOST_CHANNELS, f"channels of rank {gpu['id']}")
                number = sum(other.peer == peer for other in found[kind])
                found[kind].append(Channel(kind, peer, number))
        return found

    def imported(self) -> Imported:
        reading = self.reading
        lanes = [Rank(reading, rank, gpu).read() for rank, gpu in enumerate(self.gpus)]
        self.weaken(lanes)
        self.check_counts(lanes)
        rows = (self.shape.rows,) * self.ranks
        out_rows = (self.shape.out_rows,) * self.ranks
        buffers = (
            {BOTH: Buffer("inout", max(rows, out_rows))}
            if self.shape.inplace
            else {INPUT: Buffer("input", rows), OUTPUT: Buffer("output", out_rows)}
        )
        scratch = tuple(chunks(gpu, "scratch") * self.unit for gpu in self.gpus)
        if any(scratch):
            copies = 1 + bool(self.file.get("use_double_scratch_buffer"))
            buffers[SCRATCH] = Buffer("private", scratch, copies=copies, flagged=reading.flagged)
        if reading.registers:
            at_most(reading.registers.total(), MOST_ROWS, "chunks and parts of them in registers")
            registers = tuple(reading.registers[rank] for rank in range(self.ranks))
            buffers[REGISTERS] = Buffer("private", registers)
        plan = Plan(
            self.shape.collective,
            str(self.file["name"]),
            buffers,
            tuple({name: tuple(i for i, _ in lane) for name, lane in own.items()} for own in lanes),
            self.shape.promise() if self.result is None else self.result,
        )
        operations = [{name: [at for _, at in lane] for name, lane in own.items()} for own in lanes]
        shared = bool(self.file.get("reuse_resources")) and any(scratch)
        return Imported(plan, operations, reading.defects, self.unit, self.size, shared)

    def weaken(self, lanes: Sequence[dict[str, list[Placed]]]) -> None:
        """Let the notifies for which waits are relaxed be relaxed."""
        for rank, own in enumerate(lanes):
            raised: Counter[tuple[int, Signal]] = Counter()
            for lane in own.values():
                for at, (instruction, number) in enumerate(lane):
                    if isinstance(instruction, Notify):
                        counter = instruction.rank, instruction.signal
                        raised[counter] += 1
                        if (
                            instruction.rank != rank
                            and (*counter, raised[counter]) in self.reading.relaxed
                        ):
                            lane[at] = Placed(replace(instruction, relaxed=True), number)

    def check_counts(self, lanes: Sequence[Mapping[str, Sequence[Placed]]]) -> None:
        """Note the counters that do not return to where they were: what is left ends a wait of the
        next execution.
        """
        raised = Counter(
            (i.rank, i.signal)
            for own in lanes
            for lane in own.values()
            for i, _ in lane
            if isinstance(i, Notify)
        )
        for rank, signal in sorted(raised.keys() | self.reading.waits.keys()):
            many, waits = raised[rank, signal], self.reading.waits[rank, signal]
            if many != waits and signal.name.startswith(("memory", "port", "semaphore")):
                self.reading.defects.append(
                    f"rank {rank} waits {waits} times for {signal}, which is raised {many} times: "
                    "what is left over ends a wait of the next execution"
                )
