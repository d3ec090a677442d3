"""Reads an execution plan of MSCCL++ as a plan.

Each thread block becomes a lane, and each port channel one more. A row of the plan is a chunk, or
the slice of one that a thread block of a group works on; all chunks have one size, so a proof holds
for every size that the executor takes.

What its threads do not order the plan does not order either: without a ``nop`` between them

- a signal does not cover the rows that the block moves before it: it is a relaxed notify;
- a wait does not hold back the rows that the block moves after it: it comes after them;
- two operations of a block on the same rows are a defect; one that waits for packets may follow
  from the other, so it has a lane of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, NamedTuple

from weft.formats.mscclpp.collectives import (
    BOTH,
    COLLECTIVES,
    INPUT,
    OUTPUT,
    REGISTERS,
    SCRATCH,
    Shape,
)
from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Value, Wait
from weft.plan import reads as reads_of
from weft.plan import writes as writes_of
from weft.plan.language import port, thread_block

Json = Mapping[str, Any]

_REFUSED = {
    "pipeline": "its operations overlap in units of a size that is known only at run time",
    **dict.fromkeys(
        ("gstore", "gstorepkt", "glre", "glres"),
        "it stores to several ranks, or adds up their rows, in the switch between them",
    ),
}
_ASIDE = 1_000_000
_PACKETS = ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt")


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
        return f"rank {rank}, {block} {int(lane[len(kind) :]) % _ASIDE},{of} operation {number}"

    @property
    def thread_blocks(self) -> int:
        """The most thread blocks of a rank."""
        return max(
            len({int(name[2:]) % _ASIDE for name in lanes if name.startswith("tb")})
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


def aside(block: int, number: int) -> str:
    """The name of the lane of an operation that comes when other threads of its thread block may
    still be in the operations before: ``tb1000005`` is the second such lane, of thread block 5.
    """
    return thread_block((number + 1) * _ASIDE + block)


class _Channel(NamedTuple):
    """A channel of a rank to a `peer`: the number-th of its kind between these two."""

    kind: str
    peer: int
    number: int

    def signal(self, source: int) -> Signal:
        """The counter by which rank `source` signals over it."""
        return Signal(f"{self.kind} {self.number}", source)


class _Reader:
    def __init__(
        self, file: Json, collective: str | None, result: Mapping[Region, Value] | None
    ) -> None:
        self.file, self.gpus, self.result = file, file["gpus"], result
        self.ranks = len(self.gpus)
        if [gpu["id"] for gpu in self.gpus] != [*range(self.ranks)] or not self.ranks:
            raise ValueError("its gpus are not numbered from 0 on")
        self.defects: list[str] = []
        operations = [
            operation
            for gpu in self.gpus
            for block in gpu["threadblocks"]
            for operation in block["ops"]
        ]
        self.size = len(operations)
        for operation in operations:
            if why := _REFUSED.get(operation["name"]):
                raise ValueError(f"weft has no words for {operation['name']!r}: {why}")
        self.unit = lcm(
            *(each["tbg_info"]["tbg_size"] for each in operations if "tbg_info" in each)
        )
        self.flagged = any(each["name"] in _PACKETS for each in operations)
        name = collective or file["collective"]
        if name not in COLLECTIVES and result is None:
            raise ValueError(
                f"it does not say what {name!r} promises: name one of {', '.join(COLLECTIVES)}"
            )
        sizes = {(gpu["input_chunks"], gpu["output_chunks"]) for gpu in self.gpus}
        if len(sizes) > 1:
            raise ValueError("its ranks differ in their chunks")
        ((rows, out_rows),) = sizes
        self.shape = Shape(
            name, self.ranks, rows * self.unit, out_rows * self.unit, bool(file["inplace"])
        )
        if result is None:
            self.shape.check()
        self.channels = [self.channels_of(gpu) for gpu in self.gpus]
        # the waits so far, and the thread block that waits
        self.waits: Counter[tuple[int, Signal]] = Counter()
        self.waiters: dict[tuple[int, Signal], str] = {}
        self.relaxed: set[tuple[int, Signal, int]] = set()
        self.registers = [0] * self.ranks

    def channels_of(self, gpu: Json) -> Mapping[str, Sequence[_Channel]]:
        """The channels of a rank by their kind. The n-th one to a peer is joined with the n-th one
        of that peer to this rank.
        """
        found: dict[str, list[_Channel]] = {"memory": [], "port": []}
        for each in gpu["channels"]:
            kind = each["channel_type"]
            if kind not in found:
                raise ValueError(f"weft has no words for channels of the type {kind!r}")
            for peer in each["connected_to"]:
                number = sum(other.peer == peer for other in found[kind])
                found[kind].append(_Channel(kind, peer, number))
        return found

    def imported(self) -> Imported:
        ranks = [_Rank(self, rank, gpu) for rank, gpu in enumerate(self.gpus)]
        lanes = [each.read() for each in ranks]
        self.weaken(lanes)
        self.check_counts(lanes)
        rows = (self.shape.rows,) * self.ranks
        out_rows = (self.shape.out_rows,) * self.ranks
        buffers = (
            {BOTH: Buffer("inout", max(rows, out_rows))}
            if self.shape.inplace
            else {INPUT: Buffer("input", rows), OUTPUT: Buffer("output", out_rows)}
        )
        scratch = tuple(gpu["scratch_chunks"] * self.unit for gpu in self.gpus)
        if any(scratch):
            copies = 1 + bool(self.file.get("use_double_scratch_buffer"))
            buffers[SCRATCH] = Buffer("private", scratch, copies=copies, flagged=self.flagged)
        if any(self.registers):
            buffers[REGISTERS] = Buffer("private", tuple(self.registers))
        plan = Plan(
            self.shape.collective,
            str(self.file["name"]),
            buffers,
            tuple({name: tuple(i for i, _ in lane) for name, lane in own.items()} for own in lanes),
            self.shape.promise() if self.result is None else self.result,
        )
        operations = [{name: [at for _, at in lane] for name, lane in own.items()} for own in lanes]
        shared = bool(self.file.get("reuse_resources")) and any(scratch)
        return Imported(plan, operations, self.defects, self.unit, self.size, shared)

    def weaken(self, lanes: Sequence[dict[str, list[_Placed]]]) -> None:
        """Let the notifies for which waits are relaxed be relaxed."""
        for rank, own in enumerate(lanes):
            raised: Counter[tuple[int, Signal]] = Counter()
            for lane in own.values():
                for at, (instruction, number) in enumerate(lane):
                    if isinstance(instruction, Notify):
                        counter = instruction.rank, instruction.signal
                        raised[counter] += 1
                        if instruction.rank != rank and (*counter, raised[counter]) in self.relaxed:
                            lane[at] = _Placed(replace(instruction, relaxed=True), number)

    def check_counts(self, lanes: Sequence[Mapping[str, Sequence[_Placed]]]) -> None:
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
        for rank, signal in sorted(raised.keys() | self.waits.keys()):
            many, waits = raised[rank, signal], self.waits[rank, signal]
            if many != waits and signal.name.startswith(("memory", "port", "semaphore")):
                self.defects.append(
                    f"rank {rank} waits {waits} times for {signal}, which is raised {many} times: "
                    "what is left over ends a wait of the next execution"
                )


class _Placed(NamedTuple):
    """An instruction, and the number of its operation."""

    instruction: Instruction
    number: int


@dataclass
class _Block:
    """A thread block while it is read: its lane, and since its threads last met the instructions
    that move rows, the threads that wait, and the waits that hold back only what comes after the
    next meeting.
    """

    rank: int
    number: int
    lane: list[_Placed] = field(default_factory=list)
    moves: list[_Placed] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    waits: list[_Placed] = field(default_factory=list)
    start: int = 0
    asides: list[list[_Placed]] = field(default_factory=list)
    aside_of: dict[int | None, int] = field(default_factory=dict)
    met: int = 0

    def meet(self) -> None:
        """All threads of the block meet."""
        self.settle()
        for number, aside in enumerate(self.asides[self.met :], self.met):
            done = Signal(f"turned {number} of {self.number}", self.rank)
            aside.append(_Placed(Notify(self.rank, done), aside[-1].number))
            self.lane.append(_Placed(Wait(done, 1), aside[-1].number))
        self.met = len(self.asides)
        self.aside_of.clear()
        self.start = len(self.lane)
        self.moves.clear()
        self.waiting.clear()

    def aside(self, moves: Sequence[_Placed], after: int | None) -> None:
        """Let instructions come after the operations before them, but know of those only what the
        block has done before its threads last met, and what it did in operation `after`.
        """
        self.settle()
        at, number = moves[0].number, self.aside_of.get(after, len(self.asides))
        knows, comes = (
            Signal(f"{what} {number} of {self.number}", self.rank) for what in ("aside", "turn")
        )
        if number == len(self.asides):
            self.lane.insert(self.start, _Placed(Notify(self.rank, knows), at))
            self.asides.append([_Placed(Wait(knows, 1), at)])
        turns = sum(i == Notify(self.rank, comes, relaxed=True) for i, _ in self.lane)
        self.lane.append(_Placed(Notify(self.rank, comes, relaxed=True), at))
        self.asides[number] += [_Placed(Wait(comes, turns + 1), at), *moves]
        self.aside_of[at] = number

    def settle(self) -> None:
        self.lane += self.waits
        self.waits.clear()

    def wait(self, thread: int, wait: Wait, at: int) -> None:
        self.waiting.add(thread)
        self.waits.append(_Placed(wait, at))

    def notify(self, thread: int, notify: Notify, at: int) -> None:
        """Notify by one thread, which knows what the block has done before the last meeting, and
        what it has waited for itself.
        """
        self.settle()
        alone = self.moves or self.waiting - {thread}
        self.lane.append(_Placed(replace(notify, relaxed=notify.relaxed or bool(alone)), at))


class _Rank:
    """Reads the thread blocks of one rank."""

    def __init__(self, reader: _Reader, rank: int, gpu: Json) -> None:
        self.reader, self.rank, self.gpu = reader, rank, gpu
        # by the port channel and the thread block that posts
        self.ports: dict[tuple[int, int], list[_Placed]] = {}
        self.posted: Counter[tuple[int, int]] = Counter()
        self.owners: dict[tuple[str, int], int] = {}
        self.flushes: Counter[tuple[int, int]] = Counter()
        self.readings: Counter[tuple[int, int]] = Counter()
        self.asides: list[tuple[int, list[_Placed]]] = []
        self.barriers: dict[int, list[int]] = defaultdict(list)
        for block in gpu["threadblocks"]:
            for operation in block["ops"]:
                if operation["name"] == "barrier":
                    blocks = self.barriers[operation["barrier_id"]]
                    if block["id"] not in blocks:
                        blocks.append(block["id"])

    def read(self) -> dict[str, list[_Placed]]:
        lanes = {}
        for file in self.gpu["threadblocks"]:
            block = _Block(self.rank, file["id"])
            for at, operation in enumerate(file["ops"]):
                _Operation(self, file, block, operation, at).read()
            block.meet()
            lanes[thread_block(block.number)] = block.lane
            self.asides += [(block.number, lane) for lane in block.asides]
        if len(lanes) != len(self.gpu["threadblocks"]):
            raise ValueError(f"two thread blocks of rank {self.rank} have one number")
        for number, (of, lane) in enumerate(self.asides):
            lanes[aside(of, number)] = lane
        return lanes | {
            port(block * _ASIDE + number): lane
            for (number, block), lane in sorted(self.ports.items())
        }

    def own(self, what: str, number: int, block: int) -> None:
        """Only one thread block may do this."""
        if self.owners.setdefault((what, number), block) != block:
            raise ValueError(
                f"thread blocks {self.owners[what, number]} and {block} of rank {self.rank} both "
                f"{what} {number}: which of them is first is not determined"
            )


class _Operation:
    """Reads one operation of a thread block."""

    def __init__(self, of: _Rank, file: Json, block: _Block, operation: Json, at: int) -> None:
        self.of, self.reader, self.rank = of, of.reader, of.rank
        self.file, self.block, self.json, self.at = file, block, operation, at
        self.name, self.kind = operation["name"], operation.get("channel_type", "none")

    def read(self) -> None:
        readers: Mapping[str, Callable[[], None]] = {
            "nop": self.block.meet,
            "barrier": self.barrier,
            "signal": self.signal,
            "rlxsignal": self.signal,
            "wait": self.wait,
            "rlxwait": self.wait,
            "sem_release": self.release,
            "sem_acquire": self.acquire,
            "flush": self.flush,
            **dict.fromkeys(("copy", "cpkt", "upkt", "get"), self.copy),
            **dict.fromkeys(("put", "ppkt", "rppkt", "pws", "pwsf"), self.put),
            **dict.fromkeys(
                ("re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"), self.reduce
            ),
        }
        if self.name not in readers:
            raise ValueError(f"weft does not know the operation {self.name!r}")
        readers[self.name]()

    def region(self, buffer: Json) -> Region:
        """The rows of a local or a remote buffer."""
        rank, letter = self.rank, buffer.get("type")
        if "buffer_id" in buffer:
            refs = (
                each["remote_buffer_ids"]
                for each in self.file["remote_buffer_refs"]
                if each["access_channel_type"] == self.kind
            )
            remote = self.of.gpu["remote_buffers"][next(refs, ())[buffer["buffer_id"]]]
            rank, letter = remote["rank"], remote["type"]
        if letter not in (INPUT, OUTPUT, SCRATCH):
            raise ValueError(f"there is no buffer {letter!r}")
        unit, slices = self.reader.unit, self.json.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        rows = buffer["size"] * unit // slices["tbg_size"]
        start = buffer["index"] * unit + slices["tb_id"] * rows
        return self.reader.shape.place(rank, letter, start, start + rows)

    def regions(self, key: str) -> list[Region]:
        return [*map(self.region, self.json[key])]

    def move(self, *moves: Copy | Reduce) -> None:
        """Append instructions that all threads execute, each its rows of all of them."""
        placed = [_Placed(each, self.at) for each in moves]
        found = [each for instruction in moves for each in self.conflicts(instruction)]
        after = next(filter(self.block.aside_of.__contains__, self.same_threads(moves)), None)
        packets = any(self.flagged(src) for each in moves for src in reads_of(each))
        if after is not None or (found and packets):
            self.block.aside(placed, after)
        else:
            self.reader.defects += found
            self.block.lane += placed
        self.block.moves += placed

    def same_threads(self, moves: Sequence[Copy | Reduce]) -> Iterator[int]:
        """The earlier operations of the block on the same packets' rows, the last one first: of
        each packet the same thread executes both.
        """
        for other, number in reversed(self.block.moves):
            if any(self.in_turn(one, two, number) for one, two, _ in self.pairs(moves, other)):
                yield number

    def in_turn(self, one: Region, two: Region, number: int) -> bool:
        """Whether the same threads work on the rows of this and of an earlier operation."""
        names = self.name, self.file["ops"][number]["name"]
        return one == two and all(name in _PACKETS for name in names)

    def pairs(
        self, moves: Sequence[Copy | Reduce], other: Instruction
    ) -> Iterator[tuple[Region, Region, bool]]:
        """The regions of instructions that overlap with those of another, one of which is written;
        and whether these instructions write it.
        """
        for each in moves:
            for one, two, written in (
                *((r, w, False) for r in reads_of(each) for w in writes_of(other)),
                *((w, a, True) for w in writes_of(each) for a in writes_of(other)),
                *((w, a, True) for w in writes_of(each) for a in reads_of(other)),
            ):
                if one.overlaps(two):
                    yield one, two, written

    def conflicts(self, instruction: Copy | Reduce) -> Iterator[str]:
        """The earlier operations of the block that may still have rows of this one in work."""
        for other, number in self.block.moves:
            pairs = [
                (one, two)
                for one, two, written in self.pairs([instruction], other)
                if (written or not self.flagged(two)) and not self.in_turn(one, two, number)
            ]
            if pairs and number != self.at:
                yield (
                    f"rank {self.rank}, thread block {self.block.number}: operation {self.at} "
                    f"({instruction}) and operation {number} ({other}) work on "
                    f"{pairs[0][1]}, and its threads do not meet between them"
                )

    def flagged(self, region: Region) -> bool:
        return self.reader.flagged and region.buffer == SCRATCH

    def check_flags(self, packets: Sequence[Region], plain: Sequence[Region]) -> None:
        """Raise `ValueError` unless scratch is used as packets or as rows alone."""
        wrong = [each for each in packets if each.buffer != SCRATCH]
        wrong += [each for each in plain if self.flagged(each)]
        if wrong:
            raise ValueError(
                f"rank {self.rank}, thread block {self.block.number}, operation {self.at} "
                f"({self.name}): {wrong[0]} is used both as packets and as rows"
            )

    def copy(self) -> None:
        sources, targets = self.regions("src_buff"), self.regions("dst_buff")
        flagged = {"cpkt": (targets, sources), "upkt": (sources, targets)}
        self.check_flags(*flagged.get(self.name, ((), sources + targets)))
        self.move(*map(Copy, sources, targets))

    def put(self) -> None:
        sources, targets = self.regions("src_buff"), self.regions("dst_buff")
        match self.name:
            case "ppkt" if self.kind == "port":
                raise ValueError(
                    "weft has no words for packets that a port sends without a look at their flags "
                    "('ppkt' over a port channel)"
                )
            case "ppkt":
                self.check_flags(targets, sources)
            case "rppkt":
                self.check_flags(sources + targets, ())
                sources = sources[:1] * len(targets)
            case _:
                self.check_flags((), sources + targets)
        if self.kind == "port":
            for thread, (src, dst) in enumerate(zip(sources, targets, strict=True)):
                self.post(thread, src, dst)
        else:
            self.move(*(Copy(src, dst) for src, dst in zip(sources, targets, strict=True)))

    def reduce(self) -> None:
        own, *others = self.regions("src_buff")
        target, *copies = self.regions("dst_buff")
        if self.name in ("repkt", "respkt", "recpkt", "recspkt"):
            self.check_flags([*others, *copies], [own, target])
            added = Reduce((*others, own), self.register(target.rows), self.json["reduce_op"])
            self.move(added, *(Copy(added.dst, each) for each in (*copies, target)))
        else:
            self.check_flags((), [own, *others, target, *copies])
            added = Reduce((own, *others), target, self.json["reduce_op"])
            self.move(added, *(Copy(target, other) for other in copies))

    def register(self, rows: int) -> Region:
        """Registers for rows: packets of a sum do not follow from the rows that it is stored to."""
        start = self.reader.registers[self.rank]
        self.reader.registers[self.rank] += rows
        return Region(self.rank, REGISTERS, start, start + rows)

    def channel(self, index: int) -> tuple[int, _Channel]:
        """The channel of this kind at an index of the thread block: its number on the rank, and
        itself.
        """
        ids = next(
            each["channel_ids"]
            for each in self.file["channels"]
            if each["channel_type"] == self.kind
        )
        return ids[index], self.reader.channels[self.rank][self.kind][ids[index]]

    def signal(self) -> None:
        for thread, index in enumerate(self.json["channel_ids"]):
            number, channel = self.channel(index)
            notify = Notify(channel.peer, channel.signal(self.rank), self.name == "rlxsignal")
            if self.kind == "port":
                self.at_port(thread, number, notify)
            else:
                self.block.notify(thread, notify, self.at)

    def wait(self) -> None:
        for thread, index in enumerate(self.json["channel_ids"]):
            _, channel = self.channel(index)
            self.wait_for(thread, channel.signal(channel.peer), self.name == "rlxwait")

    def wait_for(self, thread: int, signal: Signal, relaxed: bool = False, given: int = 0) -> None:
        """Wait for the next of the signals of a counter, of which the first ones are `given`."""
        counter, me = (self.rank, signal), f"thread block {self.block.number}"
        if self.reader.waiters.setdefault(counter, me) != me:
            raise ValueError(
                f"{self.reader.waiters[counter]} and {me} of rank {self.rank} both wait for "
                f"{signal}: which of them a signal lets go is not determined"
            )
        self.reader.waits[counter] += 1
        count = self.reader.waits[counter]
        if relaxed:
            self.reader.relaxed.add((*counter, count))
        self.block.wait(thread, Wait(signal, max(count - given, 0)), self.at)

    def release(self) -> None:
        for thread, number in enumerate(self.json["semaphore_ids"]):
            self.of.own("release semaphore", number, self.block.number)
            signal = Signal(f"semaphore {number}", self.rank)
            self.block.notify(thread, Notify(self.rank, signal), self.at)

    def acquire(self) -> None:
        for thread, number in enumerate(self.json["semaphore_ids"]):
            given = self.of.gpu["semaphores"][number]["init_value"]
            self.wait_for(thread, Signal(f"semaphore {number}", self.rank), given=given)

    def barrier(self) -> None:
        number, block = self.json["barrier_id"], self.block
        blocks = self.of.barriers[number]
        if len(blocks) != self.json["num_threadblocks"]:
            self.reader.defects.append(
                f"rank {self.rank}, thread block {block.number}, operation {self.at}: barrier "
                f"{number} is of {self.json['num_threadblocks']} thread blocks, but "
                f"{len(blocks)} come to it"
            )
        block.meet()

        def came(other: int) -> Signal:
            return Signal(f"barrier {number} of {other}", self.rank)

        block.notify(0, Notify(self.rank, came(block.number)), self.at)
        mine = sum(
            each["name"] == "barrier" and each["barrier_id"] == number
            for each in self.file["ops"][: self.at + 1]
        )
        for other in blocks:
            if other != block.number:
                block.wait(0, Wait(came(other), mine), self.at)
        block.meet()

    def at_port(self, thread: int, number: int, *instructions: Instruction) -> None:
        """Post instructions to a port, which executes those of a block one after the other."""
        place = number, self.block.number
        lane = self.of.ports.setdefault(place, [])
        posted = self.of_port("posted", number)
        self.of.posted[place] += 1
        self.block.notify(thread, Notify(self.rank, posted), self.at)
        every = (Wait(posted, self.of.posted[place]), *instructions)
        lane += [_Placed(each, self.at) for each in every]

    def of_port(self, what: str, number: int) -> Signal:
        """A signal between this thread block and a port."""
        return Signal(f"{what} {number} of {self.block.number}", self.rank)

    def post(self, thread: int, src: Region, dst: Region) -> None:
        number, channel = self.channel(self.json["channel_ids"][thread])
        place, put = (number, self.block.number), Copy(src, dst)
        self.reader.defects += self.conflicts(put)
        if self.name == "rppkt":  # the block goes on when the packets are there
            reading = self.of_port("read", number)
            self.of.readings[place] += 1
            self.at_port(thread, number, put, Notify(self.rank, reading, relaxed=True))
            self.block.wait(thread, Wait(reading, self.of.readings[place]), self.at)
        elif self.name in ("pws", "pwsf"):
            self.at_port(thread, number, put, Notify(channel.peer, channel.signal(self.rank)))
        else:
            self.at_port(thread, number, put)
        if self.name == "pwsf":
            self.flushed(thread, number)

    def flush(self) -> None:
        for thread, index in enumerate(self.json["channel_ids"]):
            self.flushed(thread, self.channel(index)[0])

    def flushed(self, thread: int, number: int) -> None:
        """Wait until a port has done what was posted to it."""
        place, done = (number, self.block.number), self.of_port("done", number)
        if place in self.of.ports:
            self.of.flushes[place] += 1
            self.of.ports[place].append(_Placed(Notify(self.rank, done), self.at))
            self.block.wait(thread, Wait(done, self.of.flushes[place]), self.at)
