"""All-to-all + matmul: ``out = the rows for this rank of all ranks' a @ B``, the dispatch of tokens
to experts: each of a rank's weights multiplies the rows for it.

Rank 0 of two by a push, in two pieces, time to the right; ``!`` notifies the peer, ``?`` waits for
it::

    compute  | own rows @ B            |?| peer's a0 @ B |?| peer's a1 @ B |
    comm     | put a0 |!| put a1 |!|

With several experts a push multiplies what a source has sent to one expert after the other.
``by_expert`` puts the rows for everyone's first expert first, and multiplies all rows for an expert
at once, own ones included, so it reads each weight once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from weft.kernels.matmul import MATMUL
from weft.plan import Buffer, Compute, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.exchanges import Batch, Blocks, exchange, halves, weight
from weft.schedules.lanes import Lanes, concurrent, enter, leave, moves_alone, wait_all
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("push", "by_expert", "sequential")


def all_to_all_matmul(request: Request) -> Plan:
    """The plan of a request; its products wait only for the rows that they multiply."""
    of = Blocks.of(request)
    make = {"push": _push, "by_expert": _by_expert, "sequential": _sequential}[request.algorithm]
    outputs = ("out", "gathered") if request.gathered else ("out",)
    received = [of.taken(rank) for rank in range(of.ranks)]
    return exchange(
        "all_to_all_matmul",
        request,
        of,
        lambda rank: make(Dispatch(of, rank), outputs),
        {
            "a": Buffer.of("input", map(of.given, range(of.ranks))),
            "inbox": Buffer.of("workspace", received),
            **{name: Buffer.of("output", received) for name in outputs},
        },
        lambda: _result(of, outputs),
    )


def _result(of: Blocks, outputs: Sequence[str]) -> Iterator[tuple[Region, tuple[Term, ...]]]:
    """Rows of all ranks for each expert, as they are in ``gathered``, and their products."""
    for rank in range(of.ranks):
        for expert in of.of_rank(rank):
            for source in range(of.ranks):
                place = of.experts_first(rank, "out", source, expert)
                start = of.targets_first(source, "a", rank, expert).start
                for name in outputs:
                    by = (rank, weight("out", expert)) if name == "out" else None
                    yield place._replace(buffer=name), (Term(source, "a", start - place.start, by),)


@dataclass(frozen=True)
class Dispatch:
    """One rank's part of the dispatch: rows of ``a`` are put to the ``inbox`` of the rank whose
    expert they are for.
    """

    of: Blocks
    rank: int

    @property
    def experts(self) -> range:
        """The rank's experts."""
        return self.of.of_rank(self.rank)

    def own(self, expert: int, *part: int) -> Region:
        """Pieces of the rank's own rows for one of its experts."""
        return self.of.targets_first(self.rank, "a", self.rank, expert, *part)

    def put(self, peer: int, expert: int, *part: int) -> list[Instruction]:
        """Put pieces of the rows for an expert of a peer there."""
        rows = self.of.targets_first(self.rank, "a", peer, expert, *part)
        there = self.of.experts_first(peer, "inbox", self.rank, expert, *part)
        return [Copy(rows, there), Notify(peer, Signal("in", self.rank))]

    def put_all(self, by_expert: bool = False) -> list[Instruction]:
        """Put all rows for peers: peer after peer, or `by_expert`, everyone's first one first."""
        ranks, pieces = self.of.ranks, range(self.of.pieces)
        targets = [(to, expert) for to in after(self.rank, ranks) for expert in self.of.of_rank(to)]
        if by_expert:
            targets.sort(key=itemgetter(1))
        puts = [i for to in targets for piece in pieces for i in self.put(*to, piece, piece + 1)]
        return [*enter(self.rank, ranks), *puts] if puts else []

    def arrivals(self) -> Iterator[tuple[Wait, Batch]]:
        """The rows of peers in the order in which they arrive, each with the wait for them."""
        for peer in before(self.rank, self.of.ranks):
            for expert in self.experts:
                for start, stop in halves(self.of.pieces):
                    wait = Wait(Signal("in", peer), expert * self.of.pieces + stop)
                    yield wait, Batch(peer, expert, start, stop)

    def collect(self, experts: range) -> list[Instruction]:
        """Have all rows for these experts in the inbox: copy own ones, wait for those of peers."""
        here = (self.of.experts_first(self.rank, "inbox", self.rank, each) for each in experts)
        own = map(Copy, map(self.own, experts), here)
        peers = before(self.rank, self.of.ranks) if experts else []
        return [*own, *wait_all("in", peers, experts.stop)]


def _push(part: Dispatch, outputs: Sequence[str]) -> Lanes:
    """Own rows first, then those of each source as they arrive."""
    of, rank = part.of, part.rank
    compute: list[Instruction] = []
    for expert in part.experts:
        place = of.experts_first(rank, "out", rank, expert)
        compute += _use(part.own(expert), place, expert, outputs)
    for wait, batch in part.arrivals():
        rows = of.experts_first(rank, "inbox", *batch)
        compute += [wait, *_use(rows, rows, batch.expert, outputs)]
    return concurrent([*compute, *_end(part)], [part.put_all()])


def _by_expert(part: Dispatch, outputs: Sequence[str]) -> Lanes:
    """Expert after expert, while rows for the next ones arrive."""
    compute = enter(part.rank, part.of.ranks) if part.experts else []
    for expert in part.experts:
        compute += part.collect(range(expert, expert + 1))
        compute += _use_collected(part, expert, outputs)
    return concurrent([*compute, *_end(part)], [part.put_all(by_expert=True)])


def _sequential(part: Dispatch, outputs: Sequence[str]) -> Lanes:
    """All rows, then the products."""
    lane = [*enter(part.rank, part.of.ranks), *part.put_all(), *part.collect(part.experts)]
    for expert in part.experts:
        lane += _use_collected(part, expert, outputs)
    return {"compute": [*lane, *_end(part)]}


def _use(rows: Region, place: Region, expert: int, outputs: Sequence[str]) -> list[Instruction]:
    """Multiply rows, and keep them if they are an output; both results have the same `place`."""
    product = Compute(MATMUL, (rows,), place._replace(buffer="out"), weight("out", expert))
    kept = [Copy(rows, place._replace(buffer=name)) for name in outputs if name != "out"]
    return [product, *kept]


def _use_collected(part: Dispatch, expert: int, outputs: Sequence[str]) -> list[Instruction]:
    """Use all rows for an expert at once."""
    rows = part.of.of_expert(part.rank, "inbox", expert)
    return _use(rows, rows, expert, outputs)


def _end(part: Dispatch) -> list[Instruction]:
    """The end of a rank that has used its workspace: one without experts has not."""
    return leave(part.rank, part.of.ranks) if part.experts else []


def _communicate(request: Request) -> Plan:
    """The rows alone, which stay where they arrive."""
    plan = all_to_all_matmul(request)
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name != "out"}
    return moves_alone(plan, buffers)


def _buffers(workload: Workload) -> dict[str, Rows]:
    return {
        **dict.fromkeys(("a", "inbox", "gathered"), Rows(workload.k, workload.dtype)),
        "out": Rows(workload.n, workload.out_dtype),
    }


OPERATOR = Operator(
    "all_to_all_matmul",
    ALGORITHMS,
    plan=all_to_all_matmul,
    communicate=_communicate,
    buffers=_buffers,
    default_shards=lambda rows, ranks: None if rows % ranks else (rows // ranks,) * ranks,
    result_rows=lambda shards, rank: shards[rank] * len(shards),
    uncut=("by_expert", "sequential"),
    several_weights=True,
    auto_candidates=("push", "sequential"),
    auto_candidates_over_links=("push", "by_expert", "sequential"),
)
