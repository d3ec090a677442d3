"""What rows hold while a plan is proved: symbols in place of numbers, cut into cells that have one
history each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from weft.plan.language import Term, Value

Pieces = list[tuple[int, int, Value]]
"""``(start, stop, value)`` of rows that lie side by side."""


@dataclass
class Cell:
    """Rows with one history: their value, how often they were written, who wrote them last and who
    read them since.
    """

    value: Value | None = None
    writes: int = 0
    writer: tuple[int, int] | None = None
    readers: dict[int, int] = field(default_factory=dict)


class Rows:
    """A buffer cut into cells at the boundaries of the accesses made so far."""

    def __init__(self, rows: int) -> None:
        self.cuts, self.cells = [0, rows], [Cell()]

    def cut(self, at: int) -> int:
        i = bisect_left(self.cuts, at)
        if self.cuts[i] != at:
            old = self.cells[i - 1]
            self.cuts.insert(i, at)
            self.cells.insert(i, Cell(old.value, old.writes, old.writer, dict(old.readers)))
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


def shifted(value: Value, by: int) -> Value:
    """The value as rows see it that are numbered from elsewhere on."""
    return (
        tuple(Term(rank, buffer, shift + by, weights) for rank, buffer, shift, weights in value)
        if by
        else value
    )


def added(sources: list[Pieces]) -> Pieces:
    """The sum of several values of the same rows."""
    cuts = sorted({at for pieces in sources for a, b, _ in pieces for at in (a, b)})
    return [
        (
            a,
            b,
            tuple(
                t
                for pieces in sources
                for start, stop, value in pieces
                if start <= a and b <= stop
                for t in value
            ),
        )
        for a, b in pairwise(cuts)
    ]


def text(value: Value | None) -> str:
    """A value as people write it."""

    def term(t: Term) -> str:
        product = f" @ B{t.weights[0]}" if t.weights else ""
        return f"{t.buffer}@{t.rank}[row{t.shift:+d}]{product}"

    return " + ".join(map(term, value)) if value else "nothing"
