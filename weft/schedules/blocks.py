"""The blocks of a plan's buffers.

The rows of each rank are cut into the same number of pieces, and a piece is a block: rank r has
``r * pieces : (r + 1) * pieces``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.plan import Region, Term, Value
from weft.plan.lazy import Deferred
from weft.plan.values import reduced


def block(rank: int, buffer: str, number: int) -> Region:
    """A single block of a buffer."""
    return Region(rank, buffer, number, number + 1)


def shard(rank: int, buffer: str, owner: int, pieces: int) -> Region:
    """The blocks of `owner` in a buffer that has the blocks of all ranks."""
    return Region(rank, buffer, owner * pieces, (owner + 1) * pieces)


def around(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """``0:total`` without ``start:stop``."""
    return [(0, start), (stop, total)]


def everything(ranks: int, pieces: int) -> tuple[range, ...]:
    """All blocks, on every rank."""
    return (range(ranks * pieces),) * ranks


def shards(ranks: int, pieces: int) -> tuple[range, ...]:
    """Each rank's own blocks."""
    return tuple(range(rank * pieces, (rank + 1) * pieces) for rank in range(ranks))


def sum_result(
    owned: Sequence[range], op: str, factor: str | None = None
) -> Mapping[Region, Value]:
    """The result of a reduction `op`, such as a sum: ``out`` has that over all ranks of the blocks
    that each rank owns.

    It is a sum of products if there is a `factor`, the buffer that names their weight.
    """
    ranks = range(len(owned))

    def terms(start: int) -> list[Value]:
        return [(Term(p, "a", start, (p, factor) if factor else None),) for p in ranks]

    return Deferred(
        lambda: {
            Region(r, "out", 0, len(owned[r])): reduced(op, terms(owned[r].start), len(owned))
            for r in ranks
        }
    )
