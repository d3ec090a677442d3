"""Matmul + all-reduce: ``out = the sum over all ranks of their a @ B`` on every rank, each with its
own a and B.

Sums are taken in rank order by every algorithm, so all ranks hold equal bits.

Rank 0 of two, time to the right; ``!`` notifies the peer, ``?`` waits for it::

    one_shot  | product of piece 0 |!| of piece 1 |!|?| add both 0 |?| add both 1 |
    two_shot  | product of the peer's share |!| own piece 0 |?| add | own piece 1 | add |!|
                copy own sums |?| get the peer's sums |

By a push, in two pieces; p is a product for the peer, s a piece of the own sums, and the peer's
sums arrive as they do::

    push      | p0 | own 0 | p1 | own 1 |?| add 0 |?| add 1 |?| copy the peer's sums |
       comm        | put p0 |!| put p1 |!|  put s0 |!| put s1 |!|
"""

from __future__ import annotations

from weft.plan import Copy, Instruction, Notify, Plan, Region, Signal, Wait
from weft.plan.binding import split
from weft.schedules.blocks import block, shard
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
    add,
    add_arrived,
    add_where_made,
    get,
    multiply,
    put,
    put_and_add,
    sum_buffers,
    sum_of_products,
)
from weft.schedules.peers import after, before
from weft.schedules.workload import Operator, Request

ALGORITHMS = ("one_shot", "two_shot", "push", "put", "ring", "sequential")


def matmul_all_reduce(request: Request) -> Plan:
    """The plan of a request: each rank multiplies all rows, and owns a share of them in `pieces`.

    ``one_shot``: every rank adds up all rows, a piece of all shares at a time, while peers multiply
    the next piece. ``two_shot``: every rank adds up its share, which it multiplies last, and copies
    its peers' sums. ``push``: each piece of every share is multiplied, then put to the rank that
    adds it up, and its sums are put to all, while later pieces are multiplied. ``put``: as
    two_shot, with products made in the memory of the rank that adds them up. ``sequential``: one
    product, then the sums. Peers' products are added in place, or, without `remote_reads`, copied
    from the peers first; a push always puts them, and puts sums where the result stays if that is
    symmetric. On several hosts each host puts its products once
    to the rank that adds them up (``two_shot`` and ``sequential``).
    """
    if request.algorithm == "sequential":
        request = request._replace(pieces=1)
    make = {
        "one_shot": _one_shot,
        "two_shot": _two_shot,
        "push": _push,
        "put": _put,
        "sequential": _one_shot,
    }
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


def _push(request: Request, rank: int) -> Lanes:
    ranks, pieces, links = request.ranks, request.pieces, request.links
    peers, own = after(rank, ranks), range(rank * pieces, (rank + 1) * pieces)
    puts: list[list[Instruction]] = [[] for _ in range(links)]
    into = "out" if request.symmetric_out else "summed"

    def add_up(piece: int) -> list[Instruction]:
        """Add up a piece of the own share once the peers' products of it have arrived."""
        place = range(own[piece], own[piece] + 1)
        out = block(rank, "out", own[piece])
        waits = wait_all("arrived", peers, piece + 1)
        summed = add(request, rank, place, own, out, moved=True)
        return [*waits, summed, Notify(rank, Signal("added", rank))]

    def put_sums(piece: int) -> None:
        """Put a piece of the own sums to each peer."""
        for number, peer in enumerate(peers):
            puts[number % links] += [
                Wait(Signal("added", rank), piece + 1),
                Copy(block(rank, "out", own[piece]), block(peer, into, own[piece])),
                Notify(peer, Signal("summed", rank)),
            ]

    lane = enter(rank, ranks)
    for piece in range(pieces):
        for number, peer in enumerate(peers):
            made = piece * len(peers) + number + 1
            place = peer * pieces + piece
            lane += [multiply(rank, place, place + 1), Notify(rank, Signal("made", rank))]
            puts[number % links] += [
                Wait(Signal("made", rank), made),
                *put(request, rank, peer, piece, piece + 1),
            ]
        lane.append(multiply(rank, own[piece], own[piece] + 1))
        if piece:  # its products have arrived, more or less, while this piece was multiplied
            lane += add_up(piece - 1)
            put_sums(piece - 1)
    lane += add_up(pieces - 1)
    put_sums(pieces - 1)
    for peer in peers:
        lane += wait_all("summed", [peer], pieces)
        if into == "summed":
            lane.append(Copy(shard(rank, into, peer, pieces), shard(rank, "out", peer, pieces)))
    # else a peer's sums imply that it has made this call, and that its inbox is free again
    last = leave(rank, ranks) if into == "summed" else []
    return concurrent([*lane, *last], puts)


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
    one_host=("push",),
    exchanges="out",
    auto_candidates=("one_shot", "two_shot", "sequential"),
    auto_candidates_over_links=("push", "two_shot", "sequential"),
)
