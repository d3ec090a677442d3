"""What the collectives of execution plans promise, and where in-place ones have their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.plan import Region, Term, Value, reduced

COLLECTIVES = ("allgather", "allreduce", "alltoall", "reducescatter", "sendrecv")
"""The collectives whose promise is known."""

INPUT, OUTPUT, BOTH, SCRATCH, REGISTERS = "i", "o", "io", "s", "r"
"""The buffers of a plan: the caller's, by the letters of the format, or both in one; scratch; and
registers, in which sums are.
"""


def whole(given: object, what: str, least: int = 0, stop: int | None = None) -> int:
    """The number of a file, if it is a whole one of at least `least` and less than `stop`. Raises
    `ValueError` for all else: Python would take -1 for the last of several.
    """
    if type(given) is not int or given < least or (stop is not None and given >= stop):
        below = "" if stop is None else f" and less than {stop}"
        raise ValueError(f"{what} is {given!r}, no whole number of at least {least}{below}")
    return given


MOST_RANKS = 256
MOST_ROWS = 1 << 22  # of all ranks
MOST_OPERATIONS = 100_000
MOST_CHANNELS = 5000  # of a rank
MOST_TOGETHER = 1000  # operations of a thread block before its threads meet
MOST_DEFECTS = 1000


def at_most(number: int, most: int, what: str) -> None:
    """Raise `ValueError` for more of a file than weft reads, before it is expanded."""
    if number > most:
        raise ValueError(f"it has {number} {what}, and weft reads at most {most}")


class Shape(NamedTuple):
    """A collective on a number of ranks, each with `rows` in the input and `out_rows` in the
    output, which are one buffer if it is `inplace`.
    """

    collective: str
    ranks: int
    rows: int
    out_rows: int
    inplace: bool

    def check(self) -> None:
        """Raise `ValueError` for rows that this collective does not have."""
        shares = {"allgather": (1, self.ranks), "reducescatter": (self.ranks, 1)}
        parts, out_parts = shares.get(self.collective, (1, 1))
        whole = self.collective in ("allreduce", "alltoall") and self.rows % self.ranks
        if self.rows * out_parts != self.out_rows * parts or whole:
            raise ValueError(
                f"{self.collective} of {self.ranks} ranks does not have {self.rows} chunks in and "
                f"{self.out_rows} chunks out"
            )
        if self.inplace and self.collective == "sendrecv":
            raise ValueError("sendrecv in place would overwrite what it has yet to send")

    def place(self, rank: int, letter: str, start: int, stop: int) -> Region:
        """Rows of the input or the output of a rank, or of its scratch."""
        if not self.inplace or letter == SCRATCH:
            return Region(rank, letter, start, stop)
        part = {"allgather": INPUT, "reducescatter": OUTPUT}.get(self.collective)
        by = rank * min(self.rows, self.out_rows) if letter == part else 0
        return Region(rank, BOTH, start + by, stop + by)

    def promise(self) -> dict[Region, Value]:
        """The values of the output at the end."""
        return dict(self._promise())

    def _promise(self) -> Iterator[tuple[Region, Value]]:
        share = max(self.rows, self.out_rows) // self.ranks
        for rank in range(self.ranks):
            match self.collective:
                case "sendrecv":
                    yield self._copied(rank, 0, self.rows, (rank - 1) % self.ranks, 0)
                case "allgather":
                    for p in range(self.ranks):
                        yield self._copied(rank, p * share, (p + 1) * share, p, 0)
                case "alltoall":
                    for p in range(self.ranks):
                        yield self._copied(rank, p * share, (p + 1) * share, p, rank * share)
                case "allreduce":
                    yield self._added(rank, self.rows, 0)
                case "reducescatter":
                    yield self._added(rank, share, rank * share)

    def _copied(self, rank: int, start: int, stop: int, of: int, at: int) -> tuple[Region, Value]:
        dst = self.place(rank, OUTPUT, start, stop)
        src = self.place(of, INPUT, at, at + stop - start)
        return dst, (Term(of, src.buffer, src.start - dst.start),)

    def _added(self, rank: int, rows: int, at: int) -> tuple[Region, Value]:
        dst = self.place(rank, OUTPUT, 0, rows)
        sources: Sequence[Region] = [self.place(p, INPUT, at, at + rows) for p in range(self.ranks)]
        values = [(Term(src.rank, src.buffer, src.start - dst.start),) for src in sources]
        return dst, reduced("sum", values, self.ranks)
