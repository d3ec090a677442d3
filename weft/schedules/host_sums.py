"""Sums over ranks on several hosts: each host adds up its own ranks' rows, so that a row crosses to
another host once.

For a block that a rank of another host keeps, one rank of each host, the *reducer*, adds up what
its host has, and puts the sum to the owner. The owner adds its own host's rows and the other hosts'
sums in the order of hosts, and of ranks within its host: the same bits on every run. So a sum of
another host is a term like a row of the own one, and is rounded as these are. With one rank on each
host that is the order of ranks, and nothing is added up before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.common import (
    Hosts,
    Lanes,
    after,
    apart,
    beside,
    block,
    enter,
    everything,
    hear,
    leave,
    members,
    neighbours,
    others,
    rail_peer,
    shard,
    shards,
    tell,
)

Make = Callable[[int, int, int], Instruction]
"""From (rank, start, stop) to what puts a rank's own rows there into the buffer that is added up.
"""

PARTS = 4  # least products per block: fewer delay the first transfer, more make each product slower


class Piece(NamedTuple):
    """Block `at` of all, the `number`-th piece of what `owner` keeps."""

    owner: int
    number: int
    at: int


@dataclass(frozen=True)
class HostPart:
    """One rank's part in sums of what ranks on these hosts have; each keeps `cut` pieces.

    `op` is ``sum`` or another reduction. Sums go to all ranks if `everywhere`, else to those that
    keep them. Rows are made piece by piece, or all `at_once`, and added up from the buffer
    `source`.
    """

    rank: int
    cut: int
    hosts: Hosts
    op: str
    everywhere: bool
    at_once: bool = False
    source: str = "partial"

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> int:
        """This rank's host."""
        return self.hosts[self.rank]

    @cached_property
    def here(self) -> list[int]:
        """The ranks of this host."""
        return members(self.host, self.hosts)

    @cached_property
    def near(self) -> list[int]:
        """The others of them."""
        return neighbours(self.rank, self.hosts)

    def pieces(self, owner: int) -> list[Piece]:
        """What a rank keeps, in pieces."""
        return [Piece(owner, number, owner * self.cut + number) for number in range(self.cut)]

    def reducer(self, owner: int) -> int:
        """Who of this host deals with what a rank keeps: the owner itself on its own host."""
        return rail_peer(owner, self.host, self.hosts)

    def take(self, owner: int) -> Copy:
        """Copy the sums that a rank keeps to ``out``, from where this host has them."""
        summed = shard(self.reducer(owner), "summed", owner, self.cut)
        return Copy(summed, summed._replace(rank=self.rank, buffer="out"))


class HostSums(HostPart):
    """One rank's part where reducers put what their hosts have to the owners.

    Rows are made owner by owner: other hosts', the neighbours', the own ones.
    """

    def of_rows(self, stage: Make) -> list[Instruction]:
        """Sums of rows that are there; they are staged where ranks of one host read each other's."""
        lane = self.publish(stage)
        for piece in self.far():
            lane += self.put(piece, self.near)
        for piece in self.pieces(self.rank):
            lane += (
                self.share(piece, self.near)
                if self.everywhere
                else self.add(piece, self.near, "out", piece.number)
            )
        return lane + (self.collect() if self.everywhere else leave(self.rank, self.ranks))

    def of_products(self, make: Make) -> Lanes:
        """Sums of rows that are made meanwhile: those that cross first, own ones last."""
        rank, comm = (
            self.rank,
            [instruction for piece in self.far() for instruction in self.put(piece, self.here)],
        )
        lane = enter(rank, self.ranks)
        for group in self.made(rank):
            lane.append(make(rank, group[0].at, group[-1].at + 1))
            if self.everywhere or group[0].owner != rank:
                lane.append(Notify(self.reducer(group[0].owner), Signal("made", rank)))
            else:
                for piece in group:
                    lane += self.add(piece, self.near, "out", piece.number)
        if not self.everywhere:
            return beside([*lane, *leave(rank, self.ranks)], [comm])
        for piece in self.pieces(rank):
            comm += self.share(piece, self.here)
        if not apart(self.hosts):
            comm.append(Notify(rank, Signal("summed", rank)))
        return beside([*lane, *self.collect(own_elsewhere=True)], [comm])

    def made(self, producer: int) -> list[list[Piece]]:
        """What a rank of this host makes by one product each, in order.

        First what crosses, from one piece to ever more, so that the link has soon something to send
        and never waits for the next; then the neighbours' blocks; then the own one, from many
        pieces to one, which is all that is left to add in the end.
        """
        first = self.here[0]
        far = [
            grown(self.pieces(owner))
            for host in others(first, self.hosts)
            for owner in members(host, self.hosts)
        ]
        near = [[self.pieces(peer)] for peer in neighbours(producer, self.hosts)]
        own = [group[::-1] for group in grown(self.pieces(producer)[::-1])][::-1]
        return [group for groups in [*far, *near, own] for group in groups]

    def far(self) -> list[Piece]:
        """The pieces that this rank adds up for other hosts."""
        return [
            piece
            for group in self.made(self.rank)
            for piece in group
            if self.reducer(piece.owner) == self.rank != piece.owner
        ]

    def wait_for(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Wait until these ranks of the host have told this one that their rows of a piece are
        there.
        """
        waits: list[Instruction] = []
        for peer in producers:
            groups = (
                group for group in self.made(peer) if self.reducer(group[0].owner) == self.rank
            )
            count = (
                1
                if self.at_once
                else next(number for number, group in enumerate(groups, 1) if piece in group)
            )
            waits.append(Wait(Signal("made", peer), count))
        return waits

    def put(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up this host's rows of a piece, once `producers` have told that theirs are there, and
        put them to the owner.
        """
        lane, sums = self.wait_for(piece, producers), block(self.rank, self.source, piece.at)
        if len(self.here) > 1:
            products = tuple(sums._replace(rank=peer) for peer in self.here)
            sums = sums._replace(buffer="hosted")
            lane.append(Reduce(products, sums, part_of(self.op)))
        return [
            *lane,
            Copy(sums, self.place(piece, self.host)),
            Notify(piece.owner, Signal("arrived", self.rank)),
        ]

    def add(self, piece: Piece, producers: Sequence[int], into: str, at: int) -> list[Instruction]:
        """Add up an own piece into block `at` of `into`, once `producers` have told of theirs and
        other hosts' have arrived.
        """
        reducers = [
            rail_peer(self.rank, host, self.hosts) for host in others(self.rank, self.hosts)
        ]
        sums: list[Region] = []
        for host in dict.fromkeys(self.hosts):
            products = [block(peer, self.source, piece.at) for peer in members(host, self.hosts)]
            sums += products if host == self.host else [self.place(piece, host)]
        waits = self.wait_for(piece, producers) + hear("arrived", reducers, piece.number + 1)
        return [*waits, Reduce(tuple(sums), block(self.rank, into, at), self.op)]

    def place(self, piece: Piece, host: int) -> Region:
        """Where the owner of a piece finds the sum of `host`: its inbox has a place for each."""
        return block(piece.owner, "inbox", host * self.cut + piece.number)

    def share(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up an own piece and let all ranks have it: in their ``out``, or where several of a
        host can read it.
        """
        here = block(self.rank, "out" if apart(self.hosts) else "summed", piece.at)
        lane = self.add(piece, producers, here.buffer, piece.at)
        for host in others(self.rank, self.hosts):
            lane.append(Copy(here, here._replace(rank=rail_peer(self.rank, host, self.hosts))))
            lane += tell(self.rank, "summed", members(host, self.hosts))
        return lane + tell(self.rank, "summed", self.near)

    def collect(self, own_elsewhere: bool = False) -> list[Instruction]:
        """Wait for all sums, and copy to ``out`` what does not arrive there.

        `own_elsewhere`: the sum of the own rows is made in another lane, which tells when it is
        there.
        """
        rank, together = self.rank, not apart(self.hosts)
        lane: list[Instruction] = []
        for owner in [rank, *after(rank, self.ranks)]:
            if owner != rank or (own_elsewhere and together):
                lane.append(Wait(Signal("summed", owner), 1 if owner == rank else self.cut))
            lane += [self.take(owner)] if together else []
        return lane + (leave(rank, self.ranks) if together else [])

    def publish(self, make: Make) -> list[Instruction]:
        """Make all rows at once, and tell those of this host who add up some of them."""
        lane = enter(self.rank, self.ranks)
        if self.source == "partial":
            notified = {self.reducer(owner) for owner in range(self.ranks)}
            lane.append(make(self.rank, 0, self.ranks * self.cut))
            lane += tell(self.rank, "made", (peer for peer in self.near if peer in notified))
        return lane


def inbox(pieces: int, hosts: Hosts) -> Buffer:
    """A rank's inbox: a place for its own rows from each host."""
    return Buffer.of("workspace", [[*own] * len(set(hosts)) for own in shards(len(hosts), pieces)])


def spaces(pieces: int, hosts: Hosts) -> dict[str, Buffer]:
    """The workspaces of sums of rows that are there."""
    names = ("partial", "hosted", "running", "summed")
    return dict.fromkeys(names, Buffer.of("workspace", everything(len(hosts), pieces))) | {
        "inbox": inbox(pieces, hosts)
    }


def part_of(op: str) -> str:
    """What is done to parts of an average: only the last sum is divided."""
    return "sum" if op == "avg" else op


def grown(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in groups, each as large as all before it, but no larger than one of `PARTS`."""
    groups: list[list[Piece]] = []
    done = 0
    while done < len(pieces):
        size = max(1, min(done, len(pieces) // PARTS))
        groups.append([*pieces[done : done + size]])
        done += size
    return groups
