"""Matmul + reduce-scatter: ``out = block r of the sum over all ranks of their a @ B``, each rank with an a and a B of its own.

Peers' blocks are multiplied first, each for the peer that needs it next, and the own block last, in pieces: while they are made the
peers' sums arrive, and a piece is added up while it still lies in the cache. Every algorithm adds in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Term, Value, Wait
from weft.schedules.common import (
    Hosts,
    after,
    before,
    chunks,
    enter,
    everything,
    in_all,
    in_order,
    leave,
    offsets,
    shards,
    side_lanes,
    tidied,
    without_products,
)
from weft.schedules.host_rings import HostRing, of_products
from weft.schedules.host_sums import HostSums, inbox, scatter, scatter_products
from weft.schedules.workload import Operator, Place, Rows, Variant, Workload, accumulator

ALGORITHMS = ("direct", "push", "put", "ring", "sequential")

Lanes = Mapping[str, Sequence[Instruction]]


class Sizes(NamedTuple):
    """What a planner is given: the rows that each rank keeps, rows per piece, ``sum`` or ``avg``, and how a push goes about it."""

    rows: Sequence[int]
    chunk: int
    op: str
    order: str = "peer"
    links: int = 1


def matmul_reduce_scatter(
    rows: Sequence[int],
    algorithm: str,
    *,
    chunk_rows: int,
    op: str = "sum",
    remote_reads: bool = True,
    order: str = "peer",
    links: int = 1,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """Plan for ranks that multiply ``sum(rows)`` rows and keep `rows[rank]` of them, in pieces of at most `chunk_rows`.

    ``direct``: peers' products are added where they lie. ``push``: they are copied to the rank that keeps them. ``put``: they are
    made in its memory. ``ring``: running sums go from neighbour to neighbour, beginning at rank 0 so that they are taken in rank
    order, and finished sums go on to their owners. ``sequential``: one product, then the sums: products are added where they
    lie, or, without `remote_reads`, put before.

    In the `order` ``peer`` a push makes and sends the products of one peer after the other; ``interleaved`` the first piece of
    every peer, then the second … Peers are dealt out to as many lanes as there are `links`. `planned`: the ranks that get their
    lanes, all unless given. `hosts` are given where there are several: what a host has is then added up before it is put to
    another (push and sequential).
    """
    sizes = Sizes(rows, chunk_rows, op, order, links)
    ranks, total, starts = len(rows), sum(rows), offsets(rows)
    make: Callable[[Sizes, int], Lanes] = {
        "direct": _direct,
        "push": _push,
        "put": _put_products,
        "ring": _ring,
        "sequential": _then_add if remote_reads else _then_push,
    }[algorithm]
    if ranks == 1:
        make = _alone
    elif hosts is not None and algorithm == "push":
        sums = HostSums(rows, chunk_rows, op, hosts)
        make = lambda _, rank: scatter_products(sums._replace(rank=rank), multiply)  # noqa: E731
    elif hosts is not None and algorithm == "sequential":
        sums = HostSums(rows, max(1, *rows), op, hosts, at_once=True)
        make = lambda _, rank: {"compute": scatter(sums._replace(rank=rank), multiply)}  # noqa: E731
    elif hosts is not None and algorithm == "ring":
        sums = HostSums(rows, chunk_rows, op, hosts)
        make = lambda _, rank: of_products(HostRing(sums._replace(rank=rank)), multiply)  # noqa: E731
    lanes = in_all(ranks, planned, lambda r: tidied(make(sizes, r) if total else {"compute": ()}))
    factor = product_buffer(algorithm, ranks)
    buffers = {
        "a": Buffer.of("input", everything(rows)),
        **dict.fromkeys(("partial", "running", "summed", "hosted"), Buffer.of("workspace", everything(rows))),
        "inbox": inbox(rows, hosts if hosts and algorithm != "ring" else range(ranks)),
        "out": Buffer.of("output", shards(rows)),
    }
    result: dict[Region, Value] = {
        Region(r, "out", 0, kept): tuple(Term(p, "a", starts[r], weights=(p, factor)) for p in range(ranks))
        for r, kept in enumerate(rows)
        if kept and lanes[r]
    }
    return Plan("matmul_reduce_scatter", algorithm, buffers, lanes, result, tuple(rows), planned=planned)


def product_buffer(algorithm: str, ranks: int) -> str:
    """The buffer that products of an algorithm are made in, and that names their weight."""
    return "out" if ranks == 1 else "inbox" if algorithm == "put" else "partial"


def _alone(sizes: Sizes, rank: int) -> Lanes:
    """A sum over one rank is its product."""
    own = Region(rank, "a", 0, sum(sizes.rows))
    return {"compute": [Matmul(own, own._replace(buffer="out"))]}


def _direct(sizes: Sizes, rank: int) -> Lanes:
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    lane: list[Instruction] = [*enter(rank, ranks)]
    for peer in after(rank, ranks):
        if rows[peer]:
            lane += [multiply(rank, starts[peer], starts[peer] + rows[peer]), Notify(peer, Signal("ready", rank))]
    for low, high in chunks(rows[rank], sizes.chunk):
        lane += [multiply(rank, starts[rank] + low, starts[rank] + high), *wait_all("ready", rank, ranks)]
        lane.append(_add(sizes, rank, low, high))
    return {"compute": [*lane, *(leave(rank, ranks) if rows[rank] else [])]}


def _push(sizes: Sizes, rank: int) -> Lanes:
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    lane: list[Instruction] = [*enter(rank, ranks)]
    puts: list[list[Instruction]] = [[] for _ in range(sizes.links)]
    peers = {peer: rows[peer] for peer in after(rank, ranks) if rows[peer]}
    places = {peer: number % sizes.links for number, peer in enumerate(peers)}
    for count, (peer, _, (low, high)) in enumerate(in_order(sizes.order, peers, sizes.chunk), 1):
        lane += [multiply(rank, starts[peer] + low, starts[peer] + high), Notify(rank, Signal("made", rank))]
        puts[places[peer]] += [Wait(Signal("made", rank), count), *_put(sizes, rank, peer, low, high)]
    for count, (low, high) in enumerate(chunks(rows[rank], sizes.chunk), 1):
        lane += [multiply(rank, starts[rank] + low, starts[rank] + high), *wait_all("arrived", rank, ranks, count)]
        lane.append(_add(sizes, rank, low, high, put=True))
    return {"compute": [*lane, *(leave(rank, ranks) if rows[rank] else [])], **side_lanes([put for put in puts if put])}


def _put_products(sizes: Sizes, rank: int) -> Lanes:
    return {"compute": [*put_and_add(sizes, rank, "out", 0), *(leave(rank, len(sizes.rows)) if sizes.rows[rank] else [])]}


def put_and_add(sizes: Sizes, rank: int, into: str, start: int) -> list[Instruction]:
    """Make every peer's products in its inbox, and add up this rank's rows, from row `start` of `into` on, in rank order."""
    rows, ranks = sizes.rows, len(sizes.rows)
    lane: list[Instruction] = [*enter(rank, ranks)]
    for peer in after(rank, ranks):
        for low, high in chunks(rows[peer], sizes.chunk):
            lane += [_multiply_into(rows, rank, peer, low, high), Notify(peer, Signal("arrived", rank))]
    for count, (low, high) in enumerate(chunks(rows[rank], sizes.chunk), 1):
        lane += [_multiply_into(rows, rank, rank, low, high), *wait_all("arrived", rank, ranks, count)]
        products = tuple(Region(rank, "inbox", p * rows[rank] + low, p * rows[rank] + high) for p in range(ranks))
        lane.append(Reduce(products, Region(rank, into, start + low, start + high), sizes.op))
    return lane


def _multiply_into(rows: Sequence[int], rank: int, owner: int, low: int, high: int) -> Instruction:
    """This rank's product of the rows ``low:high`` that `owner` keeps, in its inbox, which has a place for each source."""
    start, place = offsets(rows)[owner], rank * rows[owner]
    return Matmul(Region(rank, "a", start + low, start + high), Region(owner, "inbox", place + low, place + high))


def _ring(sizes: Sizes, rank: int) -> Lanes:
    """Products are made in the order of the rows; ``comm`` adds them to what comes from the rank before and hands it on."""
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    last, following, previous = ranks - 1, (rank + 1) % ranks, (rank - 1) % ranks
    compute: list[Instruction] = [*enter(rank, ranks)]
    comm: list[Instruction] = []
    pieces = [
        (owner, starts[owner] + low, starts[owner] + high)
        for owner in range(ranks)
        for low, high in chunks(rows[owner], sizes.chunk)
    ]
    for count, (owner, start, stop) in enumerate(pieces, 1):
        product = Region(rank, "partial", start, stop)
        running, summed = product._replace(buffer="running"), product._replace(buffer="summed")
        compute += [multiply(rank, start, stop), Notify(rank, Signal("made", rank))]
        comm += [Wait(Signal("made", rank), count), *([Wait(Signal("running", previous), count)] if rank else [])]
        if rank < last:
            comm += [Reduce((running, product) if rank else (product,), running)]
            comm += [Copy(running, running._replace(rank=following)), Notify(following, Signal("running", rank))]
        elif owner < last:
            comm += [Reduce((running, product), summed, sizes.op), Copy(summed, summed._replace(rank=following))]
            comm += [Notify(following, Signal("summed", rank))]
        else:
            comm += [Reduce((running, product), Region(rank, "out", start - starts[rank], stop - starts[rank]), sizes.op)]
    if rank < last:  # finished sums go on from rank to rank until they reach their owner
        passing = [piece for piece in pieces if rank <= piece[0] < last]
        for count, (owner, start, stop) in enumerate(passing, 1):
            summed = Region(rank, "summed", start, stop)
            comm.append(Wait(Signal("summed", previous), count))
            if owner != rank:
                comm += [Copy(summed, summed._replace(rank=following)), Notify(following, Signal("summed", rank))]
        if rows[rank]:
            comm.append(Copy(Region(rank, "summed", starts[rank], starts[rank] + rows[rank]), Region(rank, "out", 0, rows[rank])))
    return {"compute": compute, "comm": [*comm, *(leave(rank, ranks) if rows[rank] else [])]}


def _then_add(sizes: Sizes, rank: int) -> Lanes:
    rows, ranks = sizes.rows, len(sizes.rows)
    lane = [*enter(rank, ranks), multiply(rank, 0, sum(rows))]
    lane += [Notify(peer, Signal("ready", rank)) for peer in before(rank, ranks) if rows[peer]]
    if rows[rank]:
        lane += [*wait_all("ready", rank, ranks), _add(sizes, rank, 0, rows[rank]), *leave(rank, ranks)]
    return {"compute": lane}


def _then_push(sizes: Sizes, rank: int) -> Lanes:
    rows, ranks = sizes.rows, len(sizes.rows)
    lane = [*enter(rank, ranks), multiply(rank, 0, sum(rows))]
    peers = [peer for peer in after(rank, ranks) if rows[peer]]
    dealt = [peers[link :: sizes.links] for link in range(sizes.links)]
    puts = [[i for peer in share for i in _put(sizes, rank, peer, 0, rows[peer])] for share in dealt]
    if sizes.links == 1:
        lane, beside = lane + puts[0], []
    else:
        beside = [[Wait(Signal("made", rank), 1), *put] for put in puts if put]
        lane += [Notify(rank, Signal("made", rank))] if beside else []
    if rows[rank]:
        lane += [*wait_all("arrived", rank, ranks), _add(sizes, rank, 0, rows[rank], put=True), *leave(rank, ranks)]
    return {"compute": lane, **side_lanes(beside)}


def multiply(rank: int, start: int, stop: int) -> Instruction:
    """This rank's product of these rows."""
    return Matmul(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


def wait_all(signal: str, rank: int, ranks: int, count: int = 1) -> list[Instruction]:
    """Wait for `count` of a signal from every peer."""
    return [Wait(Signal(signal, peer), count) for peer in after(rank, ranks)]


def _put(sizes: Sizes, rank: int, peer: int, low: int, high: int) -> list[Instruction]:
    """Put the product of the peer's rows ``low:high`` into its inbox, which has a place for each source."""
    start, place = offsets(sizes.rows)[peer], rank * sizes.rows[peer]
    source, target = Region(rank, "partial", start + low, start + high), Region(peer, "inbox", place + low, place + high)
    return [Copy(source, target), Notify(peer, Signal("arrived", rank))]


def _add(sizes: Sizes, rank: int, low: int, high: int, put: bool = False) -> Instruction:
    """Add up this rank's rows ``low:high``, in rank order: where the peers' products lie, or from its inbox if they were put."""
    start, kept = offsets(sizes.rows)[rank], sizes.rows[rank]
    products = tuple(
        Region(rank, "inbox", p * kept + low, p * kept + high)
        if put and p != rank
        else Region(p, "partial", start + low, start + high)
        for p in range(len(sizes.rows))
    )
    return Reduce(products, Region(rank, "out", low, high), sizes.op)


def sum_buffers(workload: Workload) -> dict[str, Rows]:
    """What the buffers of plans hold that sum products: these are kept in the accumulator's dtype where it costs no speed."""
    wide = accumulator(workload.dtype)
    product = Rows(workload.n, "bfloat16" if workload.dtype == workload.out_dtype == "bfloat16" else wide)
    result = Rows(workload.n, workload.out_dtype)
    return {
        "a": Rows(workload.k, workload.dtype),
        **dict.fromkeys(("partial", "hosted", "inbox"), product),
        "running": Rows(workload.n, wide),
        **dict.fromkeys(("summed", "out"), result),
    }


def _plan(workload: Workload, variant: Variant, place: Place, *, op: str = "sum") -> Plan:
    return matmul_reduce_scatter(
        workload.rows,
        variant.algorithm,
        chunk_rows=variant.chunk_rows,
        op=op,
        remote_reads=place.remote_reads,
        order=variant.order,
        links=place.links,
        planned=place.planned,
        hosts=place.hosts,
    )


OPERATOR = Operator(
    "matmul_reduce_scatter",
    ALGORITHMS,
    _plan,
    lambda *asked: without_products(_plan(*asked)),
    sum_buffers,
    shards=lambda rows, ranks: None if rows % ranks else (rows // ranks,) * ranks,
    kept=lambda shards, rank: shards[rank],
    still=("direct", "put"),
    unequal=("ring",),  # its sums begin at rank 0
    unpredicted=("put",),
    tried=("direct", "put", "sequential"),
    tried_over_links=("push", "sequential"),
)
