"""Matmul + all-to-all: ``out = the rows for this rank of all ranks' a @ B``, the return of tokens
from experts: each of a rank's weights has multiplied separate rows, whose products go to the ranks
that gave them.

Rank 0 of two by a push, in two pieces, time to the right; p is a piece for the peer, ``!`` notifies
it, ``?`` waits for it::

    compute  | p0 @ B | p1 @ B   | own rows @ B |?| keep what has arrived |
    comm              | put p0 |!| put p1 |!|

``by_expert`` makes the products of an expert for all ranks at once, so it reads each weight once,
and puts them while the next expert multiplies. Each row of the result is written by one rank, in
its own place, so the result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.kernels.matmul import MATMUL
from weft.plan import Buffer, Compute, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.exchanges import Batch, Blocks, exchange, weight
from weft.schedules.lanes import Lanes, concurrent, enter, leave, wait_all, without_products
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("push", "by_expert", "sequential")


def matmul_all_to_all(request: Request) -> Plan:
    """The plan of a request: products are put to the rank that gave their rows."""
    of = Blocks.of(request)
    make = {"push": _push, "by_expert": _by_expert, "sequential": _sequential}[request.algorithm]
    given, received = ([*map(each, range(of.ranks))] for each in (of.made, of.returned))
    return exchange(
        "matmul_all_to_all",
        request,
        of,
        lambda rank: make(Return(of, rank)),
        {
            "a": Buffer.of("input", given),
            "partial": Buffer.of("workspace", given),
            "inbox": Buffer.of("workspace", received),
            "out": Buffer.of("output", received),
        },
        lambda: _result(of),
    )


def _result(of: Blocks) -> Iterator[tuple[Region, tuple[Term, ...]]]:
    """The products of every expert, on the ranks that gave their rows."""
    for rank in range(of.ranks):
        for owner in range(of.ranks):
            for expert in of.of_rank(owner):
                place = of.targets_first(rank, "out", owner, expert)
                start = of.experts_first(owner, "a", rank, expert).start
                by = owner, weight("partial", expert)
                yield place, (Term(owner, "a", start - place.start, by),)


@dataclass(frozen=True)
class Return:
    """One rank's part of the combine: products of `rows` are `made` in a workspace and put to
    another one, `back`, of the rank that gave their rows, which copies them to ``out``.

    A put raises `signal`; `weight` is the name of the first expert's weight.
    """

    of: Blocks
    rank: int
    rows: str = "a"
    made: str = "partial"
    back: str = "inbox"
    signal: str = "in"
    weight: str = "partial"

    @property
    def experts(self) -> range:
        """The rank's experts."""
        return self.of.of_rank(self.rank)

    def product(self, rows: Region, place: Region, expert: int) -> Compute:
        """The product of rows by the weight of an expert."""
        return Compute(MATMUL, (rows,), place, weight(self.weight, expert))

    def multiply(self, batch: Batch) -> Compute:
        """Make products for a peer."""
        rows = self.of.experts_first(self.rank, self.rows, *batch)
        return self.product(rows, rows._replace(buffer=self.made), batch.expert)

    def multiply_all(self, expert: int) -> Compute:
        """Make the products of an expert for all ranks, this one included."""
        rows = self.of.of_expert(self.rank, self.rows, expert)
        return self.product(rows, rows._replace(buffer=self.made), expert)

    def put(self, peer: int, expert: int, *part: int) -> list[Instruction]:
        """Put products of an expert to the peer that gave their rows."""
        made = self.of.experts_first(self.rank, self.made, peer, expert, *part)
        there = self.of.targets_first(peer, self.back, self.rank, expert, *part)
        return [Copy(made, there), Notify(peer, Signal(self.signal, self.rank))]

    def put_all(self, peers: Iterable[int], experts: Iterable[int]) -> list[Instruction]:
        """Put products of these experts to these peers, one peer after the other."""
        return [i for peer in peers for each in experts for i in self.put(peer, each)]

    def put_when_made(
        self, products: Iterable[tuple[Sequence[Instruction], Sequence[Instruction]]]
    ) -> tuple[list[Instruction], list[Instruction]]:
        """The lane that makes products, and the one that puts each of them when it is made."""
        compute: list[Instruction] = []
        puts: list[Instruction] = []
        made = Signal("made", self.rank)
        for count, (make, put) in enumerate(products, 1):
            compute += [*make, *([Notify(self.rank, made)] if put else [])]
            puts += [Wait(made, count), *put] if put else []
        return compute, puts

    def own(self, expert: int) -> Region:
        """The place of products of own rows in the result."""
        return self.of.targets_first(self.rank, "out", self.rank, expert)

    def keep_own(self) -> list[Instruction]:
        """Copy products of own rows to the result."""
        return [
            Copy(self.of.experts_first(self.rank, self.made, self.rank, each), self.own(each))
            for each in self.experts
        ]

    def keep(self, peers: Iterable[int], transfers: int) -> list[Instruction]:
        """Copy what these peers put back to the result, when each has put `transfers` of each of
        its experts.
        """
        lane: list[Instruction] = []
        for peer in peers:
            if number := self.of.experts[peer]:
                returned = self.of.of_peer(self.rank, self.back, peer)
                lane += wait_all(self.signal, [peer], number * transfers)
                lane.append(Copy(returned, returned._replace(buffer="out")))
        return lane


def _push(part: Return) -> Lanes:
    """Pieces for each peer, then own rows while the last pieces arrive."""
    of, rank = part.of, part.rank
    batches = [
        Batch(peer, expert, piece, piece + 1)
        for peer in after(rank, of.ranks)
        for expert in part.experts
        for piece in range(of.pieces)
    ]
    compute, puts = part.put_when_made(
        ([part.multiply(batch)], part.put(*batch)) for batch in batches
    )
    for expert in part.experts:
        own = of.experts_first(rank, "a", rank, expert)
        compute.append(part.product(own, part.own(expert), expert))
    compute += part.keep(before(rank, of.ranks), of.pieces)
    # a rank to which nothing is put need not signal that it has read it
    end = [] if of.alone(rank) else leave(rank, of.ranks)
    return concurrent([*_begin(part), *compute, *end], [puts])


def _by_expert(part: Return) -> Lanes:
    """The products of one expert after the other, and their puts while the next is at work."""
    peers = after(part.rank, part.of.ranks)
    compute, puts = part.put_when_made(
        ([part.multiply_all(expert)], part.put_all(peers, [expert])) for expert in part.experts
    )
    return concurrent([*_begin(part), *compute, *_end(part)], [puts])


def _sequential(part: Return) -> Lanes:
    """The products, then the puts."""
    products = map(part.multiply_all, part.experts)
    puts = part.put_all(after(part.rank, part.of.ranks), part.experts)
    return {"compute": [*_begin(part), *products, *puts, *_end(part)]}


def _begin(part: Return) -> list[Instruction]:
    """The beginning of a rank, which has products to make unless it has no expert."""
    return enter(part.rank, part.of.ranks) if part.experts else []


def _end(part: Return) -> list[Instruction]:
    """Keep own products, and those that peers put uncut."""
    ranks = part.of.ranks
    returned = part.keep(before(part.rank, ranks), 1)
    return [*part.keep_own(), *returned, *leave(part.rank, ranks)]


def _buffers(workload: Workload) -> dict[str, Rows]:
    product = Rows(workload.n, workload.out_dtype)
    return {
        "a": Rows(workload.k, workload.dtype),
        **dict.fromkeys(("partial", "inbox", "out"), product),
    }


OPERATOR = Operator(
    "matmul_all_to_all",
    ALGORITHMS,
    plan=matmul_all_to_all,
    communicate=lambda request: without_products(matmul_all_to_all(request)),
    buffers=_buffers,
    default_shards=lambda rows, ranks: None if rows % ranks else (rows // ranks,) * ranks,
    result_rows=lambda shards, rank: shards[rank] * len(shards),
    exchanges="out",
    uncut=("by_expert", "sequential"),
    several_weights=True,
    auto_candidates=("push", "sequential"),
    auto_candidates_over_links=("push", "by_expert", "sequential"),
)
