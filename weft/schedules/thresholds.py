"""From which sizes on collectives go another way: what follows from the caches of a core, and from
how fast it signals.

Ranks must decide alike, so each tells its own when a world is made, and all take what is `agreed`.
Sizes that are no matter of caches, but of what a message or a signal costs beside the bytes
(`SENT_BYTES`, `SHARED_BYTES`, …), are said where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

EAGER_ROOM = 64 << 10
"""Bytes of an eager buffer: so many at most are handed out at once, as the native core has it
(`Program::kEager`).
"""

CROWDED_HOP = 50.0
"""The hop where ranks share cores: each level of a meeting then costs every rank a turn on its
core, and a notify wakes who sleeps. Both are the scheduler's work, and how long they take is a
matter of what else runs, so nothing is measured.
"""


@dataclass(frozen=True)
class Thresholds:
    """L1 and L2 sizes and signal latency of a core; the properties are the thresholds derived from
    them.

    `first_level` and `second_level` are the bytes of data caches that a core has for itself. `hop`
    is the signal latency in notifies: the number that a core could make, to different peers, until
    one of them is seen.
    """

    first_level: int = 32 << 10
    second_level: int = 1 << 20
    hop: float = 3.0

    @property
    def eager_bytes(self) -> int:
        """The largest message sent eagerly: half of the first level, which then holds the data and
        its copy.
        """
        return _within(4 << 10, self.first_level // 2, EAGER_ROOM)

    @property
    def staged_bytes(self) -> int:
        """Up to so many for each peer are staged at once if peers cannot read them, and in pieces
        above: as the second level holds, from which more would be gone before all have been copied.
        """
        return _within(256 << 10, self.second_level, 4 << 20)

    @property
    def slot_bytes(self) -> int:
        """So many a thread then stages at a time: half of that, so that they stay in the cache
        until they are read, while the next are laid down.
        """
        return self.staged_bytes // 2

    @property
    def pushed_bytes(self) -> int:
        """From so many of a rank's rows on they are put to peers that could read them: a quarter of
        the second level, above which not reading them from memory twice wins over finding them,
        beside those of others, in the cache.
        """
        return self.staged_bytes // 4


def agreed(told: Iterable[Thresholds]) -> Thresholds:
    """What follows for ranks that have told these: what fits the caches of all, and the longest
    hop.
    """
    first, second, hop = zip(*map(astuple, told), strict=True)
    return Thresholds(min(first), min(second), max(hop))


def _within(least: int, size: int, most: int) -> int:
    return max(least, min(size, most))
