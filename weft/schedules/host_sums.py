"""Sums over ranks on several hosts: each host adds up its own ranks' rows, so that a row crosses to another host once.

For a block that a rank of another host keeps, one rank of each host, the *adder*, adds up what its host has, and puts the sum to
the keeper. The keeper adds its own host's rows and the other hosts' sums in the order of hosts, and of ranks within its host: the
same bits on every run. With one rank on each host that is the order of ranks, and nothing is added up before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from weft.plan import Copy, Instruction, Notify, Reduce, Region, Signal, Wait
from weft.schedules.common import Hosts, after, apart, carrier, chunks, enter, leave, members, neighbours, offsets, others

Lanes = dict[str, list[Instruction]]
Make = Callable[[int, int, int], Instruction]
"""From (rank, start, stop) to what puts a rank's own rows there into the buffer that is added up."""

LAG = 2  # pieces of each block that are sent before the first is added up, so that its keeper need not wait for it


class Piece(NamedTuple):
    """Rows ``start:stop`` of all, the `number`-th piece of the block that `keeper` keeps."""

    keeper: int
    number: int
    start: int
    stop: int


class HostSums(NamedTuple):
    """One rank's part: the rows that each rank keeps, rows per piece, ``sum`` or another reduction, and the hosts.

    Rows are made in the `order` ``blocks`` (other hosts' blocks, the neighbours', own), ``rounds`` (the first piece of every block,
    the second, …) or ``at once``. They are added up from the buffer `source`.
    """

    rows: Sequence[int]
    chunk: int
    op: str
    hosts: Hosts
    order: Literal["blocks", "rounds", "at once"]
    source: str = "partial"
    rank: int = 0

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def here(self) -> list[int]:
        """The ranks of this host."""
        return members(self.hosts[self.rank], self.hosts)

    def pieces(self, keeper: int) -> list[Piece]:
        """The block of a rank, in pieces."""
        start = offsets(self.rows)[keeper]
        cut = enumerate(chunks(self.rows[keeper], self.chunk))
        return [Piece(keeper, number, start + low, start + high) for number, (low, high) in cut]

    def made_in_order(self) -> list[Piece]:
        """All pieces in the order in which the ranks of this host make them; own ones last, or last of their round."""
        first = self.here[0]
        far = [keeper for host in others(first, self.hosts) for keeper in members(host, self.hosts)]
        keepers = [*far, *neighbours(self.rank, self.hosts), self.rank]
        every = [piece for keeper in keepers for piece in self.pieces(keeper)]
        return sorted(every, key=lambda piece: piece.number) if self.order == "rounds" else every

    def listener(self, piece: Piece) -> int:
        """Who of this host adds up a piece: its keeper, or the adder on behalf of a keeper elsewhere."""
        near = self.hosts[piece.keeper] == self.hosts[self.rank]
        return piece.keeper if near else carrier(piece.keeper, self.hosts[self.rank], self.hosts)

    def far(self) -> list[Piece]:
        """The pieces that this rank adds up for other hosts."""
        return [p for p in self.made_in_order() if self.listener(p) == self.rank != p.keeper]

    def told(self, piece: Piece) -> Notify:
        """Tell who adds up a piece that this rank's rows of it are there."""
        return Notify(self.listener(piece), Signal("made", self.rank))

    def wait_for(self, piece: Piece, makers: Sequence[int]) -> list[Instruction]:
        """Wait until these ranks of the host have told this one that their rows of a piece are there."""
        heard = [p for p in self.made_in_order() if self.listener(p) == self.rank]
        if self.order == "at once":
            count = 1
        elif self.order == "blocks" and piece.keeper == self.rank:  # told once for the whole block
            count = 1 + sum(p.keeper != self.rank for p in heard)
        else:
            count = 1 + heard.index(piece)
        return [Wait(Signal("made", peer), count) for peer in makers]

    def put(self, piece: Piece, makers: Sequence[int]) -> list[Instruction]:
        """Add up this host's rows of a piece, once `makers` have told that theirs are there, and put them to the keeper."""
        lane, sums = self.wait_for(piece, makers), Region(self.rank, self.source, piece.start, piece.stop)
        if len(self.here) > 1:
            products = tuple(sums._replace(rank=peer) for peer in self.here)
            sums = sums._replace(buffer="hosted")
            lane.append(Reduce(products, sums, part_of(self.op)))
        return [*lane, Copy(sums, self.place(piece, self.hosts[self.rank])), Notify(piece.keeper, Signal("arrived", self.rank))]

    def add(self, piece: Piece, makers: Sequence[int], into: str, start: int) -> list[Instruction]:
        """Add up an own piece at row `start` of `into`, once `makers` have told of theirs and other hosts' have arrived."""
        adders = [carrier(self.rank, host, self.hosts) for host in others(self.rank, self.hosts)]
        waits = [*self.wait_for(piece, makers), *(Wait(Signal("arrived", adder), piece.number + 1) for adder in adders)]
        sums: list[Region] = []
        for host in dict.fromkeys(self.hosts):
            products = [Region(peer, self.source, piece.start, piece.stop) for peer in members(host, self.hosts)]
            sums += products if self.rank in members(host, self.hosts) else [self.place(piece, host)]
        return [*waits, Reduce(tuple(sums), Region(self.rank, into, start, start + piece.stop - piece.start), self.op)]

    def place(self, piece: Piece, host: int) -> Region:
        """Where the keeper of a piece finds the sum of `host`: its inbox has a place for each."""
        start = host * self.rows[piece.keeper] - offsets(self.rows)[piece.keeper]
        return Region(piece.keeper, "inbox", start + piece.start, start + piece.stop)

    def share(self, piece: Piece, makers: Sequence[int]) -> list[Instruction]:
        """Add up an own piece and let all ranks have it: in their ``out``, or where several of a host can read it."""
        into = "out" if apart(self.hosts) else "summed"
        here, summed = Region(self.rank, into, piece.start, piece.stop), Signal("summed", self.rank)
        lane = self.add(piece, makers, into, piece.start)
        for host in others(self.rank, self.hosts):
            lane.append(Copy(here, here._replace(rank=carrier(self.rank, host, self.hosts))))
            lane += [Notify(peer, summed) for peer in members(host, self.hosts)]
        return lane + [Notify(peer, summed) for peer in neighbours(self.rank, self.hosts)]

    def collect(self, own_elsewhere: bool = False) -> list[Instruction]:
        """Wait for the sums of all blocks, and copy to ``out`` what does not arrive there.

        `own_elsewhere`: the sum of the own block is made in another lane, which tells when it is there.
        """
        rank, starts, together = self.rank, offsets(self.rows), not apart(self.hosts)
        lane: list[Instruction] = []
        for keeper in [rank, *after(rank, self.ranks)]:
            if not self.rows[keeper]:
                continue
            if keeper != rank or (own_elsewhere and together):
                lane.append(Wait(Signal("summed", keeper), 1 if keeper == rank else len(self.pieces(keeper))))
            if together:
                holder = keeper if keeper in self.here else carrier(keeper, self.hosts[rank], self.hosts)
                block = Region(holder, "summed", starts[keeper], starts[keeper] + self.rows[keeper])
                lane.append(Copy(block, block._replace(rank=rank, buffer="out")))
        return [*lane, *(leave(rank, self.ranks) if together else [])]

    def publish(self, make: Make, listeners: Sequence[int]) -> list[Instruction]:
        """Make all rows at once, and tell those of `listeners` who add up some of them."""
        lane: list[Instruction] = [*enter(self.rank, self.ranks)]
        if self.source == "partial":
            hearing = {self.listener(piece) for piece in self.made_in_order()}
            lane.append(make(self.rank, 0, sum(self.rows)))
            lane += [Notify(peer, Signal("made", self.rank)) for peer in listeners if peer in hearing]
        return lane


def inbox_rows(rows: Sequence[int], hosts: Hosts) -> tuple[int, ...]:
    """Rows of each rank's inbox."""
    return tuple(len(set(hosts)) * kept for kept in rows)


def part_of(op: str) -> str:
    """What is done to parts of an average: only the last sum is divided."""
    return "sum" if op == "avg" else op


def scatter_products(sums: HostSums, make: Make) -> Lanes:
    """Reduce-scatter while rows are made: those that cross first, own ones last."""
    rank, starts, neighbouring = sums.rank, offsets(sums.rows), neighbours(sums.rank, sums.hosts)
    lane: list[Instruction] = [*enter(rank, sums.ranks)]
    for piece in sums.made_in_order():
        if piece.keeper == rank:
            lane += [make(rank, piece.start, piece.stop)]
            lane += sums.add(piece, neighbouring, "out", piece.start - starts[rank])
        elif piece.keeper not in sums.here:
            lane += [make(rank, piece.start, piece.stop), sums.told(piece)]
        elif piece.number == 0:
            lane += [make(rank, piece.start, piece.start + sums.rows[piece.keeper]), sums.told(piece)]
    comm = [instruction for piece in sums.far() for instruction in sums.put(piece, sums.here)]
    return {"compute": [*lane, *(leave(rank, sums.ranks) if sums.rows[rank] else [])]} | ({"comm": comm} if comm else {})


def reduce_products(sums: HostSums, make: Make) -> Lanes:
    """All-reduce while rows are made: each piece is put to its keeper, added up there, and put to all."""
    rank, own = sums.rank, sums.pieces(sums.rank)
    if sums.order == "at once":
        lane = sums.publish(make, sums.here)
    else:
        made = ((make(rank, piece.start, piece.stop), sums.told(piece)) for piece in sums.made_in_order())
        lane = [*enter(rank, sums.ranks), *(instruction for pair in made for instruction in pair)]
    comm: list[Instruction] = []
    for number in range(max(map(len, map(sums.pieces, range(sums.ranks)))) + LAG):
        for piece in sums.far():
            comm += sums.put(piece, sums.here) if piece.number == number else []
        if 0 <= number - LAG < len(own):
            comm += sums.share(own[number - LAG], sums.here)
    if own and not apart(sums.hosts):
        comm.append(Notify(rank, Signal("summed", rank)))
    return {"compute": [*lane, *sums.collect(own_elsewhere=True)]} | ({"comm": comm} if comm else {})


def scatter(sums: HostSums, stage: Make) -> list[Instruction]:
    """Reduce-scatter of rows that are there; they are staged where ranks of one host read each other's."""
    rank, start, neighbouring = sums.rank, offsets(sums.rows)[sums.rank], neighbours(sums.rank, sums.hosts)
    lane = sums.publish(stage, neighbouring)
    for piece in sums.far():
        lane += sums.put(piece, neighbouring)
    for piece in sums.pieces(rank):
        lane += sums.add(piece, neighbouring, "out", piece.start - start)
    return [*lane, *(leave(rank, sums.ranks) if sums.rows[rank] else [])]


def reduce(sums: HostSums, stage: Make) -> list[Instruction]:
    """All-reduce of rows that are there."""
    neighbouring = neighbours(sums.rank, sums.hosts)
    lane = sums.publish(stage, neighbouring)
    for piece in sums.far():
        lane += sums.put(piece, neighbouring)
    for piece in sums.pieces(sums.rank):
        lane += sums.share(piece, neighbouring)
    return [*lane, *sums.collect()]
