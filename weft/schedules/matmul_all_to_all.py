"""Matmul + all-to-all: ``out = the rows for this rank of all ranks' a @ B``, the return of tokens
from experts: each of a rank's weights has multiplied rows of its own, whose products go to the
ranks that gave them.

Rank 0 of two by a push, in two pieces, time to the right; p is a piece for the peer, ``!`` notifies
it, ``?`` waits for it::

    compute  | p0 @ B | p1 @ B   | own rows @ B |?| keep what has arrived |
    comm              | put p0 |!| put p1 |!|

``by_expert`` makes the products of an expert for all ranks at once, so it reads each weight once,
and puts them while the next expert multiplies. Each row of the result is written by one rank, in
its own place, so the result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.kernels.matmul import MATMUL
from weft.plan import Buffer, Compute, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.lazy import Deferred
from weft.schedules.exchanges import Blocks, names
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    concurrent,
    enter,
    leave,
    wait_all,
    without_products,
)
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("push", "by_expert", "sequential")


def matmul_all_to_all(request: Request) -> Plan:
    """The plan of a request: products are put to the rank that gave their rows."""
    ranks, algorithm = request.ranks, request.algorithm
    pieces = request.pieces if algorithm == "push" else 1
    of = Blocks.of(request._replace(pieces=pieces))
    weights = names("partial", max(of.experts))
    made = Signal("made", 0)

    def product(rows: Region, into: str, expert: int) -> Compute:
        return Compute(MATMUL, (rows,), rows._replace(buffer=into), weights[expert])

    def own(rank: int, expert: int, source: str) -> tuple[Region, Region]:
        """The rows of an expert for its own rank, and their place in the result."""
        return (
            of.experts_first(rank, source, rank, expert),
            of.targets_first(rank, "out", rank, expert),
        )

    def put(rank: int, peer: int, expert: int, *piece: int) -> list[Instruction]:
        """Put products of an expert to the peer that gave their rows."""
        return [
            Copy(
                of.experts_first(rank, "partial", peer, expert, *piece),
                of.targets_first(peer, "inbox", rank, expert, *piece),
            ),
            Notify(peer, Signal("in", rank)),
        ]

    def arrive(rank: int, transfers: int) -> list[Instruction]:
        """Copy peers' products to the result, when each peer has put `transfers` of each of its
        experts.
        """
        lane: list[Instruction] = []
        for peer in before(rank, ranks):
            if of.experts[peer]:
                arrived = of.of_peer(rank, "inbox", peer)
                lane += wait_all("in", [peer], of.experts[peer] * transfers)
                lane.append(Copy(arrived, arrived._replace(buffer="out")))
        return lane

    def begin(rank: int) -> list[Instruction]:
        """The beginning of a rank, which has products to make unless it has no expert."""
        return enter(rank, ranks) if of.experts[rank] else []

    def push(rank: int) -> Lanes:
        """Pieces for each peer, then own rows while the last pieces arrive."""
        compute = begin(rank)
        puts: list[Instruction] = []
        signal, count = made._replace(source=rank), 0
        for peer in after(rank, ranks):
            for expert in of.of_rank(rank):
                for piece in range(pieces):
                    part = piece, piece + 1
                    rows = of.experts_first(rank, "a", peer, expert, *part)
                    compute += [product(rows, "partial", expert), Notify(rank, signal)]
                    count += 1
                    puts += [Wait(signal, count), *put(rank, peer, expert, *part)]
        for expert in of.of_rank(rank):
            rows, place = own(rank, expert, "a")
            compute.append(Compute(MATMUL, (rows,), place, weights[expert]))
        # a rank to which nothing is put has no need to say that it has read it
        end = [] if of.alone(rank) else leave(rank, ranks)
        return concurrent([*compute, *arrive(rank, pieces), *end], [puts])

    def by_expert(rank: int) -> Lanes:
        """The products of one expert after the other, and their puts while the next is at work."""
        compute = begin(rank)
        puts: list[Instruction] = []
        signal = made._replace(source=rank)
        for expert in of.of_rank(rank):
            compute.append(product(of.of_expert(rank, "a", expert), "partial", expert))
            if ranks > 1:
                compute.append(Notify(rank, signal))
                puts.append(Wait(signal, expert + 1))
            for peer in after(rank, ranks):
                puts += put(rank, peer, expert)
        compute += [Copy(*own(rank, expert, "partial")) for expert in of.of_rank(rank)]
        return concurrent([*compute, *arrive(rank, 1), *leave(rank, ranks)], [puts])

    def sequential(rank: int) -> Lanes:
        """The products, then the puts."""
        lane = begin(rank)
        for expert in of.of_rank(rank):
            lane.append(product(of.of_expert(rank, "a", expert), "partial", expert))
        for peer in after(rank, ranks):
            for expert in of.of_rank(rank):
                lane += put(rank, peer, expert)
        lane += [Copy(*own(rank, expert, "partial")) for expert in of.of_rank(rank)]
        return {"compute": [*lane, *arrive(rank, 1), *leave(rank, ranks)]}

    every = range(ranks)
    given, received = ([numbers(rank) for rank in every] for numbers in (of.made, of.returned))

    def result() -> Iterator[tuple[Region, tuple[Term, ...]]]:
        for rank in every:
            for owner in every:
                for expert in of.of_rank(owner):
                    place = of.targets_first(rank, "out", owner, expert)
                    start = of.experts_first(owner, "a", rank, expert).start
                    weight = owner, weights[expert]
                    yield place, (Term(owner, "a", start - place.start, weight),)

    make = {"push": push, "by_expert": by_expert, "sequential": sequential}[algorithm]
    return Plan(
        "matmul_all_to_all",
        algorithm,
        {
            "a": Buffer.of("input", given),
            "partial": Buffer.of("workspace", given),
            "inbox": Buffer.of("workspace", received),
            "out": Buffer.of("output", received),
        },
        # all ranks of one host do the same
        by_rank(ranks, make, request if request.hosts is None else None, of.examples),
        Deferred(lambda: dict(result())),
        of.shards,
    )


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
