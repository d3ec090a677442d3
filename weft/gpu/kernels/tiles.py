"""The order in which a persistent product kernel computes its tiles: tables made from plans, which
the kernel reads.

A **tile** is ``BLOCK_M`` x ``BLOCK_N`` elements of a product, fewer at the end of the rows. Groups
of `GROUP` vertically adjacent tiles are computed column by column, so that the parts of both
factors that they share stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.plan import Compute, Instruction, Notify, Signal, Wait, accesses

GROUP = 8
"""Tiles of a group, as in Triton's tutorial of products; measured by no GPU."""
SOURCES = 2
"""The number of tensors from which one launch takes rows: this rank's, and the arrivals."""


def tiles(start: int, stop: int, columns: int, block_m: int) -> Iterator[tuple[int, int, int]]:
    """``(first row, last row + 1, column of tiles)`` of all tiles of rows ``start:stop``."""
    for top in range(start, stop, GROUP * block_m):
        bottom = min(stop, top + GROUP * block_m)
        for column in range(columns):
            for row in range(top, bottom, block_m):
                yield row, min(row + block_m, bottom), column


def runs(lane: Sequence[Instruction]) -> list[tuple[int, int]]:
    """The parts ``lane[start:stop]`` of a compute lane that product kernels execute; each begins
    and ends with a product.

    They contain only products, waits and notifies. No product of a part depends on another of it:
    launches have another order, and the tiles of one launch none. A notify directly after a wait is
    not part of a kernel, since it announces that wait, too. Nor are notifies of a lane whose
    products have several outputs: a kernel computes one output after the other.
    """
    several = len({_output(i) for i in lane if isinstance(i, Compute)}) > 1
    found: list[tuple[int, int]] = []
    open_ = False
    for at, instruction in enumerate(lane):
        match instruction:
            case Compute(kernel) if kernel.tiles:
                joins = open_ and not _depends(instruction, lane[found[-1][0] : at])
                found.append((found.pop()[0] if joins else at, at + 1))
                open_ = True
            case Wait():
                pass
            case Notify() if not several and not isinstance(lane[at - 1], Wait):
                pass
            case _:
                open_ = False
    return found


def _depends(product: Compute, run: Sequence[Instruction]) -> bool:
    """Whether a product reads or writes rows that one of a run writes, or writes rows that one
    reads.
    """
    return any(
        any(map(each.dst.overlaps, accesses(product))) or any(map(product.dst.overlaps, each.srcs))
        for each in run
        if isinstance(each, Compute)
    )


def launches(run: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """The launches of a run: each computes one output, from rows of at most `SOURCES` tensors, one
    after the other.
    """
    for output in dict.fromkeys(_output(i) for i in run if isinstance(i, Compute)):
        part: list[Instruction] = []
        waits: list[Instruction] = []  # for the product that follows
        sources: list[tuple[int, str]] = []
        for instruction in run:
            match instruction:
                case Compute(_, (src,)) if _output(instruction) == output:
                    if src[:2] != (sources[-1] if sources else None):
                        if len(sources) == SOURCES:
                            yield part
                            part, sources = [], []
                        sources.append(src[:2])
                    part += [*waits, instruction]
                    waits = []
                case Wait():
                    waits.append(instruction)
                case Notify():
                    part.append(instruction)
        yield part


def _output(instruction: Compute) -> tuple[str, str | None]:
    """The buffer and the weight of a product; a launch has one of each."""
    return instruction.dst.buffer, instruction.weight


class Tables(NamedTuple):
    """A launch: its tiles, the places of their products in the part, the number of tiles of the
    first source, its waits, and its notifies.

    A tile is ``(first row of the source, last + 1, column, row of the result - row of the source,
    destination rank, number of waits before it, number of notifies before it)``: its program must
    have executed that number of the waits, each ``(signal, count)``. A notify is ``(rank, signal,
    arrivals)``: it is due after that number of arrivals, one for each tile since the previous
    notify, and one for the previous notify.
    """

    tiles: list[tuple[int, int, int, int, int, int, int]]
    owners: list[int]
    first: int
    waits: list[tuple[Signal, int]]
    notifies: list[tuple[int, Signal, int]]


def launch_tables(
    part: Sequence[Instruction],
    columns: int,
    block_m: int,
    of_first: tuple[int, int] | None = None,
) -> Tables:
    """The tables of a launch; `columns` is the number of tiles in a row. Tiles of rows of the first
    source have other ones if `of_first`, columns and rows, is given.
    """
    launch = Tables([], [], 0, [], [])
    source = None
    notified = 0
    for place, instruction in enumerate(part):
        match instruction:
            case Wait(signal, count):
                launch.waits.append((signal, count))
            case Compute(_, (src,), dst):
                source = source or src[:2]
                before = dst.start - src.start, dst.rank, len(launch.waits), len(launch.notifies)
                cut = of_first if of_first and src[:2] == source else (columns, block_m)
                made = [*tiles(src.start, src.stop, *cut)]
                launch.tiles.extend((*tile, *before) for tile in made)
                launch.owners.extend([place] * len(made))
                if src[:2] == source:
                    launch = launch._replace(first=len(launch.tiles))
            case Notify(rank, signal):
                launch.notifies.append(
                    (rank, signal, len(launch.tiles) - notified + (len(launch.notifies) > 0))
                )
                notified = len(launch.tiles)
            case _:
                raise ValueError(
                    "a product kernel only waits, multiplies and notifies, but the lane has "
                    f"{instruction}"
                )
    return launch
