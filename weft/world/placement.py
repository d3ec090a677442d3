"""The ranks of a world and where they run, from their records; it never changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from weft.bootstrap import peer_memory
from weft.bootstrap.rendezvous import RankInfo
from weft.schedules.levels import (
    OVERSUBSCRIBED_SIGNAL_LATENCY,
    SIGNAL_LATENCY,
    Levels,
    nested,
    numbered,
)
from weft.schedules.thresholds import agreed
from weft.world.hosts import Hosts


class Placement:
    """The ranks of a world as `rank` sees them, from the records of all. It does not change.

    Attributes: `rank`, `ranks` (their number), `others` (all ranks but this one), `global_ranks`
    (the number of each rank in a larger job, for errors), `hosts` (the host of each rank),
    `locality_groups` (the group of each rank at every level), `pids`, `cores` (the processor cores
    that each rank may use), `threads` (the smallest number of compute threads of a rank),
    `oversubscribed` (whether ranks of a host share cores), `crowded` (whether those of this host
    do), `teams` (whether the cores of this host are enough for the threads of its ranks),
    `thresholds` (the sizes at which collectives change algorithms, equal on all ranks),
    `staging_reason` (why this rank cannot read ordinary tensors in its peers' memory, or ""),
    `huge_pages` (whether large tensors of all ranks are in huge pages).
    """

    def __init__(
        self, rank: int, infos: Sequence[RankInfo], global_ranks: Sequence[int] = ()
    ) -> None:
        self.rank: Final = rank
        self.ranks: Final = len(infos)
        self.others: Final = [peer for peer in range(self.ranks) if peer != rank]
        self.global_ranks: Final[Sequence[int]] = [*global_ranks] or range(self.ranks)
        self.hosts: Final = Hosts(numbered(info.host for info in infos), rank)
        self.locality_groups: Final = groups(infos)
        self.pids: Final = [info.pid for info in infos]
        self.cores: Final = [info.cores for info in infos]
        self.threads: Final = min(info.threads for info in infos)
        self.oversubscribed: Final = oversubscribed(infos)
        here = [info for info in infos if info.host == infos[rank].host]
        self.crowded: Final = _share_cores(here)
        self.teams: Final = sum(info.threads for info in here) <= _all_cores(here)
        self.thresholds: Final = agreed(info.thresholds for info in infos)
        self.staging_reason: Final = (
            peer_memory.rejection(self.pids, [info.probe for info in infos])
            if self.has_peers_here
            else ""
        )
        self.huge_pages: Final = all(info.probe.huge_pages for info in infos)

    @cached_property
    def levels(self) -> Levels:
        """The levels by which ranks synchronize, equal on all since computed from all records."""
        return nested(
            self.ranks,
            self.locality_groups,
            OVERSUBSCRIBED_SIGNAL_LATENCY if self.oversubscribed else SIGNAL_LATENCY,
        )

    @property
    def has_peers_here(self) -> bool:
        """Whether there are peers and all of them are on this host."""
        return self.ranks > 1 and not self.hosts.several

    def name_of(self, peer: int) -> str:
        """The name of a peer in errors."""
        number = self.global_ranks[peer]
        elsewhere = f", rank {number} of the job," if number != peer else ""
        return f"rank {peer} (pid {self.pids[peer]}){elsewhere}"


def oversubscribed(infos: Sequence[RankInfo]) -> bool:
    """Whether ranks of a host share cores."""
    by_host = [
        [info for info in infos if info.host == host] for host in {info.host for info in infos}
    ]
    return any(map(_share_cores, by_host))


def _share_cores(infos: Sequence[RankInfo]) -> bool:
    """Whether there are more of these ranks, all on one host, than cores."""
    return len(infos) > _all_cores(infos)


def _all_cores(infos: Sequence[RankInfo]) -> int:
    """The number of distinct cores of several ranks of a host."""
    return len(frozenset[int]().union(*(info.cores for info in infos)))


def groups(infos: Sequence[RankInfo]) -> Levels:
    """The group of each rank at every level, innermost first: cache, NUMA node, package, host.

    Its depth is that of the shortest locality of a rank: ranks that are not bound to cores are
    grouped by host alone.
    """
    depth = min(len(info.locality) for info in infos)
    return tuple(
        numbered((info.host, info.locality[:kept]) for info in infos)
        for kept in range(depth, -1, -1)
    )
