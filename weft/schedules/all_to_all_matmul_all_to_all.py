"""All-to-all + matmul + all-to-all: rows visit the weights of other ranks, and their products
return to the places of the rows: the dispatch of tokens to experts, the experts, and the way back.

Rank 0 of two by a push, in two pieces, time to the right; o are own rows that stay, a those for the
peer, p the peer's rows, q their products, ``!`` notifies the peer, ``?`` waits for it::

    compute  | o0 @ B |?| p0 @ B |?| p1 @ B | o1 @ B |?| keep what has returned |
    comm     | put a0 |!| put a1 |!| put q0 |!| put q1 |!|

So both ways are hidden, and nothing is waited for between them: were all own rows multiplied first,
no product could return when the last row has left. ``sequential`` multiplies all rows
for a weight at once, own ones included, between the two exchanges. Each row of the result is
written by one rank, in its own place, so the result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.kernels.matmul import MATMUL
from weft.plan import Buffer, Compute, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
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

ALGORITHMS = ("push", "sequential")


def all_to_all_matmul_all_to_all(request: Request) -> Plan:
    """The plan of a request; a product waits only for its rows, and returns when it is made."""
    ranks, algorithm = request.ranks, request.algorithm
    pieces = request.pieces if algorithm == "push" else 1
    of = Blocks.of(request._replace(pieces=pieces))
    weights = names("out", max(of.experts))
    cuts = halves(pieces)
    early = pieces if ranks == 1 else -(-pieces // 2)

    def put_back(rank: int, source: int, expert: int, *part: int) -> list[Instruction]:
        """Put products to the rank that gave their rows."""
        return [
            Copy(
                of.experts_first(rank, "made", source, expert, *part),
                of.targets_first(source, "back", rank, expert, *part),
            ),
            Notify(source, Signal("back", rank)),
        ]

    def keep(rank: int, transfers: int) -> list[Instruction]:
        """Copy what has returned to the result, when each peer has put `transfers` products of each
        of its experts.
        """
        lane: list[Instruction] = []
        for peer in after(rank, ranks):
            if of.experts[peer]:
                returned = of.of_peer(rank, "back", peer)
                lane += wait_all("back", [peer], of.experts[peer] * transfers)
                lane.append(Copy(returned, returned._replace(buffer="out")))
        return lane

    def own_products(rank: int, start: int, stop: int) -> list[Instruction]:
        """The products of pieces of own rows, which go nowhere."""
        lane: list[Instruction] = []
        for expert in of.of_rank(rank):
            own = of.targets_first(rank, "a", rank, expert, start, stop)
            lane.append(Compute(MATMUL, (own,), own._replace(buffer="out"), weights[expert]))
        return lane

    def push(rank: int) -> Lanes:
        """Half of the own rows while the first rows of others arrive, those as they arrive, and the
        other half while the last products return.
        """
        # no product returns to a rank that has all experts, and all have begun when its own do
        alone = of.alone(rank)
        moves = [] if alone else enter(rank, ranks)
        compute: list[Instruction] = []
        made, count = Signal("made", rank), 0
        for peer in after(rank, ranks):
            for expert in of.of_rank(peer):
                for piece in range(pieces):
                    moves += of.dispatch(rank, peer, expert, piece)
        compute += own_products(rank, 0, early)
        for source in before(rank, ranks):
            for expert in of.of_rank(rank):
                for start, stop in cuts:
                    rows = of.experts_first(rank, "inbox", source, expert, start, stop)
                    product = rows._replace(buffer="made")
                    compute += [
                        Wait(Signal("in", source), expert * pieces + stop),
                        Compute(MATMUL, (rows,), product, weights[expert]),
                        Notify(rank, made),
                    ]
                    count += 1
                    moves += [Wait(made, count), *put_back(rank, source, expert, start, stop)]
        if early < pieces:
            compute += own_products(rank, early, pieces)
        end = [] if alone else leave(rank, ranks)
        return concurrent([*compute, *keep(rank, len(cuts)), *end], [moves if ranks > 1 else []])

    def sequential(rank: int) -> Lanes:
        """All rows, then the products, then the way back."""
        lane = enter(rank, ranks)
        for peer in after(rank, ranks):
            for expert in of.of_rank(peer):
                lane += of.dispatch(rank, peer, expert, 0)
        for expert in of.of_rank(rank):
            own = of.targets_first(rank, "a", rank, expert)
            lane.append(Copy(own, of.experts_first(rank, "inbox", rank, expert)))
        if of.experts[rank]:
            lane += wait_all("in", before(rank, ranks), of.experts[rank])
        for expert in of.of_rank(rank):
            rows = of.of_expert(rank, "inbox", expert)
            lane.append(Compute(MATMUL, (rows,), rows._replace(buffer="made"), weights[expert]))
        for source in before(rank, ranks):
            for expert in of.of_rank(rank):
                lane += put_back(rank, source, expert)
        for expert in of.of_rank(rank):
            place = of.targets_first(rank, "out", rank, expert)
            lane.append(Copy(of.experts_first(rank, "made", rank, expert), place))
        return {"compute": [*lane, *keep(rank, 1), *leave(rank, ranks)]}

    every = range(ranks)
    given, received = ([numbers(rank) for rank in every] for numbers in (of.given, of.taken))

    def result() -> Iterator[tuple[Region, tuple[Term, ...]]]:
        for rank in every:
            for target in every:
                for expert in of.of_rank(target):
                    place = of.targets_first(rank, "out", target, expert)
                    yield place, (Term(rank, "a", 0, (target, weights[expert])),)

    make = {"push": push, "sequential": sequential}[algorithm]
    return Plan(
        "all_to_all_matmul_all_to_all",
        algorithm,
        {
            "a": Buffer.of("input", given),
            **dict.fromkeys(("inbox", "made"), Buffer.of("workspace", received)),
            "back": Buffer.of("workspace", given),
            "out": Buffer.of("output", given),
        },
        # all ranks of one host do the same
        by_rank(ranks, make, request if request.hosts is None else None, of.examples),
        Deferred(lambda: dict(result())),
        of.shards,
    )


def _communicate(request: Request) -> Plan:
    """The rows alone, and other products, which are an input, on the way back."""
    plan = all_to_all_matmul_all_to_all(request)
    products = replace(plan.buffers["made"], role="input")
    return moves_alone(plan, {**plan.buffers, "made": products})


def _buffers(workload: Workload) -> dict[str, Rows]:
    return {
        **dict.fromkeys(("a", "inbox"), Rows(workload.k, workload.dtype)),
        **dict.fromkeys(("made", "back", "out"), Rows(workload.n, workload.out_dtype)),
    }


OPERATOR = Operator(
    "all_to_all_matmul_all_to_all",
    ALGORITHMS,
    plan=all_to_all_matmul_all_to_all,
    communicate=_communicate,
    buffers=_buffers,
    default_shards=lambda rows, ranks: None if rows % ranks else (rows // ranks,) * ranks,
    result_rows=lambda shards, rank: sum(shards),
    uncut=("sequential",),
    several_weights=True,
    auto_candidates=("push", "sequential"),
    auto_candidates_over_links=("push", "sequential"),
)
