"""Matmul + all-reduce: ``out = the sum over all ranks of their a @ B`` on every rank, each with an
a and a B of its own.

Sums are taken in rank order by every algorithm, so all ranks hold equal bits.

Rank 0 of two, time to the right; ``!`` notifies the peer, ``?`` waits for it::

    one_shot  | product of piece 0 |!| of piece 1 |!|?| add both 0 |?| add both 1 |
    two_shot  | product of the peer's share |!| own piece 0 |?| add | own piece 1 | add |!|
                copy own sums |?| get the peer's sums |
"""

from __future__ import annotations

from weft.plan import Copy, Instruction, Plan, Region
from weft.plan.binding import split
from weft.schedules.blocks import shard
from weft.schedules.lanes import (
    Lanes,
    concurrent,
    enter,
    leave,
    notify_all,
    wait_all,
    without_products,
)
from weft.schedules.matmul_reduce_scatter import (
    add_arrived,
    add_where_made,
    get,
    multiply,
    put_and_add,
    sum_buffers,
    sum_of_products,
)
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request

ALGORITHMS = ("one_shot", "two_shot", "put", "ring", "sequential")


def matmul_all_reduce(request: Request) -> Plan:
    """The plan of a request: each rank multiplies all rows, and owns a share of them in `pieces`.

    ``one_shot``: every rank adds up all rows, a piece of all shares at a time, while peers multiply
    the next piece. ``two_shot``: every rank adds up its share, which it multiplies last, and copies
    its peers' sums. ``put``: the same, with products made in the memory of the rank that adds them
    up. ``sequential``: one product, then the sums. Peers' products are added in place, or, without
    `remote_reads`, copied from the peers first. On several hosts each host puts its products once
    to the rank that adds them up (``two_shot`` and ``sequential``).
    """
    if request.algorithm == "sequential":
        request = request._replace(pieces=1)
    make = {"one_shot": _one_shot, "two_shot": _two_shot, "put": _put, "sequential": _one_shot}
    return sum_of_products("matmul_all_reduce", request, make, everywhere=True)


def _one_shot(request: Request, rank: int) -> Lanes:
    ranks = request.ranks
    every = range(request.ranks * request.pieces)
    pieces = [every[at : at + ranks] for at in every[::ranks]]
    lane = enter(rank, ranks)
    for count, piece in enumerate([*pieces, None]):
        if piece:
            lane += [
                multiply(rank, piece.start, piece.stop),
                *notify_all(rank, "ready", before(rank, ranks)),
            ]
        if count:  # the previous piece, which the peers have meanwhile multiplied too
            made = pieces[count - 1]
            lane += add_arrived(
                request, rank, made, every, Region(rank, "out", made.start, made.stop), count, count
            )
    return concurrent(
        [*lane, *leave(rank, ranks)], [get(request, rank, pieces, every, range(1, len(pieces) + 1))]
    )


def _two_shot(request: Request, rank: int) -> Lanes:
    lane, gets = add_where_made(request, rank, shard(rank, "summed", rank, request.pieces))
    return concurrent([*lane, *_share(request, rank)], [gets])


def _put(request: Request, rank: int) -> Lanes:
    return {
        "compute": [
            *put_and_add(request, rank, "summed", rank * request.pieces),
            *_share(request, rank),
        ]
    }


def _share(request: Request, rank: int) -> list[Instruction]:
    """Publish this rank's sums, and copy the sums of all ranks: the end of a plan in which each
    rank adds up its share.
    """
    ranks, cut = request.ranks, request.pieces
    lane = notify_all(rank, "summed", before(rank, ranks))
    for owner in [rank, *after(rank, ranks)]:
        lane += wait_all("summed", [owner] if owner != rank else [])
        lane.append(Copy(shard(owner, "summed", owner, cut), shard(rank, "out", owner, cut)))
    return lane + leave(rank, ranks)


OPERATOR = Operator(
    "matmul_all_reduce",
    ALGORITHMS,
    matmul_all_reduce,
    lambda request: without_products(matmul_all_reduce(request)),
    sum_buffers,
    default_shards=lambda rows, ranks: tuple(split(rows, ranks)),
    result_rows=lambda shards, rank: sum(shards),
    cuts_all_rows=("one_shot",),
    moves_nothing=("put",),
    reads_peers=("one_shot",),
    writes_products=("put",),
    exchanges="out",
    auto_candidates=("one_shot", "two_shot", "sequential"),
    auto_candidates_over_links=("two_shot", "sequential"),
)
