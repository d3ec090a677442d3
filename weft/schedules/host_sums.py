"""Sums over ranks on several hosts: each host adds up its own ranks' rows, so that a row is sent to
another host once.

For a block that a rank of another host owns, one rank of each host, the *reducer*, adds up the rows
of its host, and puts the sum to the owner. The owner adds its own host's rows and the other hosts'
sums in the order of hosts, and of ranks within its host: the same bits on every run. So a sum of
another host is a term like a row of the own host, and is rounded in the same manner. With one rank
on each host that is the order of ranks, and no rows are added up before they are sent.

A reduce-scatter of ranks 0 and 1 on one host and rank 2 on another, with block b of rank b, time to
the right; ``!`` notifies a rank, ``?`` waits for it. Rank 0 reduces its host's rows of block 2::

    rank 0  | stage |!1|?1| add 0 and 1's block 2 | put the sum to 2 |!2|?2| add block 0 |
    rank 1  | stage |!0|?0|?2| add block 1 |
    rank 2  | stage | put block 0 |!0| put block 1 |!1|?0| add block 2 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.blocks import block, everything, shard, shards
from weft.schedules.lanes import Lanes, concurrent, enter, leave, notify_all, wait_all
from weft.schedules.peers import (
    Hosts,
    Layout,
    after,
    local_peers,
    members,
    one_rank_per_host,
    other_hosts,
    rail_peer,
)

Make = Callable[[int, int, int], Instruction]
"""From (rank, start, stop) to the instruction that puts a rank's own rows of these blocks into the
buffer that is added up.
"""

PARTS = 4
"""Products per block: fewer delay the first transfer, more make each product slower.

Measured on two hosts of 2 cores: products of 64 rows took up to 1.6 times as long as one large one
(`weft bench matmul-reduce-scatter --shape 2048x512x2048`).
"""


class Piece(NamedTuple):
    """Block `at` of all, the `number`-th piece of the blocks of `owner`."""

    owner: int
    number: int
    at: int


@dataclass(frozen=True)
class HostPart:
    """One rank's part in sums over ranks on these hosts; each owns `cut` pieces.

    `op` is ``sum`` or another reduction. Sums are sent to all ranks if `everywhere`, else to their
    owners. Rows are made piece by piece, or all `at_once`, and added up from the buffer `source`.
    """

    rank: int
    cut: int
    hosts: Layout
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
    def here(self) -> Sequence[int]:
        """The ranks of this host."""
        return members(self.host, self.hosts)

    @cached_property
    def local_peers(self) -> list[int]:
        """The other ranks of this host."""
        return local_peers(self.rank, self.hosts)

    def pieces(self, owner: int) -> list[Piece]:
        """The pieces that a rank owns."""
        return [Piece(owner, number, owner * self.cut + number) for number in range(self.cut)]

    def reducer(self, owner: int) -> int:
        """The rank of this host that adds up an owner's pieces; on its own host the owner."""
        return rail_peer(owner, self.host, self.hosts)

    def adds(self, owner: int) -> bool:
        """Whether this rank adds up an owner's pieces."""
        return self.reducer(owner) == self.rank

    def take(self, owner: int) -> Copy:
        """Copy an owner's sums to ``out``, from the reducer of this host."""
        summed = shard(self.reducer(owner), "summed", owner, self.cut)
        return Copy(summed, summed._replace(rank=self.rank, buffer="out"))


class HostSums(HostPart):
    """One rank's part in sums that reducers put to the owners.

    Rows are made owner by owner: for other hosts, for ranks of this host, for this rank.
    """

    def of_rows(self, stage: Make) -> list[Instruction]:
        """Sums of existing rows; they are staged if ranks of one host read each other's."""
        lane = self.publish(stage)
        for piece in self.for_other_hosts():
            lane += self.put(piece, self.local_peers)
        for piece in self.pieces(self.rank):
            lane += (
                self.share(piece, self.local_peers)
                if self.everywhere
                else self.add(piece, self.local_peers, "out", piece.number)
            )
        return lane + (self.collect() if self.everywhere else leave(self.rank, self.hosts))

    def of_products(self, make: Make) -> Lanes:
        """Sums of rows that are made meanwhile: first rows for other hosts, last this rank's
        own.
        """
        rank = self.rank
        comm = [step for piece in self.for_other_hosts() for step in self.put(piece, self.here)]
        lane = enter(rank, self.hosts)
        for group in self.made(rank):
            lane.append(make(rank, group[0].at, group[-1].at + 1))
            if self.everywhere or group[0].owner != rank:
                lane.append(Notify(self.reducer(group[0].owner), Signal("made", rank)))
            else:
                for piece in group:
                    lane += self.add(piece, self.local_peers, "out", piece.number)
        if not self.everywhere:
            return concurrent([*lane, *leave(rank, self.hosts)], [comm])
        for piece in self.pieces(rank):
            comm += self.share(piece, self.here)
        if not one_rank_per_host(self.hosts):
            comm.append(Notify(rank, Signal("summed", rank)))
        return concurrent([*lane, *self.collect(own_elsewhere=True)], [comm])

    def made(self, producer: int) -> list[list[Piece]]:
        """The groups of pieces that a rank of this host makes by one product each, in order.

        First pieces for other hosts, in growing groups, so that the link starts early and never
        waits for the next; then the blocks of ranks of this host; then the own block, in shrinking
        groups, so that only one piece is left to add in the end.
        """
        peers = local_peers(producer, self.hosts.toward(None))
        local = [[self.pieces(peer)] for peer in peers]
        own = [group[::-1] for group in grown(self.pieces(producer)[::-1])][::-1]
        return [*self.elsewhere, *(group for groups in [*local, own] for group in groups)]

    @cached_property
    def elsewhere(self) -> list[list[Piece]]:
        """The groups of pieces for other hosts, in the order in which all ranks of this host make
        them.
        """
        return [
            group
            for host in other_hosts(self.here[0], self.hosts)
            for owner in members(host, self.hosts)
            for group in grown(self.pieces(owner))
        ]

    def for_other_hosts(self) -> list[Piece]:
        """The pieces that this rank adds up for other hosts."""
        return [piece for group in self.elsewhere for piece in group if self.adds(piece.owner)]

    def wait_for(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Wait for the signals of these ranks of the host that their rows of a piece are made."""
        return [
            Wait(Signal("made", peer), 1 if self.at_once else self.numbers[peer, piece])
            for peer in producers
        ]

    @cached_property
    def numbers(self) -> dict[tuple[int, Piece], int]:
        """The number of the signal with which a rank of this host notifies this one of a piece."""
        found: dict[tuple[int, Piece], int] = {}
        for producer in self.here:
            groups = (group for group in self.made(producer) if self.adds(group[0].owner))
            for number, group in enumerate(groups, 1):
                found |= {(producer, piece): number for piece in group}
        return found

    def put(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up this host's rows of a piece, after `producers` have made theirs, and put the sum
        to the owner.
        """
        lane = self.wait_for(piece, producers)
        sums = block(self.rank, self.source, piece.at)
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
        """Add up an own piece into block `at` of `into`, after `producers` have made their rows and
        the sums of other hosts have arrived.
        """
        others = other_hosts(self.rank, self.hosts)
        reducers = [rail_peer(self.rank, host, self.hosts) for host in others]
        sums: list[Region] = []
        for host in sorted((self.host, *others)):
            products = [block(peer, self.source, piece.at) for peer in members(host, self.hosts)]
            sums += products if host == self.host else [self.place(piece, host)]
        waits = self.wait_for(piece, producers) + wait_all("arrived", reducers, piece.number + 1)
        return [*waits, Reduce(tuple(sums), block(self.rank, into, at), self.op)]

    def place(self, piece: Piece, host: int) -> Region:
        """The block of the owner's inbox for the sum of `host`."""
        return block(piece.owner, "inbox", host * self.cut + piece.number)

    def share(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up an own piece and send it to all ranks: to their ``out``, or, with several ranks on
        a host, to memory that all of them read.
        """
        here = block(self.rank, "out" if one_rank_per_host(self.hosts) else "summed", piece.at)
        lane = self.add(piece, producers, here.buffer, piece.at)
        for host in other_hosts(self.rank, self.hosts):
            lane.append(Copy(here, here._replace(rank=rail_peer(self.rank, host, self.hosts))))
            lane += notify_all(self.rank, "summed", members(host, self.hosts))
        return lane + notify_all(self.rank, "summed", self.local_peers)

    def collect(self, own_elsewhere: bool = False) -> list[Instruction]:
        """Wait for all sums, and copy to ``out`` sums that do not arrive there.

        `own_elsewhere`: another lane makes the sum of the own rows, and notifies this one.
        """
        rank = self.rank
        together = not one_rank_per_host(self.hosts)
        lane: list[Instruction] = []
        for owner in [rank, *after(rank, self.hosts)]:
            if owner != rank or (own_elsewhere and together):
                lane.append(Wait(Signal("summed", owner), 1 if owner == rank else self.cut))
            lane += [self.take(owner)] if together else []
        return lane + (leave(rank, self.hosts) if together else [])

    def publish(self, make: Make) -> list[Instruction]:
        """Make all rows at once, and notify the reducers of this host."""
        lane = enter(self.rank, self.hosts)
        if self.source == "partial":
            lane.append(make(self.rank, 0, self.ranks * self.cut))
            lane += notify_all(self.rank, "made", self.local_peers)
        return lane


def inbox(pieces: int, hosts: Hosts) -> Buffer:
    """A rank's inbox: its own rows from each host."""
    return Buffer.of("workspace", [[*own] * len(set(hosts)) for own in shards(len(hosts), pieces)])


def spaces(pieces: int, hosts: Hosts) -> dict[str, Buffer]:
    """The workspaces of sums of existing rows."""
    names = ("partial", "hosted", "running", "summed")
    return dict.fromkeys(names, Buffer.of("workspace", everything(len(hosts), pieces))) | {
        "inbox": inbox(pieces, hosts)
    }


def part_of(op: str) -> str:
    """The reduction of partial sums: an average divides only the last."""
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
