"""Sums in a ring of hosts: each host adds its ranks' rows to the running sum of the previous one,
so that only adjacent hosts communicate.

A sum begins at host 0 and is complete at the last host, so its terms are the terms of a push
(`host_sums`), in the same order: the same bits if running sums are not rounded. From there it is
sent on, over host 0 again, to its owner, or to all. That is up to twice the bytes of a push. On one
host every rank can be treated as its own host.

A reduce-scatter over three hosts of one rank, with block b of rank b, time to the right; ``?``
waits for the previous rank, and ``→`` puts to the next one and notifies it::

    rank 0  | 0 → | 1 → | 2 → |                         |?| 1 → | keep 0 |
    rank 1        |?| add 0 → |?| add 1 → |?| add 2 →         |?| keep 1 |
    rank 2                    |?| add 0 → |?| add 1 → |?| add and keep 2 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from weft.plan import Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.blocks import block, shard
from weft.schedules.host_sums import HostPart, Make, Piece, part_of
from weft.schedules.lanes import Lanes, concurrent, enter, leave, notify_all, wait_all
from weft.schedules.peers import rail_peer


class HostRing(HostPart):
    """One rank's part in sums that are sent from host to host."""

    def of_rows(self, stage: Make) -> list[Instruction]:
        """Sums of existing rows; they are staged if ranks of a host read each other's."""
        # other hosts use workspaces only after host 0
        first = [] if self.host else enter(self.rank, self.hosts)
        if self.source == "partial":
            first = self.make_all(stage)
        redundant = Notify(self.rank, Signal("made", self.rank))  # within one lane
        return [*(i for i in first if i != redundant), *self.add(self.local_peers), *self.spread()]

    def of_products(self, make: Make) -> Lanes:
        """Sums of rows that are made meanwhile."""
        return concurrent(self.make_all(make), [self.add(self.here) + self.spread()])

    @cached_property
    def last(self) -> int:
        """The host at which sums are complete."""
        return len(self.hosts.members) - 1

    @cached_property
    def own(self) -> list[Piece]:
        """The pieces that this rank adds up for its host, in the order of the rows."""
        adjacent = ((self.host + step) % (self.last + 1) for step in (1, -1))
        if self.hosts.target not in (None, self.host, *adjacent):
            return []  # only adjacent hosts exchange sums
        return [piece for owner in self.hosts.holds(self.rank) for piece in self.pieces(owner)]

    def onward(self, owner: int) -> int | None:
        """The rank to which this one sends the complete sum of an owner's rows, if there is one."""
        end = self.last - 1 if self.everywhere else self.hosts[owner]
        following = 0 if self.host == self.last else self.host + 1
        return rail_peer(owner, following, self.hosts) if following <= end < self.last else None

    def make_all(self, make: Make) -> list[Instruction]:
        """Make all pieces, and notify their reducers; or all rows at once."""
        lane = enter(self.rank, self.hosts)
        rank = self.rank
        if self.at_once:
            lane.append(make(rank, 0, self.ranks * self.cut))
            return lane + notify_all(rank, "made", self.here)
        for owner in self.hosts.seen:
            for piece in self.pieces(owner):
                lane += [
                    make(rank, piece.at, piece.at + 1),
                    Notify(self.reducer(owner), Signal("made", rank)),
                ]
        return lane

    def add(self, producers: Sequence[int]) -> list[Instruction]:
        """Add this host's rows to the running sums, after `producers` have made theirs, and send
        the sums on.
        """
        lane: list[Instruction] = []
        arrived = Counter[int]()
        for count, piece in enumerate(self.own, 1):
            rows = block(self.rank, self.source, piece.at)
            running = rows._replace(buffer="running")
            parts = tuple(rows._replace(rank=peer) for peer in self.here)
            lane += wait_all("made", producers, 1 if self.at_once else count)
            if len(parts) > 1 and self.hosts[piece.owner] != self.host:
                hosted = rows._replace(buffer="hosted")
                lane.append(Reduce(parts, hosted, part_of(self.op)))
                parts = (hosted,)
            if self.host:
                before = rail_peer(piece.owner, self.host - 1, self.hosts)
                arrived[before] += 1
                lane.append(Wait(Signal("running", before), arrived[before]))
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
                lane += [Reduce(parts, summed, self.op), *self.send_on(piece, summed)]
        return lane

    def send_on(self, piece: Piece, summed: Region) -> list[Instruction]:
        """Put a complete sum to the next rank; ranks of this host read it here if it is for all."""
        lane: list[Instruction] = []
        if (to := self.onward(piece.owner)) is not None:
            lane += [
                Copy(summed, summed._replace(rank=to)),
                Notify(to, Signal("summed", self.rank)),
            ]
        last = piece.number == self.cut - 1  # peers copy an owner's rows after the last
        local = self.local_peers if self.everywhere and last else []
        return lane + notify_all(self.rank, "shared", local)

    def spread(self) -> list[Instruction]:
        """Send complete sums on as they arrive, and copy this rank's to ``out``."""
        lane: list[Instruction] = []
        arrived = Counter[int]()
        for piece in self.own if self.host < self.last else ():
            if self.everywhere or self.host <= self.hosts[piece.owner] < self.last:
                before = rail_peer(
                    piece.owner, self.host - 1 if self.host else self.last, self.hosts
                )
                arrived[before] += 1
                lane.append(Wait(Signal("summed", before), arrived[before]))
                lane += self.send_on(piece, block(self.rank, "summed", piece.at))
        if self.everywhere:
            lane += self.take_all()
        elif self.host < self.last:
            summed = shard(self.rank, "summed", self.rank, self.cut)
            lane.append(Copy(summed, Region(self.rank, "out", 0, self.cut)))
        return lane + leave(self.rank, self.hosts)

    def take_all(self) -> list[Instruction]:
        """Copy all sums to ``out`` as their ranks on this host notify this one."""
        lane: list[Instruction] = []
        arrived = Counter[int]()
        for owner in self.hosts.seen:
            holder = self.reducer(owner)
            if holder != self.rank:
                arrived[holder] += 1
                lane.append(Wait(Signal("shared", holder), arrived[holder]))
            lane.append(self.take(owner))
        return lane
