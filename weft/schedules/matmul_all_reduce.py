"""Matmul + all-reduce: ``out = the sum over all ranks of their a @ B`` on every rank, each with an a and a B of its own.

Sums are taken in rank order by every algorithm, so all ranks hold equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Wait
from weft.plan.binding import split
from weft.schedules.common import (
    Lanes,
    after,
    before,
    beside,
    enter,
    everything,
    hear,
    in_all,
    leave,
    shard,
    sum_result,
    tell,
    without_products,
)
from weft.schedules.host_rings import HostRing
from weft.schedules.host_sums import HostSums, inbox
from weft.schedules.matmul_reduce_scatter import (
    add,
    alone,
    inbox_place,
    multiply,
    multiply_for_peers,
    product_buffer,
    put_and_add,
    sum_buffers,
)
from weft.schedules.workload import Operator, Request

ALGORITHMS = ("one_shot", "two_shot", "put", "ring", "sequential")


def matmul_all_reduce(request: Request) -> Plan:
    """Plan for ranks that each multiply all rows, of which each has a share, in so many `pieces`.

    ``one_shot``: every rank adds up all rows, each piece, of all shares, while the next one is multiplied elsewhere. ``two_shot``:
    every rank adds up its share, which it multiplies last, and copies the sums of the others. ``put``: the same, with products made
    in the memory of the rank that adds them up. ``sequential``: one product, then the sums. Other products are added where they
    lie, or, without `remote_reads`, gotten from the peers before. On several hosts products are put to the rank that adds them up
    (``two_shot`` and ``sequential``), once from each.
    """
    if request.algorithm == "sequential":
        request = request._replace(pieces=1)
    ranks, pieces, algorithm, hosts, op = request.ranks, request.pieces, request.algorithm, request.hosts, request.op
    make: Callable[[Request, int], Lanes] = {"two_shot": _two_shot, "put": _put}.get(algorithm, _one_shot)

    def lanes(rank: int) -> Lanes:
        if ranks == 1:
            return alone(request, rank)
        if algorithm == "ring":
            return HostRing(rank, pieces, hosts or range(ranks), op, everywhere=True).of_products(multiply)
        if hosts is None or algorithm == "one_shot":
            return make(request, rank)
        return HostSums(rank, pieces, hosts, op, everywhere=True, at_once=algorithm == "sequential").of_products(multiply)

    every = everything(ranks, pieces)
    whole = algorithm not in ("two_shot", "put") and hosts is None  # every rank adds up all rows
    buffers = {
        "a": Buffer.of("input", every),
        **dict.fromkeys(("partial", "summed", "running", "hosted"), Buffer.of("workspace", every)),
        "inbox": Buffer.of("workspace", [[*every[0]] * ranks] * ranks) if whole else inbox(pieces, hosts or range(ranks)),
        "out": Buffer.of("output", every),
    }
    result, every_lane = sum_result(every, request.planned, product_buffer(algorithm, ranks)), in_all(ranks, request.planned, lanes)
    return Plan("matmul_all_reduce", algorithm, buffers, every_lane, result, (pieces,) * ranks, planned=request.planned)


def _one_shot(request: Request, rank: int) -> Lanes:
    ranks, every = request.ranks, range(request.ranks * request.pieces)
    pieces = [every[at : at + ranks] for at in every[::ranks]]
    lane = enter(rank, ranks)
    for count, piece in enumerate([*pieces, None]):
        if piece:
            lane += [multiply(rank, piece.start, piece.stop), *tell(rank, "ready", before(rank, ranks))]
        if count:  # the piece before, which the peers have meanwhile multiplied too
            lane += _add_arrived(request, rank, pieces[count - 1], every, "out", count, count)
    return beside([*lane, *leave(rank, ranks)], [_get(request, rank, pieces, every, range(1, len(pieces) + 1))])


def _two_shot(request: Request, rank: int) -> Lanes:
    ranks, cut = request.ranks, request.pieces
    own = range(rank * cut, (rank + 1) * cut)
    pieces = [range(at, at + 1) for at in own]
    lane = multiply_for_peers(rank, ranks, cut)
    for count, piece in enumerate(pieces, 1):
        lane += [multiply(rank, piece.start, piece.stop), *_add_arrived(request, rank, piece, own, "summed", 1, count)]
    return beside([*lane, *_share(request, rank)], [_get(request, rank, pieces, own, [1] * cut)])


def _put(request: Request, rank: int) -> Lanes:
    return {"compute": [*put_and_add(request, rank, "summed", rank * request.pieces), *_share(request, rank)]}


def _share(request: Request, rank: int) -> list[Instruction]:
    """Let peers copy this rank's sums, and copy all: the end of a plan in which each rank adds up its share."""
    ranks, cut = request.ranks, request.pieces
    lane = tell(rank, "summed", before(rank, ranks))
    for owner in [rank, *after(rank, ranks)]:
        lane += hear("summed", [owner] if owner != rank else [])
        lane.append(Copy(shard(owner, "summed", owner, cut), shard(rank, "out", owner, cut)))
    return lane + leave(rank, ranks)


def _get(request: Request, rank: int, pieces: Sequence[range], whole: range, ready: Sequence[int]) -> list[Instruction]:
    """Get the peers' products of the pieces of a `whole` into the inbox, unless they are added where they lie.

    Piece i can be gotten once ``ready[i]`` of their signals have come.
    """
    lane: list[Instruction] = []
    for count, piece in () if request.remote_reads else zip(ready, pieces, strict=True):
        for peer in after(rank, request.ranks):
            there = Region(peer, "partial", piece.start, piece.stop)
            lane += [Wait(Signal("ready", peer), count), Copy(there, inbox_place(rank, peer, piece, whole))]
        lane.append(Notify(rank, Signal("gotten", rank)))
    return lane


def _add_arrived(request: Request, rank: int, piece: range, whole: range, into: str, ready: int, gotten: int) -> list[Instruction]:
    """Wait until the peers' products of a piece can be added, and add them."""
    reads, peers = request.remote_reads, after(rank, request.ranks)
    waits = hear("ready", peers, ready) if reads else hear("gotten", [rank], gotten)
    return [*waits, add(request, rank, piece, whole, Region(rank, into, piece.start, piece.stop), moved=not reads)]


OPERATOR = Operator(
    "matmul_all_reduce",
    ALGORITHMS,
    matmul_all_reduce,
    lambda request: without_products(matmul_all_reduce(request)),
    sum_buffers,
    shards=lambda rows, ranks: tuple(split(rows, ranks)),
    kept=lambda shards, rank: sum(shards),
    flat=True,
    across=("one_shot",),
    still=("put",),
    unequal=("ring",),
    unpredicted=("put",),
    tried=("one_shot", "two_shot", "sequential"),
    tried_over_links=("two_shot", "sequential"),
)
