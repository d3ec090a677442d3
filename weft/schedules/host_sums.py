"""Sums over ranks on several hosts: each host adds up its own ranks' rows, so that a row crosses to another host once.

For a block that a rank of another host keeps, one rank of each host, the *reducer*, adds up what its host has, and puts the sum to
the owner. The owner adds its own host's rows and the other hosts' sums in the order of hosts, and of ranks within its host: the
same bits on every run. So a sum of another host is a term like a row of the own one, and is rounded as these are. With one rank on
each host that is the order of ranks, and nothing is added up before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.common import Hosts, after, apart, block, enter, leave, members, neighbours, others, rail_peer, shards

Lanes = dict[str, list[Instruction]]
Make = Callable[[int, int, int], Instruction]
"""From (rank, start, stop) to what puts a rank's own rows there into the buffer that is added up."""

PARTS = 4  # least products per block: fewer delay the first transfer, more make each product slower


class Piece(NamedTuple):
    """Block `at` of all, the `number`-th piece of what `owner` keeps."""

    owner: int
    number: int
    at: int


class HostSums(NamedTuple):
    """One rank's part: the pieces of the rows that each rank keeps, ``sum`` or another reduction, and the hosts.

    Rows are made owner by owner (other hosts', the neighbours', the own ones), or all `at_once`. They are added up from the buffer
    `source`.
    """

    cut: int
    op: str
    hosts: Hosts
    at_once: bool = False
    source: str = "partial"
    rank: int = 0

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def here(self) -> list[int]:
        """The ranks of this host."""
        return members(self.hosts[self.rank], self.hosts)

    def pieces(self, owner: int) -> list[Piece]:
        """What a rank keeps, in pieces."""
        return [Piece(owner, number, owner * self.cut + number) for number in range(self.cut)]

    def made(self, producer: int) -> list[list[Piece]]:
        """What a rank of this host makes by one product each, in order.

        First what crosses, from one piece to ever more, so that the link has soon something to send and never waits for the next;
        then the neighbours' blocks; then the own one, from many pieces to one, which is all that is left to add in the end.
        """
        first = self.here[0]
        far = [grown(self.pieces(owner)) for host in others(first, self.hosts) for owner in members(host, self.hosts)]
        near = [[self.pieces(peer)] for peer in neighbours(producer, self.hosts)]
        own = [group[::-1] for group in grown(self.pieces(producer)[::-1])][::-1]
        return [group for groups in [*far, *near, own] for group in groups]

    def reducer(self, piece: Piece) -> int:
        """Who of this host adds up a piece: its owner, or on behalf of an owner elsewhere its rail peer."""
        near = self.hosts[piece.owner] == self.hosts[self.rank]
        return piece.owner if near else rail_peer(piece.owner, self.hosts[self.rank], self.hosts)

    def far(self) -> list[Piece]:
        """The pieces that this rank adds up for other hosts."""
        return [piece for group in self.made(self.rank) for piece in group if self.reducer(piece) == self.rank != piece.owner]

    def multiply(self, group: Sequence[Piece], make: Make) -> Instruction:
        """Make this rank's rows of some pieces that lie side by side."""
        return make(self.rank, group[0].at, group[-1].at + 1)

    def notify(self, group: Sequence[Piece]) -> Notify:
        """Tell who adds up some pieces that this rank's rows of them are there."""
        return Notify(self.reducer(group[0]), Signal("made", self.rank))

    def wait_for(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Wait until these ranks of the host have told this one that their rows of a piece are there."""
        notified = {peer: [group for group in self.made(peer) if self.reducer(group[0]) == self.rank] for peer in producers}
        count = {
            peer: next(number for number, group in enumerate(groups, 1) if piece in group) for peer, groups in notified.items()
        }
        return [Wait(Signal("made", peer), 1 if self.at_once else count[peer]) for peer in producers]

    def put(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up this host's rows of a piece, once `producers` have told that theirs are there, and put them to the owner."""
        lane, sums = self.wait_for(piece, producers), block(self.rank, self.source, piece.at)
        if len(self.here) > 1:
            products = tuple(sums._replace(rank=peer) for peer in self.here)
            sums = sums._replace(buffer="hosted")
            lane.append(Reduce(products, sums, part_of(self.op)))
        return [*lane, Copy(sums, self.place(piece, self.hosts[self.rank])), Notify(piece.owner, Signal("arrived", self.rank))]

    def add(self, piece: Piece, producers: Sequence[int], into: str, at: int) -> list[Instruction]:
        """Add up an own piece into block `at` of `into`, once `producers` have told of theirs and other hosts' have arrived."""
        reducers = [rail_peer(self.rank, host, self.hosts) for host in others(self.rank, self.hosts)]
        waits = [*self.wait_for(piece, producers), *(Wait(Signal("arrived", reducer), piece.number + 1) for reducer in reducers)]
        sums: list[Region] = []
        for host in dict.fromkeys(self.hosts):
            products = [block(peer, self.source, piece.at) for peer in members(host, self.hosts)]
            sums += products if self.rank in members(host, self.hosts) else [self.place(piece, host)]
        return [*waits, Reduce(tuple(sums), block(self.rank, into, at), self.op)]

    def place(self, piece: Piece, host: int) -> Region:
        """Where the owner of a piece finds the sum of `host`: its inbox has a place for each."""
        return block(piece.owner, "inbox", host * self.cut + piece.number)

    def share(self, piece: Piece, producers: Sequence[int]) -> list[Instruction]:
        """Add up an own piece and let all ranks have it: in their ``out``, or where several of a host can read it."""
        into = "out" if apart(self.hosts) else "summed"
        here, summed = block(self.rank, into, piece.at), Signal("summed", self.rank)
        lane = self.add(piece, producers, into, piece.at)
        for host in others(self.rank, self.hosts):
            lane.append(Copy(here, here._replace(rank=rail_peer(self.rank, host, self.hosts))))
            lane += [Notify(peer, summed) for peer in members(host, self.hosts)]
        return lane + [Notify(peer, summed) for peer in neighbours(self.rank, self.hosts)]

    def collect(self, own_elsewhere: bool = False) -> list[Instruction]:
        """Wait for all sums, and copy to ``out`` what does not arrive there.

        `own_elsewhere`: the sum of the own rows is made in another lane, which tells when it is there.
        """
        rank, together = self.rank, not apart(self.hosts)
        lane: list[Instruction] = []
        for owner in [rank, *after(rank, self.ranks)]:
            if owner != rank or (own_elsewhere and together):
                lane.append(Wait(Signal("summed", owner), 1 if owner == rank else self.cut))
            if together:
                holder = owner if owner in self.here else rail_peer(owner, self.hosts[rank], self.hosts)
                summed = Region(holder, "summed", owner * self.cut, (owner + 1) * self.cut)
                lane.append(Copy(summed, summed._replace(rank=rank, buffer="out")))
        return [*lane, *(leave(rank, self.ranks) if together else [])]

    def publish(self, make: Make, reducers: Sequence[int]) -> list[Instruction]:
        """Make all rows at once, and tell those of `reducers` who add up some of them."""
        lane: list[Instruction] = [*enter(self.rank, self.ranks)]
        if self.source == "partial":
            notified = {self.reducer(group[0]) for group in self.made(self.rank)}
            lane.append(make(self.rank, 0, self.ranks * self.cut))
            lane += [Notify(peer, Signal("made", self.rank)) for peer in reducers if peer in notified]
        return lane


def inbox(pieces: int, hosts: Hosts) -> Buffer:
    """A rank's inbox: a place for its own rows from each host."""
    return Buffer.of("workspace", [[*own] * len(set(hosts)) for own in shards(len(hosts), pieces)])


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


def scatter_products(sums: HostSums, make: Make) -> Lanes:
    """Reduce-scatter while rows are made: those that cross first, own ones last."""
    rank, neighbouring = sums.rank, neighbours(sums.rank, sums.hosts)
    lane: list[Instruction] = [*enter(rank, sums.ranks)]
    for group in sums.made(rank):
        lane.append(sums.multiply(group, make))
        if group[0].owner != rank:
            lane.append(sums.notify(group))
            continue
        for piece in group:
            lane += sums.add(piece, neighbouring, "out", piece.number)
    comm = [instruction for piece in sums.far() for instruction in sums.put(piece, sums.here)]
    return {"compute": [*lane, *leave(rank, sums.ranks)]} | ({"comm": comm} if comm else {})


def reduce_products(sums: HostSums, make: Make) -> Lanes:
    """All-reduce while rows are made: each piece is put to its owner, added up there, and put to all."""
    rank, own = sums.rank, sums.pieces(sums.rank)
    if sums.at_once:
        lane = sums.publish(make, sums.here)
    else:
        made = ((sums.multiply(group, make), sums.notify(group)) for group in sums.made(rank))
        lane = [*enter(rank, sums.ranks), *(instruction for pair in made for instruction in pair)]
    comm = [instruction for piece in sums.far() for instruction in sums.put(piece, sums.here)]
    comm += [instruction for piece in own for instruction in sums.share(piece, sums.here)]
    if not apart(sums.hosts):
        comm.append(Notify(rank, Signal("summed", rank)))
    return {"compute": [*lane, *sums.collect(own_elsewhere=True)]} | ({"comm": comm} if comm else {})


def scatter(sums: HostSums, stage: Make) -> list[Instruction]:
    """Reduce-scatter of rows that are there; they are staged where ranks of one host read each other's."""
    rank, neighbouring = sums.rank, neighbours(sums.rank, sums.hosts)
    lane = sums.publish(stage, neighbouring)
    for piece in sums.far():
        lane += sums.put(piece, neighbouring)
    for piece in sums.pieces(rank):
        lane += sums.add(piece, neighbouring, "out", piece.number)
    return [*lane, *leave(rank, sums.ranks)]


def reduce(sums: HostSums, stage: Make) -> list[Instruction]:
    """All-reduce of rows that are there."""
    neighbouring = neighbours(sums.rank, sums.hosts)
    lane = sums.publish(stage, neighbouring)
    for piece in sums.far():
        lane += sums.put(piece, neighbouring)
    for piece in sums.pieces(sums.rank):
        lane += sums.share(piece, neighbouring)
    return [*lane, *sums.collect()]
