"""All-to-all + matmul + all-to-all: rows are dispatched to the weights of other ranks, and their
products return to the places of the rows: dispatch, experts and combine in one plan.

Rank 0 of two by a push, in two pieces, time to the right; o are own rows that stay, a those for the
peer, p the peer's rows, q their products, ``!`` notifies the peer, ``?`` waits for it::

    compute  | o0 @ B |?| p0 @ B |?| p1 @ B | o1 @ B |?| keep what has returned |
    comm     | put a0 |!| put a1 |!| put q0 |!| put q1 |!|

So both transfers are hidden, and nothing is waited for between them: were all own rows multiplied
first, no product could return when the last row has left. ``sequential`` multiplies all rows for a
weight at once, own ones included, between the two exchanges. Each row of the result is written by
one rank, in its own place, so the result has the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.plan import Buffer, Instruction, Plan, Region, Term
from weft.schedules.all_to_all_matmul import Dispatch
from weft.schedules.exchanges import Blocks, exchange, halves, weight
from weft.schedules.lanes import Lanes, concurrent, enter, leave, moves_alone
from weft.schedules.matmul_all_to_all import Return
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("push", "sequential")


def all_to_all_matmul_all_to_all(request: Request) -> Plan:
    """The plan of a request; a product waits only for its rows, and returns when it is made."""
    of = Blocks.of(request)
    make = {"push": _push, "sequential": _sequential}[request.algorithm]
    given, received = ([*map(each, range(of.ranks))] for each in (of.given, of.taken))
    return exchange(
        "all_to_all_matmul_all_to_all",
        request,
        of,
        lambda rank: make(Dispatch(of, rank), _way_back(of, rank)),
        {
            "a": Buffer.of("input", given),
            **dict.fromkeys(("inbox", "made"), Buffer.of("workspace", received)),
            "back": Buffer.of("workspace", given),
            "out": Buffer.of("output", given),
        },
        lambda: _result(of),
    )


def _result(of: Blocks) -> Iterator[tuple[Region, tuple[Term, ...]]]:
    """The products of all rows, in their places."""
    for rank in range(of.ranks):
        for target in range(of.ranks):
            for expert in of.of_rank(target):
                place = of.targets_first(rank, "out", target, expert)
                yield place, (Term(rank, "a", 0, (target, weight("out", expert))),)


def _way_back(of: Blocks, rank: int) -> Return:
    """The return of the products of rows that have arrived."""
    return Return(of, rank, rows="inbox", made="made", back="back", signal="back", weight="out")


def _push(there: Dispatch, back: Return) -> Lanes:
    """Half of the own rows while the first rows of others arrive, those as they arrive, and the
    other half while the last products return.
    """
    of, rank = there.of, there.rank
    early = of.pieces if of.ranks == 1 else -(-of.pieces // 2)
    products, puts = back.put_when_made(
        ([wait, back.multiply(batch)], back.put(*batch)) for wait, batch in there.arrivals()
    )

    def own_products(start: int, stop: int) -> list[Instruction]:
        """The products of pieces of own rows, which go nowhere."""
        lane: list[Instruction] = []
        for expert in there.experts if start < stop else ():
            own = there.own(expert, start, stop)
            lane.append(back.product(own, own._replace(buffer="out"), expert))
        return lane

    compute = [*own_products(0, early), *products, *own_products(early, of.pieces)]
    compute += back.keep(after(rank, of.ranks), len(halves(of.pieces)))
    if of.alone(rank):  # no product returns to it, and all have begun when its own do
        return concurrent(compute, [puts])
    moves = [*enter(rank, of.ranks), *there.put_all(), *puts]
    return concurrent([*compute, *leave(rank, of.ranks)], [moves])


def _sequential(there: Dispatch, back: Return) -> Lanes:
    """All rows, then the products, then their return."""
    rank, ranks = there.rank, there.of.ranks
    lane = [*enter(rank, ranks), *there.put_all(), *there.collect(there.experts)]
    lane += map(back.multiply_all, there.experts)
    lane += back.put_all(before(rank, ranks), there.experts)
    lane += [*back.keep_own(), *back.keep(after(rank, ranks), 1), *leave(rank, ranks)]
    return {"compute": lane}


def _communicate(request: Request) -> Plan:
    """The transfers alone: the rows, and the return of other products, which are an input."""
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
