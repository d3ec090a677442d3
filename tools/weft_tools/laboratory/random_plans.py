"""Plans at random, by which the proof and the engines are compared.

A plan is written in one order in which its instructions could be executed one by one. Where that
order matters to two lanes, the later one waits for a signal of the earlier one. So the plan is
right, unless signals are left out (`omitted`), or it is changed afterwards
(`weft_tools.laboratory.mutants`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.plan.kernel import Kernel
from weft.plan.language import (
    ANY_BLOCK,
    ROW,
    Buffer,
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Role,
    Signal,
    Wait,
    accumulates,
    reads,
)
from weft.plan.values import REDUCTIONS, Term, Value, reduced, shifted, whole

LANES = ("compute", "comm")
_LARGEST = 5  # blocks of a buffer
_SLOTS = 2  # slots that are used together
_TARGETS = 3  # copies of one source in a row: engines may execute them together

Lane = tuple[int, str]
"""A rank, and the name of a lane of it."""


class Choices(NamedTuple):
    """The kinds of plans: the host of each rank; the number of instructions that move rows; the
    part of the signals that are left out; the kernel of products, if there are some, and that of
    rows, all rows of a second source and, if it accumulates, its destination; whether averages are
    defined, which are not of integers.
    """

    hosts: Sequence[int]
    moves: int
    omitted: float = 0.0
    kernel: Kernel | None = None
    fold: Kernel | None = None
    averages: bool = True


@dataclass
class _Row:
    """A block of a buffer on a rank: its value, the time at which each lane has read it since the
    last write, and that write. `number` is the block of the plan that it holds.
    """

    value: Value = ()
    writer: tuple[Lane, int] | None = None
    readers: dict[Lane, int] = field(default_factory=dict)
    number: int = 0
    final: bool = False  # an output that is written: it is not written again


def random_plan(dice: random.Random, choices: Choices) -> Plan:
    """A plan that moves, adds and multiplies rows at random: over rows, or over blocks, with slots
    for any block in its workspaces.
    """
    return _Writer(dice, choices).plan()


class _Writer:
    def __init__(self, dice: random.Random, choices: Choices) -> None:
        self.dice, self.choices, self.hosts = dice, choices, choices.hosts
        self.ranks = range(len(choices.hosts))
        self.over_blocks = dice.random() < 0.5
        blocks = dice.randint(1, _LARGEST)
        self.roles: dict[str, Role] = {"a": "input", "out": "output"}
        self.roles |= dict.fromkeys(("one", "two")[: dice.randint(0, 2)], "workspace")
        self.slots = {
            name for name, role in self.roles.items() if role == "workspace" and dice.random() < 0.5
        }
        self.lengths = {
            name: blocks if self.over_blocks and name not in self.slots else dice.randint(1, 6)
            for name in self.roles
        }
        self.rows = {
            (rank, name): [_Row(number=number) for number in range(length)]
            for rank in self.ranks
            for name, length in self.lengths.items()
        }
        every = [(rank, name) for rank in self.ranks for name in LANES]
        self.lanes: dict[Lane, list[Instruction]] = {lane: [] for lane in every}
        self.times = dict.fromkeys(every, 1)
        # what each lane knows: the time of each other lane that it has waited for
        self.known: dict[Lane, dict[Lane, int]] = {
            lane: {other: 1 for other in every if other[0] == lane[0]} for lane in every
        }
        self.raised: dict[tuple[int, Signal], int] = {}
        # buffers with columns that are known: a workspace has those of the rows copied to it
        self.exchanging = {"out"}
        for (rank, name), rows in self.rows.items():
            for at, row in enumerate(rows):
                if self.given(name):  # the caller uses it until the rank begins
                    row.writer = (rank, LANES[0]), 1
                if self.roles[name] == "input":
                    row.value = (Term(rank, name, at),)

    def given(self, buffer: str) -> bool:
        return self.roles[buffer] != "workspace"

    def plan(self) -> Plan:
        for _ in range(self.choices.moves):
            self.move(self.dice.choice([*self.lanes]))
        for rank in self.ranks:
            for at in range(self.lengths["out"]):
                self.fill(rank, at)
        self.leave()
        lanes = tuple(
            {name: tuple(self.entered((rank, name))) for name in LANES if self.lanes[rank, name]}
            for rank in self.ranks
        )
        pieces = (max(self.lengths["a"], self.lengths["out"]),) if self.over_blocks else ()
        return Plan("random", "made up", self.buffers(), lanes, dict(self.result()), pieces)

    def buffers(self) -> dict[str, Buffer]:
        found = {}
        for name, role in self.roles.items():
            length = self.lengths[name]
            if not self.over_blocks:
                found[name] = Buffer(role, (length,) * len(self.ranks))
                continue
            numbers = (ANY_BLOCK,) * length if name in self.slots else range(length)
            found[name] = Buffer.of(role, [numbers] * len(self.ranks))
        return found

    def result(self) -> Iterator[tuple[Region, Value]]:
        for rank in self.ranks:
            for at, row in enumerate(self.rows[rank, "out"]):
                yield Region(rank, "out", at, at + 1), shifted(row.value, -at)

    def move(self, lane: Lane) -> None:
        """Let a lane copy rows, to several places in a row at times, or add or multiply them."""
        source = self.source(lane)
        if source is None:
            return
        kind = self.dice.random()
        if kind < 0.5:
            self.copy(lane, source)
        elif kind < 0.8 or not (self.choices.kernel or self.choices.fold):
            sources = [source]
            for _ in range(self.dice.randint(0, 2)):
                other = self.source(lane, like=source)
                sources += [other] if other is not None else []
            if target := self.target(lane, source, remote=False):
                every = [op for op in REDUCTIONS if op != "avg" or self.choices.averages]
                op = self.dice.choice(every)
                if self.put(lane, Reduce(tuple(sources), target, op)):
                    self.copy(lane, target, self.dice.choice([target, *sources]))
        elif lane[1] == LANES[0]:
            target = self.target(lane, source, remote=False)
            if target is not None and target.buffer in self.exchanging:
                self.compute(lane, source, target)

    def copy(self, lane: Lane, source: Region, before: Region | None = None) -> None:
        """Copy rows to several places one after the other, at times to one that overlaps the place
        `before`: there the order of the lane decides which rows remain.
        """
        for _ in range(self.dice.randint(1, _TARGETS)):
            near = before if self.dice.random() < 0.5 else None
            target = self.target(lane, source, remote=True, near=near)
            if target is not None and self.put(lane, Copy(source, target)):
                before = target

    def compute(self, lane: Lane, source: Region, target: Region) -> None:
        """Multiply rows, or fold all rows of other regions into them, one after the other."""
        if (fold := self.choices.fold) is None or (
            self.choices.kernel is not None and self.dice.random() < 0.5
        ):
            assert self.choices.kernel is not None
            self.put(lane, Compute(self.choices.kernel, (source,), target, "weight"))
            return
        held = all(row.value for row in self.of(target)) and (
            not self.over_blocks or self.numbers(target) == self.numbers(source)
        )
        again = held and self.dice.random() < 0.5
        for _ in range(self.dice.randint(1, _TARGETS)):
            every = self.source(lane)
            if every is None or every.buffer in self.slots:
                return
            sources = (source, every, target) if again else (source, every)
            again = self.put(lane, Compute(fold, sources, target)) or again

    def fill(self, rank: int, at: int) -> None:
        """Write a block of an output that is not written yet, if possible with rows that were
        moved.
        """
        if not self.rows[rank, "out"][at].final:
            lane, out = (rank, self.dice.choice(LANES)), Region(rank, "out", at, at + 1)
            found = [
                Region(rank, name, start, start + 1)
                for name, role in self.roles.items()
                for start in range(self.lengths[name] if role != "output" else 0)
                if self.whole(name, start, start + 1)
                and self.rows[rank, name][start].value
                and (not self.over_blocks or self.rows[rank, name][start].number == at)
            ]
            moved = [region for region in found if not self.given(region.buffer)]
            self.put(lane, Copy(self.dice.choice(moved or found), out))

    def source(self, lane: Lane, like: Region | None = None) -> Region | None:
        """Rows with a value that a lane can read; if `like` is given, of the same blocks."""
        here = [r for r in self.ranks if self.hosts[r] == self.hosts[lane[0]]]
        found = [
            Region(r, name, start, stop)
            for r in here
            for name in self.roles
            for start in range(self.lengths[name])
            for stop in range(start + 1, self.lengths[name] + 1)
            if (stop <= start + 3 if like is None else stop - start == like.rows)
            and self.whole(name, start, stop)
        ]
        found = [region for region in found if all(row.value for row in self.of(region))]
        if like is not None and self.over_blocks:
            found = [r for r in found if self.numbers(r) == self.numbers(like)]
        moved = [region for region in found if not self.given(region.buffer)]
        chosen = moved if moved and self.dice.random() < 0.5 else found
        return self.dice.choice(chosen) if chosen else None

    def target(
        self, lane: Lane, source: Region, remote: bool, near: Region | None = None
    ) -> Region | None:
        """A place for the rows of `source`; on any rank if `remote`, else on a rank of the lane's
        host; one that overlaps `near`, if there is one.
        """
        own = self.hosts[lane[0]]
        if self.hosts[source.rank] != own:
            return None
        numbers, exact = self.numbers(source), source.buffer not in self.slots
        found = [
            Region(r, name, start, start + source.rows)
            for r in self.ranks
            if remote or self.hosts[r] == own
            for name, role in self.roles.items()
            if role != "input"
            for start in range(self.lengths[name] - source.rows + 1)
            if self.whole(name, start, start + source.rows)
            and (
                not self.over_blocks
                or (
                    exact if name in self.slots else numbers == [*range(start, start + source.rows)]
                )
            )
        ]
        found = [region for region in found if not any(row.final for row in self.of(region))]
        nearby = [region for region in found if near and region != near and region.overlaps(near)]
        return self.dice.choice(nearby or found) if found else None

    def whole(self, buffer: str, start: int, stop: int) -> bool:
        """Whether these blocks can be used together: slots of a plan over blocks only from the
        same beginning on.
        """
        if not self.over_blocks or buffer not in self.slots:
            return True
        return start % _SLOTS == 0 and stop <= start + _SLOTS

    def of(self, region: Region) -> list[_Row]:
        return self.rows[region.rank, region.buffer][region.start : region.stop]

    def numbers(self, region: Region) -> list[int]:
        return [row.number for row in self.of(region)]

    def put(self, lane: Lane, move: Copy | Reduce | Compute) -> bool:
        """Append an instruction, after signals for all accesses before it to the same rows; False
        if its operands overlap as no instruction's may.
        """
        sources, target = reads(move), move.dst
        others = sources[:-1] if accumulates(move) else sources
        overlapping = [source for source in others if source.overlaps(target)]
        if overlapping and not (isinstance(move, Reduce) and {*overlapping} == {target}):
            return False
        rows = [row for source in sources for row in self.of(source)]
        self.after(lane, [row.writer for row in rows])
        self.after(lane, [row.writer for row in self.of(target)])
        self.after(lane, [each for row in self.of(target) for each in row.readers.items()])
        if not isinstance(move, Compute):
            self.exchanging.add(target.buffer)
        now = self.append(lane, move)
        values = [self.value(move, lane, at) for at in range(target.rows)]
        for row in rows:
            row.readers[lane] = now
        for row, value, number in zip(
            self.of(target), values, self.numbers(sources[0]), strict=True
        ):
            row.value, row.writer, row.readers, row.number = value, (lane, now), {}, number
            row.final = self.roles[target.buffer] == "output"
        return True

    def value(self, move: Copy | Reduce | Compute, lane: Lane, at: int) -> Value:
        match move:
            case Copy(src, _):
                return self.of(src)[at].value
            case Reduce(srcs, _, op):
                return reduced(op, [self.of(src)[at].value for src in srcs], len(self.ranks))
            case Compute(kernel, srcs, _, weight):
                name = None if weight is None else (lane[0], weight)
                values = [
                    self.every(src) if i in kernel.whole else self.of(src)[at].value
                    for i, src in enumerate(srcs)
                ]
                return kernel.value(values, name)

    def every(self, region: Region) -> Value:
        """The value of all rows of a region."""
        return whole(
            ((row.number,) if self.over_blocks else (ROW,), row.value) for row in self.of(region)
        )

    def append(self, lane: Lane, instruction: Instruction) -> int:
        """Append an instruction to a lane; the time at which it is executed."""
        self.lanes[lane].append(instruction)
        self.times[lane] += 1
        self.known[lane][lane] = self.times[lane]
        return self.times[lane]

    def after(self, lane: Lane, events: Sequence[tuple[Lane, int] | None]) -> None:
        """Let a lane wait for these events, unless it knows of them, or the signal is left out."""
        for event in events:
            if event is None:
                continue
            other, time = event
            if other == lane or self.known[lane].get(other, 0) >= time:
                continue
            if self.dice.random() < self.choices.omitted:
                continue
            signal = Signal(f"{other[1]} to {lane[1]}", other[0])
            self.append(other, Notify(lane[0], signal))
            count = self.raised[lane[0], signal] = self.raised.get((lane[0], signal), 0) + 1
            self.append(lane, Wait(signal, count))
            for each, known in self.known[other].items():
                self.known[lane][each] = max(known, self.known[lane].get(each, 0))

    def leave(self) -> None:
        """Let ranks wait for all accesses of peers to their inputs and outputs, and tell all of the
        end of their own accesses to workspaces.
        """
        for rank in self.ranks:
            lane = rank, LANES[0]
            for name in filter(self.given, self.roles):
                for row in self.rows[rank, name]:
                    self.after(lane, [row.writer, *row.readers.items()])
        if not any(role == "workspace" for role in self.roles.values()):
            return
        for rank in self.ranks:
            lane = rank, LANES[0]
            self.after(lane, [((rank, name), self.times[rank, name]) for name in LANES[1:]])
            for peer in self.ranks:
                if peer != rank:
                    self.append(lane, Notify(peer, Signal("free", rank)))

    def entered(self, lane: Lane) -> Iterator[Instruction]:
        """The instructions of a lane; first it waits until no rank uses the workspaces for an
        earlier plan.
        """
        if any(role == "workspace" for role in self.roles.values()):
            yield from (Wait(Signal("free", peer), 0) for peer in self.ranks if peer != lane[0])
        yield from self.lanes[lane]
