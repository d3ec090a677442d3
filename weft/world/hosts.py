"""The hosts of a world's ranks."""

from __future__ import annotations

from collections.abc import Iterable


class Hosts(tuple[int, ...]):
    """The host of each rank, numbered from 0, as a rank sees them.

    Attributes: `number` (of hosts), `several` (whether there are more than one), `if_several` (the
    host of each rank for planners, None if there is one), `rank` (the rank that sees them).
    """

    rank: int
    number: int
    several: bool
    if_several: tuple[int, ...] | None

    def __new__(cls, hosts: Iterable[int], rank: int) -> Hosts:
        made = super().__new__(cls, hosts)
        made.rank = rank
        made.number = len({*made})
        made.several = made.number > 1
        made.if_several = tuple(made) if made.several else None
        return made

    def here(self, rank: int) -> bool:
        """Whether a rank is on the host of the one that sees them, and so shares memory with it."""
        return self[rank] == self[self.rank]
