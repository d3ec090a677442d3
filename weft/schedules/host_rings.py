"""Sums that go round: each host adds what its ranks have to what comes from the host before, so that only neighbours talk.

A sum begins at host 0 and is complete at the last host, so its terms are those of a push (`host_sums`), in the same order: the same
bits where running sums are not rounded. From there it goes on, over host 0 again, to the rank that keeps it, or to all. That is up
to twice what a push sends. On one host every rank can be taken for a host of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from weft.plan import Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.common import Hosts, block, enter, leave, neighbours, rail_peer
from weft.schedules.host_sums import HostSums, Lanes, Make, Piece, part_of


class HostRing(NamedTuple):
    """One rank's part: whose rows are summed how (`HostSums`), and whether sums go to all ranks, not only to their owners."""

    sums: HostSums
    everywhere: bool = False

    @property
    def rank(self) -> int:
        return self.sums.rank

    @property
    def hosts(self) -> Hosts:
        return self.sums.hosts

    @property
    def here(self) -> int:
        """This rank's host."""
        return self.hosts[self.rank]

    @property
    def last(self) -> int:
        """The host where sums are complete."""
        return max(self.hosts)

    def reducer(self, owner: int, host: int) -> int:
        """The rank of `host` that deals with what `owner` keeps: the owner itself on its own host."""
        return owner if self.hosts[owner] == host else rail_peer(owner, host, self.hosts)

    def pieces(self) -> list[Piece]:
        """All pieces in the order of the rows, in which every rank makes them and hands them on."""
        return [piece for owner in range(self.sums.ranks) for piece in self.sums.pieces(owner)]

    def own(self) -> list[Piece]:
        """The pieces that this rank deals with on behalf of its host, in the order of the rows."""
        return [piece for piece in self.pieces() if self.reducer(piece.owner, self.here) == self.rank]

    def onward(self, owner: int) -> int | None:
        """Who gets the complete sum of an owner's rows from this rank, if anyone does."""
        end = self.last - 1 if self.everywhere else self.hosts[owner]
        following = 0 if self.here == self.last else self.here + 1
        return self.reducer(owner, following) if following <= end < self.last else None

    def made(self, make: Make) -> list[Instruction]:
        """Make all pieces, and tell who deals with them; or all rows at once."""
        lane: list[Instruction] = [*enter(self.rank, self.sums.ranks)]
        notified = [self.reducer(piece.owner, self.here) for piece in self.pieces()]
        if self.sums.at_once:
            lane.append(make(self.rank, 0, self.sums.ranks * self.sums.cut))
            return [*lane, *(Notify(peer, Signal("made", self.rank)) for peer in dict.fromkeys(notified))]
        for piece, peer in zip(self.pieces(), notified, strict=True):
            lane += [make(self.rank, piece.at, piece.at + 1), Notify(peer, Signal("made", self.rank))]
        return lane

    def add(self, producers: Sequence[int]) -> list[Instruction]:
        """Add what this host has to what comes, once `producers` have told that theirs is there, and hand it on."""
        lane: list[Instruction] = []
        came = Counter[int]()
        for count, piece in enumerate(self.own(), 1):
            rows = block(self.rank, self.sums.source, piece.at)
            running, parts = rows._replace(buffer="running"), [rows._replace(rank=peer) for peer in self.sums.here]
            lane += [Wait(Signal("made", peer), 1 if self.sums.at_once else count) for peer in producers]
            if len(parts) > 1 and self.hosts[piece.owner] != self.here:
                hosted = rows._replace(buffer="hosted")
                lane.append(Reduce(tuple(parts), hosted, part_of(self.sums.op)))
                parts = [hosted]
            if self.here:
                before = self.reducer(piece.owner, self.here - 1)
                came[before] += 1
                lane.append(Wait(Signal("running", before), came[before]))
                parts.insert(0, running)
            if self.here < self.last:
                following = self.reducer(piece.owner, self.here + 1)
                lane += [Reduce(tuple(parts), running, part_of(self.sums.op)), Copy(running, running._replace(rank=following))]
                lane.append(Notify(following, Signal("running", self.rank)))
            else:
                lane += self._complete(piece, tuple(parts))
        return lane

    def _complete(self, piece: Piece, parts: tuple[Region, ...]) -> list[Instruction]:
        """Make a complete sum, where it is to be or to go on from."""
        if not self.everywhere and piece.owner == self.rank:
            return [Reduce(parts, block(self.rank, "out", piece.number), self.sums.op)]
        summed = block(self.rank, "summed", piece.at)
        return [Reduce(parts, summed, self.sums.op), *self._hand_on(piece, summed)]

    def _hand_on(self, piece: Piece, summed: Region) -> list[Instruction]:
        """Put a complete sum to who gets it next; those of this host read it here, if they are to have it."""
        lane: list[Instruction] = []
        if (to := self.onward(piece.owner)) is not None:
            lane += [Copy(summed, summed._replace(rank=to)), Notify(to, Signal("summed", self.rank))]
        last = piece.number == self.sums.cut - 1  # others take an owner's rows once all are there
        near = neighbours(self.rank, self.hosts) if self.everywhere and last else []
        return lane + [Notify(peer, Signal("shared", self.rank)) for peer in near]

    def spread(self) -> list[Instruction]:
        """Hand complete sums on as they come, and take those that are to be had."""
        lane: list[Instruction] = []
        came = Counter[int]()
        for piece in self.own() if self.here < self.last else ():
            before = self.reducer(piece.owner, self.here - 1 if self.here else self.last)
            if not self.everywhere and not self.here <= self.hosts[piece.owner] < self.last:
                continue
            came[before] += 1
            lane.append(Wait(Signal("summed", before), came[before]))
            lane += self._hand_on(piece, block(self.rank, "summed", piece.at))
        return lane + (self._take_all() if self.everywhere else self._take_own())

    def _take_own(self) -> list[Instruction]:
        cut, start = self.sums.cut, self.rank * self.sums.cut
        kept = Copy(Region(self.rank, "summed", start, start + cut), Region(self.rank, "out", 0, cut))
        return [*([kept] if self.here < self.last else []), *leave(self.rank, self.sums.ranks)]

    def _take_all(self) -> list[Instruction]:
        lane: list[Instruction] = []
        came = Counter[int]()
        for owner in range(self.sums.ranks):
            cut, holder = self.sums.cut, self.reducer(owner, self.here)
            if holder != self.rank:
                came[holder] += 1
                lane.append(Wait(Signal("shared", holder), came[holder]))
            rows = Region(holder, "summed", owner * cut, (owner + 1) * cut)
            lane.append(Copy(rows, rows._replace(rank=self.rank, buffer="out")))
        return [*lane, *leave(self.rank, self.sums.ranks)]


def of_products(ring: HostRing, make: Make) -> Lanes:
    """Sums of rows that are made meanwhile."""
    comm = [*ring.add(ring.sums.here), *ring.spread()]
    return {"compute": ring.made(make)} | ({"comm": comm} if comm else {})


def of_rows(ring: HostRing, stage: Make) -> list[Instruction]:
    """Sums of rows that are there; they are staged where ranks of a host read each other's."""
    rank, near = ring.rank, neighbours(ring.rank, ring.hosts)
    first: list[Instruction] = [] if ring.here else [*enter(rank, ring.sums.ranks)]  # other hosts use workspaces after host 0
    if ring.sums.source == "partial":
        first = ring.made(stage)
    first = [instruction for instruction in first if instruction != Notify(rank, Signal("made", rank))]  # it is one lane
    return [*first, *ring.add(near), *ring.spread()]
