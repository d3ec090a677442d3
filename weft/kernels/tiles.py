"""The order in which a persistent product kernel makes its tiles: tables that the kernel only reads, made from plans.

A **tile** is ``BLOCK_M`` x ``BLOCK_N`` elements of a product, less where rows end. Blocks of `GROUP` tiles one above the other are
made column by column, so that what is read of both factors stays in the cache while it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.plan import Instruction, Matmul, Signal, Wait

GROUP = 8


def tiles(start: int, stop: int, columns: int, block_m: int) -> Iterator[tuple[int, int, int]]:
    """``(first row, last row + 1, column of tiles)`` of all tiles of rows ``start:stop``."""
    for top in range(start, stop, GROUP * block_m):
        bottom = min(stop, top + GROUP * block_m)
        for column in range(columns):
            for row in range(top, bottom, block_m):
                yield row, min(row + block_m, bottom), column


def follow(
    lane: Sequence[Instruction], columns: int, block_m: int
) -> tuple[list[tuple[int, int, int, int, int]], list[tuple[Signal, int]]]:
    """The tiles and the waits of a lane of `Matmul` and `Wait`, in their order.

    A tile is ``(first row of the source, last + 1, column, what to add for the row of the result, waits before it)``: whoever makes
    it must have been through so many of the waits, each ``(signal, count)``.
    """
    made: list[tuple[int, int, int, int, int]] = []
    waits: list[tuple[Signal, int]] = []
    for instruction in lane:
        match instruction:
            case Wait(signal, count):
                waits.append((signal, count))
            case Matmul(src, dst):
                shift = dst.start - src.start
                made += [(*tile, shift, len(waits)) for tile in tiles(src.start, src.stop, columns, block_m)]
            case _:
                raise ValueError(f"a product kernel waits and multiplies; the lane has {instruction}")
    return made, waits
