"""Binding: the number of rows of each block of a plan, and the plan over rows that results.

Engines bind sizes natively, call by call; `bind` is the slow and simple version, to print, simulate
or check rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from weft.errors import PlanError
from weft.plan.language import (
    ANY_BLOCK,
    ROW,
    Buffer,
    Compute,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Wait,
    whole_sources,
)
from weft.plan.lazy import Deferred, PerRank
from weft.plan.values import Symbol, Term, Value, Whole, mapped, whole


def split(rows: int, pieces: int, multiple: int = 1) -> list[int]:
    """`rows` in `pieces` even shares of a `multiple`; the first ones are one multiple larger, and
    the last one has the rows that are no multiple, if `rows` does not divide.
    """
    units, rest = divmod(rows, multiple)
    shares = [multiple * (units // pieces + (piece < units % pieces)) for piece in range(pieces)]
    if rest:
        shares[-1] += rest
    return shares


def sizes(plan: Plan, rows: Sequence[int]) -> list[int]:
    """The rows of each block of a plan whose shards have these `rows`."""
    if len(rows) != len(plan.pieces):
        raise PlanError(
            f"{plan.operator}/{plan.algorithm} has {len(plan.pieces)} shards, but {len(rows)} "
            "sizes were given"
        )
    return [
        size
        for count, pieces in zip(rows, plan.pieces, strict=True)
        for size in split(count, pieces, plan.rows_multiple)
    ]


def rows_of(plan: Plan, rows: Sequence[int], region: Region) -> int:
    """The rows of a region without slots if the plan's shards have these `rows`."""
    by_block = sizes(plan, rows)
    return sum(1 if number == ROW else by_block[number] for number in plan.numbers(region))


def bind(plan: Plan, rows: Sequence[int]) -> Plan:
    """The plan over rows that a plan over blocks becomes if its shards have these `rows`."""
    return _Binding(plan, sizes(plan, rows)).bound() if plan.pieces else plan


class _Binding:
    def __init__(self, plan: Plan, sizes: Sequence[int]) -> None:
        self.plan, self.sizes, self.largest = plan, sizes, max(sizes, default=0)
        self.begin: dict[tuple[int, str], list[int]] = {}
        # by the numbers of the blocks, which are the same on many ranks
        self.bounds_of: dict[tuple[int, ...] | range, list[int]] = {}

    def bounds(self, rank: int, name: str) -> list[int]:
        """The first row of each block of a rank's buffer, and the end of the last block."""
        if (rank, name) not in self.begin:
            numbers = self.plan.buffers[name].numbers(rank)
            blocks = numbers if isinstance(numbers, range) else tuple(numbers)
            if blocks not in self.bounds_of:
                self.bounds_of[blocks] = [0, *accumulate(map(self.size, blocks))]
            self.begin[rank, name] = self.bounds_of[blocks]
        return self.begin[rank, name]

    def size(self, block: int) -> int:
        return self.largest if block == ANY_BLOCK else 1 if block == ROW else self.sizes[block]

    def bound(self) -> Plan:
        plan = self.plan
        buffers = {
            name: Buffer(
                buffer.role, tuple(self.bounds(rank, name)[-1] for rank in range(plan.ranks))
            )
            for name, buffer in plan.buffers.items()
        }
        lanes = PerRank(plan.ranks, self.lanes)
        return replace(
            plan,
            buffers=buffers,
            lanes=lanes,
            result=Deferred(self.result),
            pieces=(),
            rows_multiple=1,
        )

    def lanes(self, rank: int) -> Mapping[str, tuple[Instruction, ...]]:
        lanes = self.plan.lanes[rank]
        return {name: tuple(map(self.instruction, lane)) for name, lane in lanes.items()}

    def result(self) -> Mapping[Region, Value]:
        return dict(
            self.promise(region, value)
            for region, value in self.plan.result.items()
            if self.rows(region)
        )

    def rows(self, region: Region) -> int:
        bounds = self.bounds(region.rank, region.buffer)
        return bounds[region.stop] - bounds[region.start]

    def region(self, region: Region, rows: int) -> Region:
        start = self.bounds(region.rank, region.buffer)[region.start]
        return region._replace(start=start, stop=start + rows)

    def instruction(self, instruction: Instruction) -> Instruction:
        if isinstance(instruction, Notify | Wait):
            return instruction
        rows = self.rows(self.plan.sizing_region(instruction))
        dst = self.region(instruction.dst, rows)
        if isinstance(instruction, Compute | Reduce):
            apart = whole_sources(instruction)
            srcs = (
                self.region(src, self.rows(src) if at in apart else rows)
                for at, src in enumerate(instruction.srcs)
            )
            return replace(instruction, srcs=tuple(srcs), dst=dst)
        return replace(instruction, src=self.region(instruction.src, rows), dst=dst)

    def promise(self, region: Region, value: Value) -> tuple[Region, Value]:
        start = self.bounds(region.rank, region.buffer)[region.start]
        return self.region(region, self.rows(region)), mapped(
            value, lambda term: self.term(term, region.start, start), self.whole
        )

    def whole(self, blocks: Whole) -> Symbol:
        """All rows of a source as parts of rows, in place of blocks."""
        parts = (
            ((ROW,) * sum(map(self.size, numbers)), mapped(part, self.from_first, self.whole))
            for numbers, part in blocks.parts
        )
        (rows,) = whole(parts)
        return rows

    def from_first(self, term: Term) -> Term:
        """A term of rows counted from the first one, in place of blocks."""
        return self.term(term, 0, 0)

    def term(self, term: Term, block: int, row: int) -> Term:
        return term._replace(shift=self.bounds(term.rank, term.buffer)[block + term.shift] - row)
