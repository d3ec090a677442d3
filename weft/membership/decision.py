"""Decisions on the ranks of the next world, and the membership of a rank in one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.bootstrap.endpoint import Endpoint, Handle


class Decision(NamedTuple):
    """The ranks of the next world, `name`: the handle of each, its rank before, -1 for a joiner,
    and its global rank. `made_ranks` is the number of ranks of the last world that was made, `made`
    the number of each rank there, -1 for a joiner; `doubtful` is whether a rank of it that may be
    alive was left out. `joiners` is the number of processes that were to join.
    """

    name: str
    handles: tuple[Handle, ...]
    previous: tuple[int, ...]
    global_ranks: tuple[int, ...]
    made: tuple[int, ...]
    made_ranks: int
    doubtful: bool
    joiners: int

    def rank_of(self, handle: Handle) -> int | None:
        """The rank in the next world of the process with this handle, None if it is left out."""
        secrets = [each.info.address.secret for each in self.handles]
        own = handle.info.address.secret
        return secrets.index(own) if own in secrets else None


@dataclass
class Membership:
    """A rank's place in the world `name`, or in one that was decided and not yet made: the handles
    of all ranks and this one's `endpoint`. `in_doubt`, of a world that is made: whether a rank was
    left out that may be alive and know this endpoint. The other fields are those of `Decision`.
    """

    name: str
    rank: int
    handles: Sequence[Handle]
    global_ranks: Sequence[int]
    endpoint: Endpoint
    made: Sequence[int]
    made_ranks: int
    doubtful: bool = False
    in_doubt: bool = False

    @classmethod
    def of_made(
        cls,
        name: str,
        rank: int,
        handles: Sequence[Handle],
        endpoint: Endpoint,
        global_ranks: Sequence[int] = (),
    ) -> Membership:
        """The place of a rank in a world that is made, by default no part of a larger job."""
        ranks = range(len(handles))
        return cls(name, rank, handles, global_ranks or ranks, endpoint, ranks, len(ranks))

    @classmethod
    def decided(cls, decision: Decision, endpoint: Endpoint) -> Membership | None:
        """The place of the rank with this endpoint; None if it is left out."""
        rank = decision.rank_of(endpoint.handle)
        if rank is None:
            return None
        name, handles, _, numbers, made, made_ranks, doubtful, _ = decision
        return cls(name, rank, handles, numbers, endpoint, made, made_ranks, doubtful)

    @functools.cached_property
    def endpoints(self) -> bytes:
        """The endpoints of all ranks, which identify the world. A rank has one endpoint in all
        decisions that include it, and adopts one of them.
        """
        secrets = [each.info.address.secret for each in self.handles]
        return hashlib.sha256(b"".join(secrets)).digest()[:16]

    @property
    def several_hosts(self) -> bool:
        return len({each.info.host for each in self.handles}) > 1

    def may_continue(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks may continue although others may be alive."""
        made = [self.made[rank] for rank in ranks if self.made[rank] >= 0]
        return _most(made, self.made_ranks) and _most(ranks, len(self.handles))

    def next(
        self,
        name: str,
        ranks: dict[int, Handle],
        joining: Sequence[Handle],
        joiners: int,
        doubt: bool,
    ) -> Decision:
        """The decision that `ranks`, with these new handles, continue with those `joining`, which
        take the lowest free global ranks. Ranks are ordered by global rank.
        """
        taken = {self.global_ranks[rank] for rank in ranks}
        free = (number for number in range(len(taken) + len(joining)) if number not in taken)
        places = [(self.global_ranks[rank], rank, each) for rank, each in ranks.items()]
        places += [(number, -1, each) for number, each in zip(free, joining, strict=False)]
        places.sort(key=lambda place: place[0])
        return Decision(
            name,
            tuple(handle for _, _, handle in places),
            tuple(rank for _, rank, _ in places),
            tuple(number for number, _, _ in places),
            tuple(self.made[rank] if rank >= 0 else -1 for _, rank, _ in places),
            self.made_ranks,
            self.doubtful or doubt,
            joiners,
        )


def _most(some: Sequence[int], ranks: int) -> bool:
    """Whether some are more than half of so many ranks, or half of them with rank 0."""
    return 2 * len(some) > ranks or (2 * len(some) == ranks and 0 in some)
