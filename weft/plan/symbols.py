"""The values of rows while a plan is proved: symbols in place of numbers, in cells of rows with one
history each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from weft.plan.values import Value, shifted, whole


class Read(NamedTuple):
    """A read by a lane at a time, of the row ``row + shift`` of a buffer."""

    lane: int
    time: int
    rank: int
    buffer: str
    shift: int


Pieces = list[tuple[int, int, Value]]
"""``(start, stop, value)`` of adjacent rows."""


@dataclass
class Cell:
    """Rows with one history: their value, the number of writes and the execution that made them,
    the lane of the last write and the lanes that have read since, each with its time. `made_of` has
    the reads that the value follows from, in plans whose rows have flags.
    """

    value: Value | None = None
    writes: int = 0
    execution: int = -1
    writer: tuple[int, int] | None = None
    readers: dict[int, int] = field(default_factory=dict)
    made_of: frozenset[Read] = frozenset()


class RowsOfValue:
    """A buffer cut into cells at the boundaries of the accesses made so far."""

    def __init__(self, rows: int) -> None:
        self.cuts, self.cells = [0, rows], [Cell()]

    def cut(self, at: int) -> int:
        i = bisect_left(self.cuts, at)
        if self.cuts[i] != at:
            old = self.cells[i - 1]
            self.cuts.insert(i, at)
            self.cells.insert(i, replace(old, readers=dict(old.readers)))
        return i

    def over(self, start: int, stop: int) -> Iterable[tuple[int, int, Cell]]:
        if start < stop:
            first, last = self.cut(start), self.cut(stop)
            yield from zip(
                self.cuts[first:last],
                self.cuts[first + 1 : last + 1],
                self.cells[first:last],
                strict=True,
            )


def every(pieces: Pieces, numbers: Sequence[int]) -> Value:
    """The value of all rows of a source, which has blocks of these `numbers`."""
    return whole((numbers[start:stop], shifted(value, start)) for start, stop, value in pieces)


def joined(sources: list[Pieces]) -> Iterator[tuple[int, int, list[Value]]]:
    """The values of each source for the same rows, in pieces with common boundaries."""
    cuts = sorted({at for pieces in sources for a, b, _ in pieces for at in (a, b)})
    for a, b in pairwise(cuts):
        yield (
            a,
            b,
            [
                value
                for pieces in sources
                for start, stop, value in pieces
                if start <= a and b <= stop
            ],
        )
