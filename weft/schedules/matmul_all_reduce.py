"""Matmul + all-reduce: ``out = the sum over all ranks of their a @ B`` on every rank, each with an a and a B of its own.

Sums are taken in rank order by every algorithm, so all ranks hold equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Term, Value, Wait
from weft.schedules.common import (
    Hosts,
    after,
    before,
    chunks,
    enter,
    everything,
    in_all,
    leave,
    offsets,
    split,
    tidied,
    without_products,
)
from weft.schedules.host_rings import HostRing, of_products
from weft.schedules.host_sums import HostSums, inbox, reduce_products
from weft.schedules.matmul_reduce_scatter import Lanes, Sizes, multiply, product_buffer, put_and_add, sum_buffers, wait_all
from weft.schedules.workload import Operator, Place, Variant, Workload

ALGORITHMS = ("one_shot", "two_shot", "put", "ring", "sequential")

Pieces = Sequence[tuple[int, int]]


def matmul_all_reduce(
    rows: Sequence[int],
    algorithm: str,
    *,
    chunk_rows: int,
    op: str = "sum",
    remote_reads: bool = True,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """Plan for ranks that each multiply ``sum(rows)`` rows, in pieces of at most `chunk_rows`.

    ``one_shot``: every rank adds up all rows, each piece while the next one is multiplied elsewhere. ``two_shot``: rank r adds up
    its block of `rows[r]` rows, which it multiplies last, and copies the sums of the others. ``put``: the same, with products made
    in the memory of the rank that adds them up. ``sequential``: one product, then the sums. Other products are added where they
    lie, or, without `remote_reads`, gotten from the peers before. `planned`: the ranks that get their lanes, all unless
    given. `hosts` are given where there are several: products are then put to the rank that adds them up (``two_shot`` and
    ``sequential``), once from each host.
    """
    sizes = Sizes(rows, chunk_rows, op)
    ranks, total = len(rows), sum(rows)
    make: Callable[[Sizes, int, bool], Lanes] = {"two_shot": _two_shot, "put": _put}.get(algorithm, _one_shot)
    if algorithm == "sequential":
        sizes = sizes._replace(chunk=max(1, total))
    if ranks == 1:
        make = _alone
    elif algorithm == "ring":
        sums = HostSums(rows, sizes.chunk, op, hosts or range(ranks))
        make = lambda _, rank, __: of_products(HostRing(sums._replace(rank=rank), everywhere=True), multiply)  # noqa: E731
    elif hosts is not None and algorithm != "one_shot":
        sums = HostSums(rows, sizes.chunk, op, hosts, algorithm == "sequential")
        make = lambda _, rank, __: reduce_products(sums._replace(rank=rank), multiply)  # noqa: E731
    lanes = in_all(ranks, planned, lambda r: tidied(make(sizes, r, remote_reads) if total else {"compute": ()}))
    factor = product_buffer(algorithm, ranks)
    whole = algorithm not in ("two_shot", "put") and hosts is None  # every rank adds up all rows
    buffers = {
        "a": Buffer.of("input", everything(rows)),
        **dict.fromkeys(("partial", "summed", "running", "hosted"), Buffer.of("workspace", everything(rows))),
        "inbox": Buffer.of("workspace", [[*range(total)] * ranks] * ranks) if whole else inbox(rows, hosts or range(ranks)),
        "out": Buffer.of("output", everything(rows)),
    }
    terms = tuple(Term(p, "a", 0, weights=(p, factor)) for p in range(ranks))
    result: dict[Region, Value] = {Region(r, "out", 0, total): terms for r in range(ranks) if total and lanes[r]}
    return Plan("matmul_all_reduce", algorithm, buffers, lanes, result, tuple(rows), planned=planned)


def _alone(sizes: Sizes, rank: int, remote_reads: bool) -> Lanes:
    """A sum over one rank is its product."""
    own = Region(rank, "a", 0, sum(sizes.rows))
    return {"compute": [Matmul(own, own._replace(buffer="out"))]}


def _one_shot(sizes: Sizes, rank: int, remote_reads: bool) -> Lanes:
    ranks, total = len(sizes.rows), sum(sizes.rows)
    pieces = [*chunks(total, sizes.chunk)]
    lane: list[Instruction] = [*enter(rank, ranks)]
    for count, piece in enumerate([*pieces, None]):
        if piece:
            lane += [multiply(rank, *piece), *(Notify(peer, Signal("ready", rank)) for peer in before(rank, ranks))]
        if count:  # the piece before, which the peers have meanwhile multiplied too
            lane += _arrived(rank, ranks, count, count, remote_reads)
            lane.append(_add(sizes, rank, pieces[count - 1], (0, total), "out", remote_reads))
    comm = [] if remote_reads else _get(rank, ranks, pieces, (0, total), [*range(1, len(pieces) + 1)])
    return {"compute": [*lane, *leave(rank, ranks)]} | ({"comm": comm} if comm else {})


def _two_shot(sizes: Sizes, rank: int, remote_reads: bool) -> Lanes:
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    own = starts[rank], starts[rank] + rows[rank]
    pieces = [(own[0] + low, own[0] + high) for low, high in chunks(rows[rank], sizes.chunk)]
    lane: list[Instruction] = [*enter(rank, ranks)]
    for peer in after(rank, ranks):
        if rows[peer]:
            lane += [multiply(rank, starts[peer], starts[peer] + rows[peer]), Notify(peer, Signal("ready", rank))]
    for count, piece in enumerate(pieces, 1):
        lane += [multiply(rank, *piece), *_arrived(rank, ranks, 1, count, remote_reads)]
        lane.append(_add(sizes, rank, piece, own, "summed", remote_reads))
    comm = [] if remote_reads else _get(rank, ranks, pieces, own, [1] * len(pieces))
    return {"compute": [*lane, *_share(rows, rank)]} | ({"comm": comm} if comm else {})


def _put(sizes: Sizes, rank: int, remote_reads: bool) -> Lanes:
    return {"compute": [*put_and_add(sizes, rank, "summed", offsets(sizes.rows)[rank]), *_share(sizes.rows, rank)]}


def _share(rows: Sequence[int], rank: int) -> list[Instruction]:
    """Let peers copy this rank's sums, and copy all: the end of a plan in which each rank adds up a block."""
    ranks, starts = len(rows), offsets(rows)
    lane: list[Instruction] = [Notify(peer, Signal("summed", rank)) for peer in before(rank, ranks) if rows[rank]]
    for owner in [rank, *after(rank, ranks)]:
        if rows[owner]:
            sums = Region(owner, "summed", starts[owner], starts[owner] + rows[owner])
            lane += [] if owner == rank else [Wait(Signal("summed", owner), 1)]
            lane.append(Copy(sums, sums._replace(rank=rank, buffer="out")))
    return [*lane, *leave(rank, ranks)]


def _get(rank: int, ranks: int, pieces: Pieces, block: tuple[int, int], ready: Sequence[int]) -> list[Instruction]:
    """Get the peers' products of the pieces of a block into the inbox, piece i once ``ready[i]`` of their signals have come."""
    lane: list[Instruction] = []
    for count, (start, stop) in zip(ready, pieces, strict=True):
        for peer in after(rank, ranks):
            place = peer * (block[1] - block[0]) - block[0]
            lane.append(Wait(Signal("ready", peer), count))
            lane.append(Copy(Region(peer, "partial", start, stop), Region(rank, "inbox", place + start, place + stop)))
        lane.append(Notify(rank, Signal("gotten", rank)))
    return lane


def _arrived(rank: int, ranks: int, ready: int, gotten: int, remote_reads: bool) -> list[Instruction]:
    """Wait until the peers' products can be added."""
    return wait_all("ready", rank, ranks, ready) if remote_reads else [Wait(Signal("gotten", rank), gotten)]


def _add(sizes: Sizes, rank: int, piece: tuple[int, int], block: tuple[int, int], into: str, remote_reads: bool) -> Instruction:
    """Add up a piece of a block in rank order."""
    start, stop = piece
    place = [p * (block[1] - block[0]) - block[0] for p in range(len(sizes.rows))]
    products = tuple(
        Region(p, "partial", start, stop) if remote_reads or p == rank else Region(rank, "inbox", place[p] + start, place[p] + stop)
        for p in range(len(sizes.rows))
    )
    return Reduce(products, Region(rank, into, start, stop), sizes.op)


def _plan(workload: Workload, variant: Variant, place: Place, *, op: str = "sum") -> Plan:
    return matmul_all_reduce(
        workload.rows,
        variant.algorithm,
        chunk_rows=variant.chunk_rows,
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
    across=("one_shot",),
    still=("put",),
    unequal=("ring",),
    unpredicted=("put",),
    tried=("one_shot", "two_shot", "sequential"),
    tried_over_links=("two_shot", "sequential"),
)
