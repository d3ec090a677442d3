"""Sums that go round: each host adds what its ranks have to what comes from the host before, so
that only neighbours talk.

A sum begins at host 0 and is complete at the last host, so its terms are those of a push
(`host_sums`), in the same order: the same bits where running sums are not rounded. From there it
goes on, over host 0 again, to the rank that keeps it, or to all. That is up to twice what a push
sends. On one host every rank can be taken for a host of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from weft.plan import Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.common import Lanes, beside, block, enter, hear, leave, rail_peer, shard, tell
from weft.schedules.host_sums import HostPart, Make, Piece, part_of


class HostRing(HostPart):
    """One rank's part where sums go from host to host."""

    def of_rows(self, stage: Make) -> list[Instruction]:
        """Sums of rows that are there; they are staged where ranks of a host read each other's."""
        first = (
            [] if self.host else enter(self.rank, self.ranks)
        )  # other hosts use workspaces after host 0
        if self.source == "partial":
            first = self.make_all(stage)
        told = Notify(self.rank, Signal("made", self.rank))  # what it need not be told in one lane
        return [*(i for i in first if i != told), *self.add(self.near), *self.spread()]

    def of_products(self, make: Make) -> Lanes:
        """Sums of rows that are made meanwhile."""
        return beside(self.make_all(make), [self.add(self.here) + self.spread()])

    @cached_property
    def last(self) -> int:
        """The host where sums are complete."""
        return max(self.hosts)

    def all_pieces(self) -> list[Piece]:
        """All pieces in the order of the rows, in which every rank makes them and hands them on."""
        return [piece for owner in range(self.ranks) for piece in self.pieces(owner)]

    def own(self) -> list[Piece]:
        """The pieces that this rank deals with on behalf of its host, in the order of the rows."""
        return [piece for piece in self.all_pieces() if self.reducer(piece.owner) == self.rank]

    def onward(self, owner: int) -> int | None:
        """Who gets the complete sum of an owner's rows from this rank, if anyone does."""
        end = self.last - 1 if self.everywhere else self.hosts[owner]
        following = 0 if self.host == self.last else self.host + 1
        return rail_peer(owner, following, self.hosts) if following <= end < self.last else None

    def make_all(self, make: Make) -> list[Instruction]:
        """Make all pieces, and tell who deals with them; or all rows at once."""
        lane, rank = enter(self.rank, self.ranks), self.rank
        if self.at_once:
            lane.append(make(rank, 0, self.ranks * self.cut))
            return lane + tell(rank, "made", dict.fromkeys(map(self.reducer, range(self.ranks))))
        for piece in self.all_pieces():
            lane += [
                make(rank, piece.at, piece.at + 1),
                Notify(self.reducer(piece.owner), Signal("made", rank)),
            ]
        return lane

    def add(self, producers: Sequence[int]) -> list[Instruction]:
        """Add what this host has to what comes, once `producers` have told that theirs is there,
        and hand it on.
        """
        lane: list[Instruction] = []
        came = Counter[int]()
        for count, piece in enumerate(self.own(), 1):
            rows = block(self.rank, self.source, piece.at)
            running, parts = (
                rows._replace(buffer="running"),
                tuple(rows._replace(rank=peer) for peer in self.here),
            )
            lane += hear("made", producers, 1 if self.at_once else count)
            if len(parts) > 1 and self.hosts[piece.owner] != self.host:
                hosted = rows._replace(buffer="hosted")
                lane.append(Reduce(parts, hosted, part_of(self.op)))
                parts = (hosted,)
            if self.host:
                before = rail_peer(piece.owner, self.host - 1, self.hosts)
                came[before] += 1
                lane.append(Wait(Signal("running", before), came[before]))
                parts = (running, *parts)
            if self.host < self.last:
                following = rail_peer(piece.owner, self.host + 1, self.hosts)
                lane += [
                    Reduce(parts, running, part_of(self.op)),
                    Copy(running, running._replace(rank=following)),
                ]
                lane.append(Notify(following, Signal("running", self.rank)))
            elif piece.owner == self.rank and not self.everywhere:
                lane.append(Reduce(parts, block(self.rank, "out", piece.number), self.op))
            else:
                summed = block(self.rank, "summed", piece.at)
                lane += [Reduce(parts, summed, self.op), *self.hand_on(piece, summed)]
        return lane

    def hand_on(self, piece: Piece, summed: Region) -> list[Instruction]:
        """Put a complete sum to who gets it next; those of this host read it here, if they are to
        have it.
        """
        lane: list[Instruction] = []
        if (to := self.onward(piece.owner)) is not None:
            lane += [
                Copy(summed, summed._replace(rank=to)),
                Notify(to, Signal("summed", self.rank)),
            ]
        last = piece.number == self.cut - 1  # others take an owner's rows once all are there
        return lane + tell(self.rank, "shared", self.near if self.everywhere and last else [])

    def spread(self) -> list[Instruction]:
        """Hand complete sums on as they come, and take those that are to be had."""
        lane: list[Instruction] = []
        came = Counter[int]()
        for piece in self.own() if self.host < self.last else ():
            if self.everywhere or self.host <= self.hosts[piece.owner] < self.last:
                before = rail_peer(
                    piece.owner, self.host - 1 if self.host else self.last, self.hosts
                )
                came[before] += 1
                lane.append(Wait(Signal("summed", before), came[before]))
                lane += self.hand_on(piece, block(self.rank, "summed", piece.at))
        if self.everywhere:
            lane += self.take_all()
        elif self.host < self.last:
            summed = shard(self.rank, "summed", self.rank, self.cut)
            lane.append(Copy(summed, Region(self.rank, "out", 0, self.cut)))
        return lane + leave(self.rank, self.ranks)

    def take_all(self) -> list[Instruction]:
        """Copy all sums to ``out`` as those who have them on this host tell of them."""
        lane: list[Instruction] = []
        came = Counter[int]()
        for owner in range(self.ranks):
            holder = self.reducer(owner)
            if holder != self.rank:
                came[holder] += 1
                lane.append(Wait(Signal("shared", holder), came[holder]))
            lane.append(self.take(owner))
        return lane
