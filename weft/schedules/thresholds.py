"""Thresholds: the sizes at which collectives change their plan, from the caches of a core.

Ranks must agree, so they exchange their own when a world is made, and all take the `agreed` ones.
Sizes that follow from the fixed cost of a message or a signal are in `ops.granularity`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

EAGER_BUFFER_BYTES = 64 << 10
"""Bytes of an eager buffer, the limit of eager messages: it bounds their memory, which every rank
has twice. Equal to `Program::kEager`.
"""


@dataclass(frozen=True)
class Thresholds:
    """L1 and L2 sizes of a core; the properties are the thresholds derived from them.

    `first_level` and `second_level` are the bytes of data caches that a core has for itself.
    """

    first_level: int = 32 << 10
    second_level: int = 1 << 20

    @property
    def eager_bytes(self) -> int:
        """The largest message sent eagerly: half of the first level, which then holds the data and
        its copy.
        """
        return _within(4 << 10, self.first_level // 2, EAGER_BUFFER_BYTES)

    @property
    def staged_bytes(self) -> int:
        """The most bytes for each peer staged at once if peers cannot read them; more go in
        pieces. It is the size of L2: more would be evicted before all is copied.
        """
        return _within(256 << 10, self.second_level, 4 << 20)

    @property
    def slot_bytes(self) -> int:
        """The bytes that a thread stages at a time: half of `staged_bytes`, so that a slot stays in
        the cache until it is read, while the next is written.
        """
        return self.staged_bytes // 2

    @property
    def pushed_bytes(self) -> int:
        """The fewest bytes of a rank that are put to peers that could also read them: a quarter of
        L2. Fewer stay in the cache together with the rows of other ranks; more would be read from
        memory twice.
        """
        return self.staged_bytes // 4


def agreed(thresholds: Iterable[Thresholds]) -> Thresholds:
    """The common thresholds of ranks: those of the smallest caches."""
    return Thresholds(*map(min, zip(*map(astuple, thresholds), strict=True)))


def _within(least: int, size: int, most: int) -> int:
    return max(least, min(size, most))
