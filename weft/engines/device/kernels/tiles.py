"""The order in which a persistent product kernel makes its tiles: tables that the kernel only
reads, made from plans.

A **tile** is ``BLOCK_M`` x ``BLOCK_N`` elements of a product, less where rows end. Blocks of
`GROUP` tiles one above the other are made column by column, so that what is read of both factors
stays in the cache while it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.plan import Compute, Instruction, Notify, Signal, Wait

GROUP = 8
SOURCES = 2
"""The tensors from which one launch takes rows: those of this rank, and those that arrive."""


def tiles(start: int, stop: int, columns: int, block_m: int) -> Iterator[tuple[int, int, int]]:
    """``(first row, last row + 1, column of tiles)`` of all tiles of rows ``start:stop``."""
    for top in range(start, stop, GROUP * block_m):
        bottom = min(stop, top + GROUP * block_m)
        for column in range(columns):
            for row in range(top, bottom, block_m):
                yield row, min(row + block_m, bottom), column


def runs(lane: Sequence[Instruction]) -> list[tuple[int, int]]:
    """The parts of a compute lane, from a product to a product, that product kernels carry out:
    ``lane[start:stop]``.

    They hold nothing but products, waits and notifies. A notify right after a wait stays outside
    the kernel, since it announces that wait too. So do all notifies of a lane whose products go to
    several outputs: a kernel makes one output after the other.
    """
    several = len({_product(i) for i in lane if isinstance(i, Compute)}) > 1
    found: list[tuple[int, int]] = []
    open_ = False
    for at, instruction in enumerate(lane):
        match instruction:
            case Compute(kernel) if kernel.tiles:
                found.append((found.pop()[0] if open_ else at, at + 1))
                open_ = True
            case Wait():
                pass
            case Notify() if not several and not isinstance(lane[at - 1], Wait):
                pass
            case _:
                open_ = False
    return found


def launches(run: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """A run taken apart into launches: each makes one output, from rows of at most `SOURCES`
    tensors, one after the other.
    """
    for made in dict.fromkeys(_product(i) for i in run if isinstance(i, Compute)):
        part: list[Instruction] = []
        held: list[Instruction] = []  # waits for the product that follows
        sources: list[tuple[int, str]] = []
        for instruction in run:
            match instruction:
                case Compute(_, (src,)) if _product(instruction) == made:
                    if src[:2] != (sources[-1] if sources else None):
                        if len(sources) == SOURCES:
                            yield part
                            part, sources = [], []
                        sources.append(src[:2])
                    part += [*held, instruction]
                    held = []
                case Wait():
                    held.append(instruction)
                case Notify():
                    part.append(instruction)
        yield part


def _product(instruction: Compute) -> tuple[str, str | None]:
    """The buffer and the weight of a product, of which a launch has one each."""
    return instruction.dst.buffer, instruction.weight


class Tables(NamedTuple):
    """What a launch does: its tiles, how many of them are of the first source, its waits, and its
    notifies.

    A tile is ``(first row of the source, last + 1, column, what to add for the row of the result,
    the rank that gets it, waits before it, notifies before it)``: whoever makes it must have been
    through so many of the waits, each ``(signal, count)``. A notify is ``(rank, signal,
    arrivals)``: it is due when it has been arrived at so often, once by each tile since the notify
    before, and once by that one.
    """

    tiles: list[tuple[int, int, int, int, int, int, int]]
    first: int
    waits: list[tuple[Signal, int]]
    notifies: list[tuple[int, Signal, int]]


def follow(part: Sequence[Instruction], columns: int, block_m: int) -> Tables:
    """The tables of a launch; `columns` is the number of tiles side by side."""
    made = Tables([], 0, [], [])
    source, notified = None, 0
    for instruction in part:
        match instruction:
            case Wait(signal, count):
                made.waits.append((signal, count))
            case Compute(_, (src,), dst):
                source = source or src[:2]
                before = dst.start - src.start, dst.rank, len(made.waits), len(made.notifies)
                made.tiles.extend(
                    (*tile, *before) for tile in tiles(src.start, src.stop, columns, block_m)
                )
                if src[:2] == source:
                    made = made._replace(first=len(made.tiles))
            case Notify(rank, signal):
                made.notifies.append(
                    (rank, signal, len(made.tiles) - notified + (len(made.notifies) > 0))
                )
                notified = len(made.tiles)
            case _:
                raise ValueError(
                    f"a product kernel waits, multiplies and notifies; the lane has {instruction}"
                )
    return made
