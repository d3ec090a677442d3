"""The order in which a rank visits its peers, and the ranks of each host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

Hosts = Sequence[int]
"""The host of each rank, numbered from 0. Ranks of a host share memory; ranks of other hosts can
only be sent rows.
"""


def after(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in rotated order, r+1 first, so that no rank is everyone's first
    target.
    """
    return [(rank + step) % ranks for step in range(1, ranks)]


def before(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in the order in which they reach it if each visits its peers in rotated
    order: r-1 first.
    """
    return [(rank - step) % ranks for step in range(1, ranks)]


def in_order(order: str, peers: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """``(peer, piece)`` of all pieces of these peers.

    `order` is ``peer``, peer after peer, or ``interleaved``: the first piece of every peer, then
    the second …
    """
    if order == "interleaved":
        return [(peer, piece) for piece in range(pieces) for peer in peers]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


def one_rank_per_host(hosts: Hosts | None) -> bool:
    """Whether every rank has a host of its own."""
    return hosts is not None and len(set(hosts)) == len(hosts)


def members(host: int, hosts: Hosts) -> list[int]:
    """The ranks of a host."""
    return [rank for rank, its in enumerate(hosts) if its == host]


def other_hosts(rank: int, hosts: Hosts) -> list[int]:
    """The other hosts, in the order of their first ranks after `rank`."""
    return [
        *dict.fromkeys(
            hosts[peer] for peer in after(rank, len(hosts)) if hosts[peer] != hosts[rank]
        )
    ]


def local_peers(rank: int, hosts: Hosts) -> list[int]:
    """The other ranks of a rank's host, in rotated order."""
    return [peer for peer in after(rank, len(hosts)) if hosts[peer] == hosts[rank]]


@cache
def rail_peer(rank: int, host: int, hosts: Hosts) -> int:
    """The rank of `host` that exchanges rows with `rank` on behalf of its host; on the rank's own
    host the rank itself. Ranks of other hosts are divided evenly among the ranks of `host`.
    """
    return members(host, hosts)[members(hosts[rank], hosts).index(rank) % hosts.count(host)]
