"""The operations of thread blocks as instructions of their lanes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from weft.plan import Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.plan import reads as reads_of
from weft.plan import writes as writes_of
from weft.plan.language import port, thread_block
from weft_tools.formats.mscclpp.blocks import DEFERRED, Block, Placed, deferred
from weft_tools.formats.mscclpp.collectives import (
    INPUT,
    MOST_DEFECTS,
    MOST_TOGETHER,
    OUTPUT,
    REGISTERS,
    SCRATCH,
    Shape,
    at_most,
    whole,
)

T = TypeVar("T")

Json = Mapping[str, Any]

PACKETS = ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt")
"""The operations on rows with flags."""


def place(rank: int, block: int, at: int, name: str) -> str:
    """Where an operation is in the file."""
    return f"rank {rank}, thread block {block}, operation {at} ({name})"


class Channel(NamedTuple):
    """A channel of a rank to a `peer`: the number-th of its kind between these two."""

    kind: str
    peer: int
    number: int

    def signal(self, source: int) -> Signal:
        """The counter by which rank `source` signals over it."""
        return Signal(f"{self.kind} {self.number}", source)


@dataclass
class Reading:
    """A file while it is read: the rows of a chunk (`unit`), whether scratch has flags, and the
    channels of each rank; and what operations leave behind, the defects, the waits for each counter
    so far with the thread block that waits, which of them are relaxed, and the rows of registers.
    """

    shape: Shape
    unit: int
    flagged: bool
    channels: Sequence[Mapping[str, Sequence[Channel]]]
    defects: list[str] = field(default_factory=list)
    waits: Counter[tuple[int, Signal]] = field(default_factory=Counter)
    waiters: dict[tuple[int, Signal], str] = field(default_factory=dict)
    relaxed: set[tuple[int, Signal, int]] = field(default_factory=set)
    registers: Counter[int] = field(default_factory=Counter)


class Rank:
    """Reads the thread blocks of one rank."""

    def __init__(self, reading: Reading, rank: int, gpu: Json) -> None:
        self.reading, self.rank, self.gpu = reading, rank, gpu
        # by the port channel and the thread block that posts
        self.ports: dict[tuple[int, int], list[Placed]] = {}
        self.posted: Counter[tuple[int, int]] = Counter()
        self.owners: dict[tuple[str, int], int] = {}
        self.flushes: Counter[tuple[int, int]] = Counter()
        self.readings: Counter[tuple[int, int]] = Counter()
        self.deferred_lanes: list[tuple[int, list[Placed]]] = []
        self.barriers: dict[int, list[int]] = defaultdict(list)
        for block in gpu["threadblocks"]:
            for operation in block["ops"]:
                if operation["name"] == "barrier":
                    blocks = self.barriers[operation["barrier_id"]]
                    if block["id"] not in blocks:
                        blocks.append(block["id"])

    def read(self) -> dict[str, list[Placed]]:
        lanes = {}
        for file in self.gpu["threadblocks"]:
            number = whole(
                file["id"], f"the number of a thread block of rank {self.rank}", 0, DEFERRED
            )
            block = Block(self.rank, number)
            for at, operation in enumerate(file["ops"]):
                _Operation(self, file, block, operation, at).read()
            block.meet()
            lanes[thread_block(block.number)] = block.lane
            self.deferred_lanes += [(block.number, lane) for lane in block.deferred_lanes]
        if len(lanes) != len(self.gpu["threadblocks"]):
            raise ValueError(f"two thread blocks of rank {self.rank} have one number")
        for number, (of, lane) in enumerate(self.deferred_lanes):
            lanes[deferred(of, number)] = lane
        return lanes | {
            port(block * DEFERRED + number): lane
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

    def __init__(self, of: Rank, file: Json, block: Block, operation: Json, at: int) -> None:
        self.of, self.reading, self.rank = of, of.reading, of.rank
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

    @property
    def place(self) -> str:
        return place(self.rank, self.block.number, self.at, self.name)

    def number(self, given: object, what: str, least: int = 0, stop: int | None = None) -> int:
        """A number that the operation gives."""
        return whole(given, f"{self.place}: {what}", least, stop)

    def pick(self, several: Sequence[T], given: object, what: str) -> T:
        """The one of several with a number that the operation gives."""
        return several[self.number(given, what, 0, len(several))]

    def region(self, buffer: Json) -> Region:
        """The rows of a local or a remote buffer."""
        rank, letter = self.rank, buffer.get("type")
        if "buffer_id" in buffer:
            refs = (
                each["remote_buffer_ids"]
                for each in self.file["remote_buffer_refs"]
                if each["access_channel_type"] == self.kind
            )
            what = "the number of a remote buffer"
            number = self.pick(next(refs, ()), buffer["buffer_id"], what)
            remote = self.pick(self.of.gpu["remote_buffers"], number, what)
            rank = self.number(remote["rank"], "the rank of a buffer", 0, self.reading.shape.ranks)
            letter = remote["type"]
        if letter not in (INPUT, OUTPUT, SCRATCH):
            raise ValueError(f"there is no buffer {letter!r}")
        unit, slices = self.reading.unit, self.json.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        parts = slices["tbg_size"]
        part = self.number(slices["tb_id"], "the part of a thread block", 0, parts)
        rows = self.number(buffer["size"], "the size of a buffer", 1) * unit // parts
        start = self.number(buffer["index"], "the index of a buffer") * unit + part * rows
        return self.reading.shape.place(rank, letter, start, start + rows)

    def regions(self, key: str) -> list[Region]:
        return [*map(self.region, self.json[key])]

    def move(self, *moves: Copy | Reduce) -> None:
        """Append instructions that all threads execute, each its rows of all of them."""
        if self.block.ordered or (self.block.waits and self.name in PACKETS):
            raise ValueError(
                f"{self.place}: weft has no words for threads of which some still wait while "
                "others send packets, or have signalled"
            )
        placed = [Placed(each, self.at) for each in moves]
        at_most(len(self.block.moves), MOST_TOGETHER, f"operations together ({self.place})")
        found = [each for instruction in moves for each in self.conflicts(instruction)]
        after = next(filter(self.block.deferred_of.__contains__, self.same_threads(moves)), None)
        packets = any(self.flagged(src) for each in moves for src in reads_of(each))
        if after is not None or (found and packets):
            self.block.deferred(placed, after)
        else:
            self.reading.defects += found
            at_most(len(self.reading.defects), MOST_DEFECTS, "defects")
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
        return one == two and all(name in PACKETS for name in names)

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
        return self.reading.flagged and region.buffer == SCRATCH

    def check_flags(self, packets: Sequence[Region], plain: Sequence[Region]) -> None:
        """Raise `ValueError` unless scratch is used as packets or as rows alone."""
        wrong = [each for each in packets if each.buffer != SCRATCH]
        wrong += [each for each in plain if self.flagged(each)]
        if wrong:
            raise ValueError(f"{self.place}: {wrong[0]} is used both as packets and as rows")

    def same(self, one: str, many: int, other: str, others: int) -> None:
        """Raise `ValueError` unless the operation has as many of one as of another."""
        if many != others:
            raise ValueError(f"{self.place} has {many} {one} for {others} {other}")

    def copies(self, sources: Sequence[Region], targets: Sequence[Region]) -> Sequence[Copy]:
        self.same("sources", len(sources), "destinations", len(targets))
        return [*map(Copy, sources, targets)]

    def copy(self) -> None:
        sources, targets = self.regions("src_buff"), self.regions("dst_buff")
        flagged = {"cpkt": (targets, sources), "upkt": (sources, targets)}
        self.check_flags(*flagged.get(self.name, ((), sources + targets)))
        self.move(*self.copies(sources, targets))

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
                self.same("sources", len(sources), "packet", 1)
                sources *= len(targets)
            case _:
                self.check_flags((), sources + targets)
        copies = self.copies(sources, targets)
        if self.kind == "port":
            self.same("channels", len(self.json["channel_ids"]), "puts", len(copies))
            for thread, put in enumerate(copies):
                self.post(thread, put)
        else:
            self.move(*copies)

    def reduce(self) -> None:
        own, *others = self.regions("src_buff")
        target, *copies = self.regions("dst_buff")
        stores = {"re": 1, "rre": 1, "repkt": 1, "recpkt": 2}.get(self.name, 1 + len(copies))
        self.same("destinations", 1 + len(copies), "stores", stores)
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
        start = self.reading.registers[self.rank]
        self.reading.registers[self.rank] += rows
        return Region(self.rank, REGISTERS, start, start + rows)

    def channel(self, index: int) -> tuple[int, Channel]:
        """The channel of this kind at an index of the thread block: its number on the rank, and
        itself.
        """
        ids = (
            each["channel_ids"]
            for each in self.file["channels"]
            if each["channel_type"] == self.kind
        )
        what = f"the number of a {self.kind} channel"
        number = self.pick(next(ids, ()), index, what)
        return number, self.pick(self.reading.channels[self.rank][self.kind], number, what)

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
        if self.reading.waiters.setdefault(counter, me) != me:
            raise ValueError(
                f"{self.reading.waiters[counter]} and {me} of rank {self.rank} both wait for "
                f"{signal}: which of them a signal lets go is not determined"
            )
        self.reading.waits[counter] += 1
        count = self.reading.waits[counter]
        if relaxed:
            self.reading.relaxed.add((*counter, count))
        self.block.wait(thread, Wait(signal, max(count - given, 0)), self.at)

    def release(self) -> None:
        for thread, number in enumerate(self.json["semaphore_ids"]):
            self.semaphore(number)
            self.of.own("release semaphore", number, self.block.number)
            signal = Signal(f"semaphore {number}", self.rank)
            self.block.notify(thread, Notify(self.rank, signal), self.at)

    def acquire(self) -> None:
        for thread, number in enumerate(self.json["semaphore_ids"]):
            given = self.number(self.semaphore(number)["init_value"], "the value of a semaphore")
            self.wait_for(thread, Signal(f"semaphore {number}", self.rank), given=given)

    def semaphore(self, number: object) -> Json:
        semaphores: Sequence[Json] = self.of.gpu["semaphores"]
        return self.pick(semaphores, number, "the number of a semaphore")

    def barrier(self) -> None:
        number = self.number(self.json["barrier_id"], "the number of a barrier")
        block = self.block
        blocks = self.of.barriers[number]
        if len(blocks) != self.json["num_threadblocks"]:
            self.reading.defects.append(
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
        lane += [Placed(each, self.at) for each in every]

    def of_port(self, what: str, number: int) -> Signal:
        """A signal between this thread block and a port."""
        return Signal(f"{what} {number} of {self.block.number}", self.rank)

    def post(self, thread: int, put: Copy) -> None:
        number, channel = self.channel(self.json["channel_ids"][thread])
        place = number, self.block.number
        self.reading.defects += self.conflicts(put)
        if self.name == "rppkt":  # all threads meet when the packets are there
            self.block.meet()
            reading = self.of_port("read", number)
            self.of.readings[place] += 1
            self.at_port(thread, number, put, Notify(self.rank, reading, relaxed=True))
            self.block.wait(thread, Wait(reading, self.of.readings[place]), self.at)
            self.block.meet()
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
            self.of.ports[place].append(Placed(Notify(self.rank, done), self.at))
            self.block.wait(thread, Wait(done, self.of.flushes[place]), self.at)
