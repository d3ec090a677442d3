"""Matmul + all-reduce: ``out = the sum over all ranks of their a @ B`` on every rank, each with an a and a B of its own.

Sums are taken in rank order by every algorithm, so all ranks hold equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Term, Value, Wait
from weft.plan.binding import split
from weft.schedules.common import (
    Hosts,
    after,
    before,
    enter,
    everything,
    in_all,
    leave,
    tidied,
    without_products,
)
from weft.schedules.host_rings import HostRing, of_products
from weft.schedules.host_sums import HostSums, inbox, reduce_products
from weft.schedules.matmul_reduce_scatter import Choices, Lanes, multiply, product_buffer, put_and_add, sum_buffers, wait_all
from weft.schedules.workload import Operator, Place, Request

ALGORITHMS = ("one_shot", "two_shot", "put", "ring", "sequential")


def matmul_all_reduce(
    ranks: int,
    pieces: int,
    algorithm: str,
    *,
    op: str = "sum",
    remote_reads: bool = True,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """Plan for ranks that each multiply all rows, of which each has a share, in so many `pieces`.

    ``one_shot``: every rank adds up all rows, each piece, of all shares, while the next one is multiplied elsewhere. ``two_shot``:
    every rank adds up its share, which it multiplies last, and copies the sums of the others. ``put``: the same, with products made
    in the memory of the rank that adds them up. ``sequential``: one product, then the sums. Other products are added where they
    lie, or, without `remote_reads`, gotten from the peers before. `planned`: the ranks that get their lanes, all unless
    given. `hosts` are given where there are several: products are then put to the rank that adds them up (``two_shot`` and
    ``sequential``), once from each host.
    """
    choices = Choices(ranks, 1 if algorithm == "sequential" else pieces, op)
    make: Callable[[Choices, int, bool], Lanes] = {"two_shot": _two_shot, "put": _put}.get(algorithm, _one_shot)
    sums = HostSums(choices.pieces, op, hosts or range(ranks), at_once=algorithm == "sequential")
    if ranks == 1:
        make = _alone
    elif algorithm == "ring":
        make = lambda _, rank, __: of_products(HostRing(sums._replace(rank=rank), everywhere=True), multiply)  # noqa: E731
    elif hosts is not None and algorithm != "one_shot":
        make = lambda _, rank, __: reduce_products(sums._replace(rank=rank), multiply)  # noqa: E731
    pieces = choices.pieces
    lanes = in_all(ranks, planned, lambda r: tidied(make(choices, r, remote_reads)))
    factor, every = product_buffer(algorithm, ranks), everything(ranks, pieces)
    whole = algorithm not in ("two_shot", "put") and hosts is None  # every rank adds up all rows
    buffers = {
        "a": Buffer.of("input", every),
        **dict.fromkeys(("partial", "summed", "running", "hosted"), Buffer.of("workspace", every)),
        "inbox": Buffer.of("workspace", [[*every[0]] * ranks] * ranks) if whole else inbox(pieces, hosts or range(ranks)),
        "out": Buffer.of("output", every),
    }
    terms = tuple(Term(p, "a", 0, weights=(p, factor)) for p in range(ranks))
    result: dict[Region, Value] = {Region(r, "out", 0, ranks * pieces): terms for r in planned or range(ranks)}
    return Plan("matmul_all_reduce", algorithm, buffers, lanes, result, (pieces,) * ranks, planned=planned)


def _alone(choices: Choices, rank: int, remote_reads: bool) -> Lanes:
    """A sum over one rank is its product."""
    own = Region(rank, "a", 0, choices.pieces)
    return {"compute": [Matmul(own, own._replace(buffer="out"))]}


def _one_shot(choices: Choices, rank: int, remote_reads: bool) -> Lanes:
    ranks, every = choices.ranks, range(choices.ranks * choices.pieces)
    pieces = [every[at : at + ranks] for at in every[::ranks]]
    lane: list[Instruction] = [*enter(rank, ranks)]
    for count, piece in enumerate([*pieces, None]):
        if piece:
            lane += [
                multiply(rank, piece.start, piece.stop),
                *(Notify(peer, Signal("ready", rank)) for peer in before(rank, ranks)),
            ]
        if count:  # the piece before, which the peers have meanwhile multiplied too
            lane += _arrived(rank, ranks, count, count, remote_reads)
            lane.append(_add(choices, rank, pieces[count - 1], every, "out", remote_reads))
    comm = [] if remote_reads else _get(rank, ranks, pieces, every, [*range(1, len(pieces) + 1)])
    return {"compute": [*lane, *leave(rank, ranks)]} | ({"comm": comm} if comm else {})


def _two_shot(choices: Choices, rank: int, remote_reads: bool) -> Lanes:
    ranks, cut = choices.ranks, choices.pieces
    own = range(rank * cut, (rank + 1) * cut)
    pieces = [range(at, at + 1) for at in own]
    lane: list[Instruction] = [*enter(rank, ranks)]
    for peer in after(rank, ranks):
        lane += [multiply(rank, peer * cut, (peer + 1) * cut), Notify(peer, Signal("ready", rank))]
    for count, piece in enumerate(pieces, 1):
        lane += [multiply(rank, piece.start, piece.stop), *_arrived(rank, ranks, 1, count, remote_reads)]
        lane.append(_add(choices, rank, piece, own, "summed", remote_reads))
    comm = [] if remote_reads else _get(rank, ranks, pieces, own, [1] * cut)
    return {"compute": [*lane, *_share(choices, rank)]} | ({"comm": comm} if comm else {})


def _put(choices: Choices, rank: int, remote_reads: bool) -> Lanes:
    return {"compute": [*put_and_add(choices, rank, "summed", rank * choices.pieces), *_share(choices, rank)]}


def _share(choices: Choices, rank: int) -> list[Instruction]:
    """Let peers copy this rank's sums, and copy all: the end of a plan in which each rank adds up its share."""
    ranks, cut = choices.ranks, choices.pieces
    lane: list[Instruction] = [Notify(peer, Signal("summed", rank)) for peer in before(rank, ranks)]
    for owner in [rank, *after(rank, ranks)]:
        sums = Region(owner, "summed", owner * cut, (owner + 1) * cut)
        lane += [] if owner == rank else [Wait(Signal("summed", owner), 1)]
        lane.append(Copy(sums, sums._replace(rank=rank, buffer="out")))
    return [*lane, *leave(rank, ranks)]


def _get(rank: int, ranks: int, pieces: Sequence[range], whole: range, ready: Sequence[int]) -> list[Instruction]:
    """Get the peers' products of the pieces of a `whole` into the inbox, piece i once ``ready[i]`` of their signals have come."""
    lane: list[Instruction] = []
    for count, piece in zip(ready, pieces, strict=True):
        for peer in after(rank, ranks):
            there = Region(peer, "partial", piece.start, piece.stop)
            lane += [Wait(Signal("ready", peer), count), Copy(there, _place(rank, peer, piece, whole))]
        lane.append(Notify(rank, Signal("gotten", rank)))
    return lane


def _place(rank: int, peer: int, piece: range, whole: range) -> Region:
    """Where a rank's inbox has the products of a peer: there is a place for the `whole` from each."""
    shift = peer * len(whole) - whole.start
    return Region(rank, "inbox", piece.start + shift, piece.stop + shift)


def _arrived(rank: int, ranks: int, ready: int, gotten: int, remote_reads: bool) -> list[Instruction]:
    """Wait until the peers' products can be added."""
    return wait_all("ready", rank, ranks, ready) if remote_reads else [Wait(Signal("gotten", rank), gotten)]


def _add(choices: Choices, rank: int, piece: range, whole: range, into: str, remote_reads: bool) -> Instruction:
    """Add up a piece of a `whole` in rank order."""
    products = tuple(
        Region(p, "partial", piece.start, piece.stop) if remote_reads or p == rank else _place(rank, p, piece, whole)
        for p in range(choices.ranks)
    )
    return Reduce(products, Region(rank, into, piece.start, piece.stop), choices.op)


def _plan(request: Request, place: Place, *, op: str = "sum") -> Plan:
    return matmul_all_reduce(
        request.ranks,
        request.pieces,
        request.algorithm,
        op=op,
        remote_reads=place.remote_reads,
        planned=place.planned,
        hosts=place.hosts,
    )


OPERATOR = Operator(
    "matmul_all_reduce",
    ALGORITHMS,
    _plan,
    lambda *asked: without_products(_plan(*asked)),
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
