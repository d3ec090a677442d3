"""Matmul + reduce-scatter: ``out = block r of the sum over all ranks of their a @ B``, each rank
with its own a and B.

Peers' blocks are multiplied first, each for the peer that needs it next, and the own block last, in
pieces: meanwhile the peers' products arrive, and a piece is added up while it is in the cache.
Every algorithm adds in rank order.

Rank 0 of two by a push, in two pieces, time to the right; p is a product for the peer, ``!``
notifies the peer, ``?`` waits for it::

    compute  | p0   | p1          | own product 0 |?| add peer's 0 | own product 1 |?| add 1 |
    comm            | put p0 |!| put p1 |!|

A put has no comm lane: products are made in the peer's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Wait
from weft.schedules.blocks import block, everything, shards, sum_result
from weft.schedules.host_rings import HostRing
from weft.schedules.host_sums import HostSums, inbox
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    concurrent,
    enter,
    leave,
    notify_all,
    over_hosts,
    wait_all,
    without_products,
)
from weft.schedules.peers import Layout, after, before, in_order, layout
from weft.schedules.workload import Operator, Request, Rows, Workload, accumulator

ALGORITHMS = ("direct", "push", "put", "ring", "sequential")


def matmul_reduce_scatter(request: Request) -> Plan:
    """The plan of a request: each rank multiplies all rows, and owns a share of them in `pieces`.

    ``direct``: peers' products are added in place. ``push``: products are copied to their owner.
    ``put``: products are made in their owner's memory. ``ring``: running sums pass from rank to
    rank, beginning at rank 0 so that they are in rank order, and finished sums are forwarded to
    their owners. ``sequential``: one product, then the sums: products are added in place, or,
    without `remote_reads`, put to their owners first.

    In the `order` ``peer`` a push makes and sends the products of one peer after the other;
    ``interleaved`` the first piece of every peer, then the second … Each of several `hosts` adds up
    its products before it puts them to another (push and sequential).
    """
    make = {"direct": _direct, "push": _push, "put": _put_products, "sequential": _sequential}
    return sum_of_products("matmul_reduce_scatter", request, make, everywhere=False)


def sum_of_products(
    operator: str,
    request: Request,
    make: Mapping[str, Callable[[Request, int], Lanes]],
    *,
    everywhere: bool,
) -> Plan:
    """The plan of a matmul + reduce-scatter or, if the sums are kept `everywhere`, all-reduce.
    `make` has the function that makes a rank's lanes for each algorithm but ``ring``, if all ranks
    share a host.
    """
    ranks, pieces, algorithm = request.ranks, request.pieces, request.algorithm
    every = everything(ranks, pieces)
    of = layout(request.hosts or range(ranks))
    owned = every if everywhere else shards(ranks, pieces)

    def lanes(rank: int, hosts: Layout = of) -> Lanes:
        if ranks == 1:  # a sum over one rank is its product
            return {"compute": [matmul(Region(0, "a", 0, pieces), Region(0, "out", 0, pieces))]}
        if algorithm == "ring":
            return HostRing(rank, pieces, hosts, request.op, everywhere).of_products(multiply)
        if request.hosts is None or algorithm not in ("push", "two_shot", "sequential"):
            return make[algorithm](request, rank)
        sums = HostSums(
            rank, pieces, hosts, request.op, everywhere, at_once=algorithm == "sequential"
        )
        return {"compute": sums.of_rows(multiply)} if sums.at_once else sums.of_products(multiply)

    adds_all_rows = everywhere and request.hosts is None and algorithm in ("one_shot", "sequential")
    buffers = {
        "a": Buffer.of("input", every),
        **dict.fromkeys(("partial", "running", "summed", "hosted"), Buffer.of("workspace", every)),
        "inbox": Buffer.of("workspace", [[*every[0]] * ranks] * ranks)
        if adds_all_rows
        else inbox(pieces, of),
        "out": Buffer.of("output", owned),
    }
    if request.hosts is None:  # a ring begins at rank 0
        every_lane = by_rank(ranks, lanes, None if algorithm == "ring" else request)
    else:
        every_lane = over_hosts(of, lanes, request)
    result = sum_result(owned, request.op, product_buffer(algorithm, ranks))
    return Plan(operator, algorithm, buffers, every_lane, result, (pieces,) * ranks)


def product_buffer(algorithm: str, ranks: int) -> str:
    """The buffer in which an algorithm makes its products, and that names their weight."""
    return "out" if ranks == 1 else "inbox" if algorithm == "put" else "partial"


def _direct(request: Request, rank: int) -> Lanes:
    lane, gets = add_where_made(request, rank, Region(rank, "out", 0, request.pieces))
    return concurrent([*lane, *leave(rank, request.ranks)], [gets])


def add_where_made(
    request: Request, rank: int, into: Region
) -> tuple[list[Instruction], list[Instruction]]:
    """Make the products of each peer's rows and notify it, then make and add up the products of
    this rank's own rows, a piece at a time. The second list is the lane that gets peers' products
    if they cannot be read in place.
    """
    ranks, pieces = request.ranks, request.pieces
    own = range(rank * pieces, (rank + 1) * pieces)
    lane = enter(rank, ranks)
    for peer in after(rank, ranks):
        lane += [
            multiply(rank, peer * pieces, (peer + 1) * pieces),
            Notify(peer, Signal("ready", rank)),
        ]
    for number, at in enumerate(own):
        lane.append(multiply(rank, at, at + 1))
        lane += add_arrived(
            request,
            rank,
            range(at, at + 1),
            own,
            block(rank, into.buffer, into.start + number),
            1,
            number + 1,
        )
    return lane, get(request, rank, [range(at, at + 1) for at in own], own, [1] * pieces)


def _push(request: Request, rank: int) -> Lanes:
    ranks = request.ranks
    pieces = request.pieces
    links = request.links
    peers = after(rank, request.ranks)
    lane = enter(rank, ranks)
    puts: list[list[Instruction]] = [[] for _ in range(links)]
    for count, (peer, piece) in enumerate(in_order(request.order, peers, pieces), 1):
        lane += [_product(rank, peer * pieces + piece), Notify(rank, Signal("made", rank))]
        puts[peers.index(peer) % links] += [
            Wait(Signal("made", rank), count),
            *put(request, rank, peer, piece, piece + 1),
        ]
    for piece in range(pieces):
        lane += [_product(rank, rank * pieces + piece), *wait_all("arrived", peers, piece + 1)]
        lane.append(_add(request, rank, piece, put=True))
    return concurrent([*lane, *leave(rank, ranks)], puts)


def _put_products(request: Request, rank: int) -> Lanes:
    return {"compute": [*put_and_add(request, rank, "out", 0), *leave(rank, request.ranks)]}


def put_and_add(request: Request, rank: int, into: str, start: int) -> list[Instruction]:
    """Make every peer's products in its inbox, and add up this rank's rows in rank order: into
    `into`, from block `start` on.
    """
    ranks, pieces = request.ranks, request.pieces

    def product(owner: int, piece: int) -> Instruction:
        """The product of a piece of `owner`, in its inbox, which has a place for each source."""
        return matmul(
            block(rank, "a", owner * pieces + piece), block(owner, "inbox", rank * pieces + piece)
        )

    lane = enter(rank, ranks)
    for peer in after(rank, ranks):
        for piece in range(pieces):
            lane += [product(peer, piece), Notify(peer, Signal("arrived", rank))]
    for piece in range(pieces):
        lane += [product(rank, piece), *wait_all("arrived", after(rank, ranks), piece + 1)]
        products = tuple(block(rank, "inbox", p * pieces + piece) for p in range(ranks))
        lane.append(Reduce(products, block(rank, into, start + piece), request.op))
    return lane


def _sequential(request: Request, rank: int) -> Lanes:
    """One product, then the sums; products are put to their owners first unless peers can read
    them.
    """
    ranks, pieces, remote_reads, links = (
        request.ranks,
        request.pieces,
        request.remote_reads,
        request.links,
    )
    peers = after(rank, ranks)
    lane = [*enter(rank, ranks), multiply(rank, 0, ranks * pieces)]
    puts = [
        [i for peer in peers[link::links] for i in put(request, rank, peer, 0, pieces)]
        for link in range(links)
    ]
    if remote_reads:
        lane = lane + notify_all(rank, "ready", before(rank, ranks))
        puts = []
    elif links == 1:
        lane = lane + puts[0]
        puts = []
    else:
        lane = lane + notify_all(rank, "made", [rank])
        puts = [[Wait(Signal("made", rank), 1), *put] for put in puts if put]
    lane += wait_all("ready" if remote_reads else "arrived", peers)
    lane += [_add(request, rank, piece, put=not remote_reads) for piece in range(pieces)]
    return concurrent(lane + leave(rank, ranks), puts)


def multiply(rank: int, start: int, stop: int) -> Instruction:
    """This rank's product of these blocks."""
    return matmul(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


def _product(rank: int, number: int) -> Instruction:
    return multiply(rank, number, number + 1)


def put(request: Request, rank: int, peer: int, low: int, high: int) -> list[Instruction]:
    """Put the product of the peer's pieces ``low:high`` into its inbox, which has a place for each
    source.
    """
    start, place = peer * request.pieces, rank * request.pieces
    source, target = (
        Region(rank, "partial", start + low, start + high),
        Region(peer, "inbox", place + low, place + high),
    )
    return [Copy(source, target), Notify(peer, Signal("arrived", rank))]


def _add(request: Request, rank: int, piece: int, put: bool = False) -> Instruction:
    """Add up a piece of this rank's."""
    own = range(rank * request.pieces, (rank + 1) * request.pieces)
    return add(request, rank, own[piece : piece + 1], own, block(rank, "out", piece), put)


def add(
    request: Request, rank: int, piece: range, part: range, into: Region, moved: bool
) -> Instruction:
    """Add up a piece of a `part` of the rows in rank order: the peers' products in place, or from
    this rank's inbox if they were moved there.
    """
    products = (
        inbox_place(rank, p, piece, part)
        if moved and p != rank
        else Region(p, "partial", piece.start, piece.stop)
        for p in range(request.ranks)
    )
    return Reduce(tuple(products), into, request.op)


def get(
    request: Request, rank: int, pieces: Sequence[range], part: range, ready: Sequence[int]
) -> list[Instruction]:
    """Get the peers' products of the pieces of a `part` of the rows into the inbox, unless they are
    added in place.

    Piece i is there after ``ready[i]`` signals of each peer.
    """
    lane: list[Instruction] = []
    for count, piece in () if request.remote_reads else zip(ready, pieces, strict=True):
        for peer in after(rank, request.ranks):
            there = Region(peer, "partial", piece.start, piece.stop)
            lane += [
                Wait(Signal("ready", peer), count),
                Copy(there, inbox_place(rank, peer, piece, part)),
            ]
        lane.append(Notify(rank, Signal("gotten", rank)))
    return lane


def add_arrived(
    request: Request, rank: int, piece: range, part: range, into: Region, ready: int, gotten: int
) -> list[Instruction]:
    """Wait until the peers' products of a piece can be added, and add them."""
    reads = request.remote_reads
    peers = after(rank, request.ranks)
    waits = wait_all("ready", peers, ready) if reads else wait_all("gotten", [rank], gotten)
    return [*waits, add(request, rank, piece, part, into, moved=not reads)]


def inbox_place(rank: int, peer: int, piece: range, part: range) -> Region:
    """The region of a rank's inbox for a peer's products of a piece: each peer has a place for the
    `part`.
    """
    shift = peer * len(part) - part.start
    return Region(rank, "inbox", piece.start + shift, piece.stop + shift)


def sum_buffers(workload: Workload) -> dict[str, Rows]:
    """The rows of the buffers of plans that sum products; products have the accumulator's dtype
    unless that is slower.
    """
    wide = accumulator(workload.dtype)
    product = Rows(
        workload.n, "bfloat16" if workload.dtype == workload.out_dtype == "bfloat16" else wide
    )
    result = Rows(workload.n, workload.out_dtype)
    return {
        "a": Rows(workload.k, workload.dtype),
        **dict.fromkeys(("partial", "hosted", "inbox"), product),
        "running": Rows(workload.n, wide),
        **dict.fromkeys(("summed", "out"), result),
    }


OPERATOR = Operator(
    "matmul_reduce_scatter",
    ALGORITHMS,
    matmul_reduce_scatter,
    lambda request: without_products(matmul_reduce_scatter(request)),
    sum_buffers,
    default_shards=lambda rows, ranks: None if rows % ranks else (rows // ranks,) * ranks,
    result_rows=lambda shards, rank: shards[rank],
    moves_nothing=("direct", "put"),
    reads_peers=("direct",),
    writes_products=("put",),
    ordered=("push",),
    exchanges="out",
    auto_candidates=("direct", "put", "sequential"),
    auto_candidates_over_links=("push", "sequential"),
)
