"""All-gather + matmul + reduce-scatter of uneven rows: all ranks of a host multiply each row that
is given to the host, by its own B, and the sum of the products returns to the row's place.

Rank 0 of two on one host, in two pieces, time to the right; o are its own rows, p the peer's, ``!``
notifies the peer, ``?`` waits for it::

    | stage o |!| o0 @ B |?| p0 @ B |!| p1 @ B |!| o1 @ B |?| out = both ranks' products of o |

Of several hosts a rank gives each some of its rows. They cross to that host once, into memory that
its ranks share, and their sum crosses once on return: a token whose experts are on two ranks of
another host travels once each way, not twice. Of the rows of a rank elsewhere, r, the rank of the
same place here receives them, adds up all ranks' products and puts the sums back. They are
multiplied between the halves of the host's own rows, which hide both transfers::

    compute  | stage o |!| o0 @ B |?| p0 @ B |!|?| r0 @ B |!|?| r1 @ B |!| p1, o1 @ B |?| out |
    comm     | put rows to the other host |!|?| add up and put back r0 |!|?| r1 |!|

Sums are in the order of the ranks, so the result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

from weft.kernels.matmul import MATMUL
from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Term,
    Wait,
)
from weft.plan.lazy import Deferred
from weft.schedules.exchanges import halves
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    concurrent,
    enter,
    leave,
    moves_alone,
    notify_all,
    wait_all,
)
from weft.schedules.peers import (
    Layout,
    layout,
    local_peers,
    members,
    other_hosts,
    rail_peer,
)
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("shared", "gathered")

WEIGHT = "out"
"""The name of the weight of each rank."""


def all_gather_matmul_reduce_scatter(request: Request) -> Plan:
    """The plan of a request.

    ``shared``: ranks multiply rows where they are in the memory of their host, as they arrive, and
    sums return while others are multiplied. ``gathered``: each rank copies all rows of its host,
    and multiplies them by one product; then the sums.
    """
    ranks, gathered = request.ranks, request.algorithm == "gathered"
    hosts = layout(request.hosts or (0,) * ranks)
    pieces = 1 if gathered else request.pieces
    moved = gathered and request.hosts is None and not request.remote_reads
    parts = [HostRows(rank, pieces, hosts, request.uneven, moved) for rank in range(ranks)]
    given = [part.numbers((part.rank, host) for host in part.every_host) for part in parts]
    held = [part.numbers((source, part.host) for source in part.held) for part in parts]
    taken = [part.numbers((source, part.host) for source in range(ranks)) for part in parts]
    own = [part.numbers([(part.rank, part.host)]) for part in parts]

    def lanes(rank: int) -> Lanes:
        return parts[rank].gathered() if gathered and ranks > 1 else parts[rank].shared()

    return Plan(
        "all_gather_matmul_reduce_scatter",
        request.algorithm,
        {
            "a": Buffer.of("input", given),
            **dict.fromkeys(("inbox", "hosted"), Buffer.of("workspace", held)),
            **dict.fromkeys(("rows", "partial"), Buffer.of("workspace", taken)),
            **dict.fromkeys(_products(ranks if moved else 0), Buffer.of("workspace", own)),
            "back": Buffer.of("workspace", given),
            "out": Buffer.of("output", given),
        },
        # all ranks of one host do the same
        by_rank(ranks, lanes, request if request.hosts is None else None),
        Deferred(lambda: {place: sums for part in parts for place, sums in part.result()}),
        parts[0].shards,
    )


class Group(NamedTuple):
    """Pieces of the rows of a rank that are multiplied at once."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class HostRows:
    """One rank's part: the rows that it gives to each host, and those that it multiplies.

    Blocks are named (source, host, piece), of the rows that rank `source` gives to a host; if they
    are not `uneven` a rank gives each host as many, and the shards are those of the ranks. `moved`:
    products of other ranks of the host cannot be read in place, so they are put to the rank that
    adds them up.
    """

    rank: int
    pieces: int
    hosts: Layout
    uneven: bool
    moved: bool

    @property
    def host(self) -> int:
        """This rank's host."""
        return self.hosts[self.rank]

    @property
    def every_host(self) -> range:
        return range(len(self.hosts.members))

    @property
    def shards(self) -> tuple[int, ...]:
        """The pieces of each shard."""
        return (self.pieces,) * (len(self.hosts) * self.wide)

    @property
    def wide(self) -> int:
        """The shards of a rank: the numbers of a row of the matrix."""
        return len(self.every_host) if self.uneven else 1

    @cached_property
    def here(self) -> Sequence[int]:
        """The ranks of this host, in order."""
        return members(self.host, self.hosts)

    @cached_property
    def local(self) -> list[int]:
        """The other ranks of this host."""
        return local_peers(self.rank, self.hosts)

    @cached_property
    def elsewhere(self) -> list[int]:
        """The other hosts."""
        return other_hosts(self.rank, self.hosts)

    @cached_property
    def remote(self) -> list[int]:
        """The ranks of other hosts, those first whose rows arrive first: on all ranks of a host in
        the same order, so that the first sums can return soon.
        """
        hosts = other_hosts(self.here[0], self.hosts)[::-1]
        return [rank for host in hosts for rank in members(host, self.hosts)]

    @cached_property
    def held(self) -> list[int]:
        """The ranks whose rows arrive at this rank, its own among them."""
        return self.hosts.holds(self.rank)

    @cached_property
    def cuts(self) -> list[tuple[int, int]]:
        """The groups of pieces in which rows of other hosts are multiplied, and return."""
        return [*halves(self.pieces)]

    def holder(self, source: int) -> int:
        """The rank of this host at which the rows of a source are, and which adds up their
        products: of a source on this host the source itself.
        """
        return rail_peer(source, self.host, self.hosts)

    def numbers(self, shards: Iterable[tuple[int, int]]) -> list[int]:
        """The numbers of the blocks of these (source, host)."""
        return [
            (source * self.wide + (host if self.uneven else 0)) * self.pieces + piece
            for source, host in shards
            for piece in range(self.pieces)
        ]

    def given(self, rank: int, buffer: str, host: int, *part: int) -> Region:
        """Pieces of the rows of a rank for a host, in a buffer in the order of the hosts."""
        return self._region(rank, buffer, host, *part)

    def arrived(self, source: int, buffer: str, *part: int) -> Region:
        """Pieces of a source where its holder has them."""
        holder = self.holder(source)
        return self._region(holder, buffer, self.hosts.holds(holder).index(source), *part)

    def taken(self, rank: int, buffer: str, source: int, *part: int) -> Region:
        """Pieces of a source in a buffer that has the rows of all sources for the host."""
        return self._region(rank, buffer, source, *part)

    def _region(self, rank: int, buffer: str, place: int, start: int = 0, stop: int = -1) -> Region:
        first = place * self.pieces
        return Region(rank, buffer, first + start, first + (self.pieces if stop < 0 else stop))

    def result(self) -> Iterator[tuple[Region, tuple[Term, ...]]]:
        """What this rank gets: for each host the sum of the products of its ranks."""
        for host in self.every_host:
            sums = (Term(self.rank, "a", 0, (of, WEIGHT)) for of in members(host, self.hosts))
            yield self.given(self.rank, "out", host), tuple(sums)

    def shared(self) -> Lanes:
        """Half of the rows of this host's ranks while rows of others arrive, these, and the other
        half while the last sums return.
        """
        lane = [*enter(self.rank, self.hosts), *self.stage()] if self.local else []
        moves: list[Instruction] = enter(self.rank, self.hosts) if self.elsewhere else []
        for host in self.elsewhere:
            for piece in range(self.pieces):
                moves += self.put(host, piece, piece + 1)
        for group in self.groups(self.rank):
            lane += [*self.arrival(group), *self.multiply(group)]
            if self.is_for_another_host(group):
                moves += [*self.made(group, self.here), *self.put_back(*group)]
        if self.local:
            last = max(group for group in self.groups(self.rank) if group.source == self.rank)
            lane += [*self.made(last, self.local), *self.add_own()]
        return concurrent([*lane, *self.keep()], [moves])

    def groups(self, rank: int) -> list[Group]:
        """The products of a rank of this host, in order."""
        early = -(-self.pieces // 2)
        local = [rank, *local_peers(rank, self.hosts)]
        others = [
            Group(source, *cut)
            for _, of_host in groupby(self.remote, lambda source: self.hosts[source])
            for cut, source in product(self.cuts, [*of_host])
        ]
        late = [*local[1:], rank] if early < self.pieces else []
        return [
            *(Group(source, 0, early) for source in local),
            *others,
            *(Group(source, early, self.pieces) for source in late),
        ]

    def is_for_another_host(self, group: Group) -> bool:
        """Whether this rank adds up these products for another host."""
        return group.source in self.held and group.source != self.rank

    def made(self, group: Group, producers: Iterable[int]) -> list[Instruction]:
        """Wait until these ranks of the host have made products that this rank adds up."""
        return [Wait(Signal("made", of), self.signals[of, group]) for of in producers]

    @cached_property
    def signals(self) -> Mapping[tuple[int, Group], int]:
        """The number of the signal with which a rank of this host announces products to this
        one.
        """
        found: dict[tuple[int, Group], int] = {}
        for producer in self.here:
            told = (
                group
                for group in self.groups(producer)
                if self.holder(group.source) == self.rank and group.source != producer
            )
            found |= {(producer, group): number for number, group in enumerate(told, 1)}
        return found

    def stage(self) -> list[Instruction]:
        """Put own rows for this host where its other ranks read them."""
        own = self.given(self.rank, "a", self.host)
        return [
            Copy(own, self.arrived(self.rank, "inbox")),
            *notify_all(self.rank, "ready", self.local),
        ]

    def put(self, host: int, *part: int) -> list[Instruction]:
        """Put pieces of own rows to another host, once."""
        to, place = rail_peer(self.rank, host, self.hosts), self.hosts.holds
        there = self._region(to, "inbox", place(to).index(self.rank), *part)
        return [
            Copy(self.given(self.rank, "a", host, *part), there),
            *notify_all(self.rank, "in", members(host, self.hosts)),
        ]

    def arrival(self, group: Group) -> list[Instruction]:
        """Wait until rows of a source are on this host."""
        if group.source == self.rank:
            return []
        if group.source in self.local:
            return [Wait(Signal("ready", group.source), 1)]
        return [Wait(Signal("in", group.source), group.stop)]

    def multiply(self, group: Group) -> list[Instruction]:
        """The product of rows on this host, and the signal to the rank that adds it up."""
        source, *part = group
        if source != self.rank:
            made = self.taken(self.rank, "partial", *group)
            told = Notify(self.holder(source), Signal("made", self.rank))
            rows = self.arrived(source, "inbox", *part)
            return [Compute(MATMUL, (rows,), made, WEIGHT), told]
        rows = self.given(self.rank, "a", self.host, *part)
        made = rows._replace(buffer="out")  # of a rank alone on its host it is the sum
        if self.local:
            made = self.taken(self.rank, "partial", *group)
        return [Compute(MATMUL, (rows,), made, WEIGHT)]

    def put_back(self, source: int, *part: int) -> list[Instruction]:
        """Add up the products of rows of another host's rank, and put the sums to it."""
        lane: list[Instruction] = []
        sums = self.taken(self.rank, "partial", source, *part)
        if self.local:
            products = tuple(sums._replace(rank=of) for of in self.here)
            sums = self.arrived(source, "hosted", *part)
            lane.append(Reduce(products, sums))
        back = self.given(source, "back", self.host, *part)
        return [*lane, Copy(sums, back), Notify(source, Signal("back", self.rank))]

    def products_of(self, maker: int, rank: int) -> Region:
        """The products of the rows of `rank` that were moved to it from the rank that made them.

        Each maker has a buffer, by its distance, so that all ranks use buffers of the same names.
        """
        ranks = len(self.hosts)
        return self._region(rank, _products(ranks)[(maker - rank) % ranks - 1], 0)

    def add_own(self) -> list[Instruction]:
        """Add up the products of own rows of this host's ranks."""
        own = self.taken(self.rank, "partial", self.rank)
        products = tuple(
            self.products_of(of, self.rank)
            if self.moved and of != self.rank
            else own._replace(rank=of)
            for of in self.here
        )
        return [Reduce(products, self.given(self.rank, "out", self.host))]

    def keep(self) -> list[Instruction]:
        """Copy the sums of other hosts to the result, when they have returned."""
        lane: list[Instruction] = []
        for host in self.elsewhere:
            returned = self.given(self.rank, "back", host)
            of = rail_peer(self.rank, host, self.hosts)
            lane += [
                Wait(Signal("back", of), len(self.cuts)),
                Copy(returned, returned._replace(buffer="out")),
            ]
        return [*lane, *leave(self.rank, self.hosts)]

    def gathered(self) -> Lanes:
        """All rows of the host, one product, and the sums."""
        rank = self.rank
        # to a rank alone on its host all rows come side by side
        into = "rows" if self.local else "inbox"
        own = self.given(rank, "a", self.host)
        lane = [*enter(rank, self.hosts), Copy(own, self.taken(rank, into, rank))]
        lane += self.stage() if self.local else []
        for host in self.elsewhere:
            lane += self.put(host)
        for source in (*self.local, *self.remote):
            lane += self.arrival(Group(source, 0, 1))
            if self.local:
                lane.append(Copy(self.arrived(source, "inbox"), self.taken(rank, into, source)))
        rows = Region(rank, into, 0, len(self.hosts))
        lane.append(Compute(MATMUL, (rows,), rows._replace(buffer="partial"), WEIGHT))
        for peer in self.local if self.moved else ():
            lane += [Copy(self.taken(rank, "partial", peer), self.products_of(rank, peer))]
            lane += notify_all(rank, "made", [peer])
        lane += [] if self.moved else notify_all(rank, "made", self.local)
        lane += wait_all("made", self.local)
        for source in self.remote:
            lane += self.put_back(source) if source in self.held else []
        lane += self.add_own()
        return {"compute": [*lane, *self.keep()]}


def _products(ranks: int) -> list[str]:
    """The buffers for the products of each other rank that cannot be read in place."""
    return [f"products{distance}" for distance in range(1, ranks)]


def _communicate(request: Request) -> Plan:
    """The rows and the sums alone, of other products, which are an input."""
    plan = all_gather_matmul_reduce_scatter(request)
    products = replace(plan.buffers["partial"], role="input")
    return moves_alone(plan, {**plan.buffers, "partial": products})


def _buffers(workload: Workload) -> dict[str, Rows]:
    return {
        **dict.fromkeys(("a", "inbox", "rows"), Rows(workload.k, workload.dtype)),
        **dict.fromkeys(
            ("partial", "hosted", "back", "out", *_products(workload.ranks)),
            Rows(workload.n, workload.out_dtype),
        ),
    }


OPERATOR = Operator(
    "all_gather_matmul_reduce_scatter",
    ALGORITHMS,
    plan=all_gather_matmul_reduce_scatter,
    communicate=_communicate,
    buffers=_buffers,
    default_shards=lambda rows, ranks: (rows,) * ranks,
    result_rows=lambda shards, rank: shards[rank],
    uncut=("gathered",),
    moves_nothing=("shared",),
    baseline="gathered",
    auto_candidates=("shared", "gathered"),
    auto_candidates_over_links=("shared", "gathered"),
)
