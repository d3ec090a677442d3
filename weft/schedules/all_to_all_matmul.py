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

from collections.abc import Iterator

from weft.kernels.matmul import MATMUL
from weft.plan import Buffer, Compute, Copy, Instruction, Plan, Region, Signal, Term, Wait
from weft.plan.lazy import Deferred
from weft.schedules.exchanges import Blocks, halves, names
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    concurrent,
    enter,
    leave,
    moves_alone,
    wait_all,
)
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("push", "by_expert", "sequential")


def all_to_all_matmul(request: Request) -> Plan:
    """The plan of a request; its products wait only for the rows that they multiply."""
    ranks, algorithm = request.ranks, request.algorithm
    pieces = request.pieces if algorithm == "push" else 1
    of = Blocks.of(request._replace(pieces=pieces))
    weights = names("out", max(of.experts))

    def used(rows: Region, place: Region, expert: int) -> list[Instruction]:
        """Multiply rows, whose product has this place in ``out``."""
        kept = [Copy(rows, place._replace(buffer="gathered"))] if request.gathered else []
        return [Compute(MATMUL, (rows,), place, weights[expert]), *kept]

    def push(rank: int) -> Lanes:
        """Own rows first, then those of each source as they arrive."""
        puts: list[Instruction] = []
        compute: list[Instruction] = []
        for peer in after(rank, ranks):
            for expert in of.of_rank(peer):
                for piece in range(pieces):
                    puts += of.dispatch(rank, peer, expert, piece)
        for expert in of.of_rank(rank):
            own = of.targets_first(rank, "a", rank, expert)
            compute += used(own, of.experts_first(rank, "out", rank, expert), expert)
        for source in before(rank, ranks):
            for expert in of.of_rank(rank):
                for start, stop in halves(pieces):
                    rows = of.experts_first(rank, "inbox", source, expert, start, stop)
                    compute.append(Wait(Signal("in", source), expert * pieces + stop))
                    compute += used(rows, rows._replace(buffer="out"), expert)
        return concurrent([*compute, *end(rank)], moving(rank, puts))

    def moving(rank: int, puts: list[Instruction]) -> list[list[Instruction]]:
        """A lane of puts, if there are any."""
        return [[*enter(rank, ranks), *puts]] if puts else []

    def end(rank: int) -> list[Instruction]:
        """The end of a rank that has used its workspace: one without experts has not."""
        return leave(rank, ranks) if of.experts[rank] else []

    def own_rows(rank: int, expert: int) -> Copy:
        return Copy(
            of.targets_first(rank, "a", rank, expert),
            of.experts_first(rank, "inbox", rank, expert),
        )

    def together(rank: int, expert: int) -> list[Instruction]:
        """The product of all rows for an expert."""
        rows = of.of_expert(rank, "inbox", expert)
        return used(rows, rows._replace(buffer="out"), expert)

    def by_expert(rank: int) -> Lanes:
        """Expert after expert, while rows for the next ones arrive."""
        puts: list[Instruction] = []
        compute = enter(rank, ranks) if of.experts[rank] else []
        for expert in range(max(of.experts)):
            for peer in after(rank, ranks):
                if expert < of.experts[peer]:
                    puts += of.dispatch(rank, peer, expert, 0)
        for expert in of.of_rank(rank):
            compute += [own_rows(rank, expert), *wait_all("in", before(rank, ranks), expert + 1)]
            compute += together(rank, expert)
        return concurrent([*compute, *end(rank)], moving(rank, puts))

    def sequential(rank: int) -> Lanes:
        """All rows, then the products."""
        lane = enter(rank, ranks)
        for peer in after(rank, ranks):
            for expert in of.of_rank(peer):
                lane += of.dispatch(rank, peer, expert, 0)
        lane += [own_rows(rank, expert) for expert in of.of_rank(rank)]
        if of.experts[rank]:
            lane += wait_all("in", before(rank, ranks), of.experts[rank])
        for expert in of.of_rank(rank):
            lane += together(rank, expert)
        return {"compute": [*lane, *end(rank)]}

    every = range(ranks)
    received = [of.taken(rank) for rank in every]
    buffers = {
        "a": Buffer.of("input", map(of.given, every)),
        "inbox": Buffer.of("workspace", received),
    }
    outputs = ("out", "gathered") if request.gathered else ("out",)

    def result() -> Iterator[tuple[Region, tuple[Term, ...]]]:
        for rank in every:
            for expert in of.of_rank(rank):
                for source in every:
                    place = of.experts_first(rank, "out", source, expert)
                    start = of.targets_first(source, "a", rank, expert).start
                    for name in outputs:
                        weight = (rank, weights[expert]) if name == "out" else None
                        term = Term(source, "a", start - place.start, weight)
                        yield place._replace(buffer=name), (term,)

    make = {"push": push, "by_expert": by_expert, "sequential": sequential}[algorithm]
    return Plan(
        "all_to_all_matmul",
        algorithm,
        buffers | {name: Buffer.of("output", received) for name in outputs},
        # all ranks of one host do the same
        by_rank(ranks, make, request if request.hosts is None else None, of.examples),
        Deferred(lambda: dict(result())),
        of.shards,
    )


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
