"""The order in which a rank addresses its peers, and the ranks of each host."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cache, cached_property

Hosts = Sequence[int]
"""The host of each rank, numbered from 0. Ranks of a host share memory; ranks of other hosts can
only be sent rows.
"""


class Layout(tuple[int, ...]):
    """`Hosts` with the ranks of each.

    In a layout `toward` a host a rank addresses only the peers on that host. With it a planner
    makes the part of a rank's lanes for that host, at a cost that does not grow with the number of
    ranks.
    """

    target: int | None = None
    """The one host whose ranks are addressed; None if all are."""

    @cached_property
    def members(self) -> Sequence[Sequence[int]]:
        """The ranks of each host."""
        found: list[list[int]] = [[] for _ in range(max(self) + 1)]
        for rank, host in enumerate(self):
            found[host].append(rank)
        return found

    @cached_property
    def places(self) -> Sequence[int]:
        """The place of each rank among the ranks of its host."""
        found = {rank: place for here in self.members for place, rank in enumerate(here)}
        return [found[rank] for rank in range(len(self))]

    @cached_property
    def seen(self) -> Sequence[int]:
        """The ranks that are addressed, in order."""
        return range(len(self)) if self.target is None else self.members[self.target]

    @cached_property
    def _views(self) -> dict[int | None, Layout]:
        return {self.target: self}

    def toward(self, host: int | None) -> Layout:
        """The same layout, in which only ranks of `host` are addressed; all if it is None."""
        if host not in self._views:
            view = self._views[host] = Layout(self)
            view.target = host
            view.members = self.members
            view.places = self.places
            view._views = self._views
        return self._views[host]

    def after(self, rank: int) -> list[int]:
        """The addressed peers of a rank in rotated order; in place of several that are left out
        between them, one of these: what a rank does for it separates messages.
        """
        at = bisect(self.seen, rank)
        found = list[int]()
        last = rank
        peers = [peer for peer in (*self.seen[at:], *self.seen[:at]) if peer != rank]
        for peer in (*peers, rank):
            if (peer - last) % len(self) > 1:
                found.append((last + 1) % len(self))
            found.append(peer)
            last = peer
        return found[:-1]

    def sees(self, rank: int) -> bool:
        """Whether a rank is one of those that are addressed."""
        return self.target in (None, self[rank])

    def holds(self, rank: int) -> list[int]:
        """The ranks whose rows this rank sends or receives on behalf of its host, its own
        included, in order: those whose `rail_peer` it is.
        """
        place = self.places[rank]
        size = len(self.members[self[rank]])
        others = (of[place::size] for host, of in enumerate(self.members) if host != self[rank])
        return sorted([rank, *(owner for owners in others for owner in owners)])


@cache
def _layout(hosts: tuple[int, ...]) -> Layout:
    return Layout(hosts)


def layout(hosts: Hosts) -> Layout:
    """The layout of these hosts."""
    return hosts if isinstance(hosts, Layout) else _layout(tuple(hosts))


def after(rank: int, ranks: int | Layout) -> list[int]:
    """The peers of `rank` in rotated order, r+1 first, so that no rank is everyone's first target.
    `ranks` is the number of all ranks, or their layout.
    """
    if isinstance(ranks, Layout):
        return ranks.after(rank)
    return [(rank + step) % ranks for step in range(1, ranks)]


def before(rank: int, ranks: int | Layout) -> list[int]:
    """The peers of `rank` in the order in which they reach it if each addresses its peers in
    rotated order: r-1 first.
    """
    return after(rank, ranks)[::-1]


def in_order(order: str, peers: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """``(peer, piece)`` of all pieces of these peers.

    `order` is ``peer``, peer after peer, or ``interleaved``: the first piece of every peer, then
    the second …
    """
    if order == "interleaved":
        return [(peer, piece) for piece in range(pieces) for peer in peers]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


def one_rank_per_host(hosts: Hosts | None) -> bool:
    """Whether every rank has its own host."""
    return hosts is not None and len(set(hosts)) == len(hosts)


def members(host: int, hosts: Hosts) -> Sequence[int]:
    """The ranks of a host."""
    return layout(hosts).members[host]


def other_hosts(rank: int, hosts: Hosts) -> list[int]:
    """The other hosts that are addressed, in the order of their first ranks after `rank`."""
    peers = after(rank, layout(hosts))
    return [*dict.fromkeys(hosts[peer] for peer in peers if hosts[peer] != hosts[rank])]


def local_peers(rank: int, hosts: Hosts) -> list[int]:
    """The other ranks of a rank's host, in rotated order; one of them if others are addressed."""
    here = members(hosts[rank], hosts)
    place = layout(hosts).places[rank]
    found = [*here[place + 1 :], *here[:place]]
    return found if layout(hosts).sees(rank) else found[:1]


def rail_peer(rank: int, host: int, hosts: Hosts) -> int:
    """The rank of `host` that exchanges rows with `rank` on behalf of its host; on the rank's own
    host the rank itself. Ranks of other hosts are divided evenly among the ranks of `host`.
    """
    there = members(host, hosts)
    return there[layout(hosts).places[rank] % len(there)]


def examples(hosts: Hosts, *more: int) -> tuple[int, ...]:
    """Ranks which together do all kinds of work over these hosts: the first and the last rank of
    the first hosts, of the last one, and of a host of each size; and `more` ranks that differ.
    """
    of = layout(hosts).members
    chosen = [*of[:3], of[-1], *{len(here): here for here in of}.values()]
    return tuple(sorted({*more, *(rank for here in chosen for rank in (here[0], here[-1]))}))
