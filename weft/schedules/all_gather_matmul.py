"""All-gather + matmul: ``out = concatenation of all ranks' a @ B``, each rank with its own B.

Own rows are multiplied first, without waiting; peers' rows as they arrive. Adjacent arrivals are
joined: a product over many rows is faster than several over few, and only the last rows are waited
for in small pieces.

Rank 0 of two by a push, in two pieces, time to the right; ``!`` notifies the peer, ``?`` waits for
it::

    compute  | own rows @ B        |?| peer's a0 @ B |?| peer's a1 @ B |
    comm     | put a0 |!| put a1 |!|

By pull and ring the comm lane gets, or sends on, what the compute lane multiplies next; a direct
gather has no comm lane, as products read the peer's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from weft.kernels.matmul import matmul
from weft.plan import Copy, Instruction, Plan, Region
from weft.schedules.all_gather import GATHERINGS, Arrival, all_gather, gather_plan, keep, push
from weft.schedules.blocks import shard
from weft.schedules.lanes import Lanes, by_rank, concurrent, enter, over_hosts
from weft.schedules.peers import Layout, layout
from weft.schedules.workload import Operator, Request, Rows, Workload

ALGORITHMS = ("direct", "push", "pull", "ring", "sequential")


def all_gather_matmul(request: Request) -> Plan:
    """The plan of a request; ``sequential`` gathers by a push before it multiplies."""
    ranks, pieces, algorithm, gathered = (
        request.ranks,
        request.pieces,
        request.algorithm,
        request.gathered,
    )
    links = request.links
    outs = outputs(request.weights)
    buffers, result = gather_plan(ranks, pieces, ["gathered", *outs] if gathered else outs)
    into = "gathered" if gathered and algorithm == "pull" else "inbox"

    def used(region: Region, start: int, r: int) -> list[Instruction]:
        """The instructions that use arrived rows, from block `start` of all on."""
        kept = keep(region, start, r) if gathered else []
        return [
            *(matmul(region, Region(r, out, start, start + region.rows)) for out in outs),
            *kept,
        ]

    def gather_then_multiply(r: int, hosts: Layout | None = None) -> Lanes:
        """First gather all rows, then multiply them by one product; the transfers of a single link
        are in the lane that multiplies.
        """
        part = push(request._replace(hosts=hosts), r)
        all_rows = Region(r, "inbox", 0, ranks * pieces)
        own = Region(r, "a", 0, pieces)
        lane = [*part.first, *(enter(r, hosts or ranks) if links > 1 else chain(*part.transfers))]
        lane += [Copy(own, shard(r, "inbox", r, pieces))] if ranks > 1 else []
        for wait, region, at in join(part.arrivals, all_at_once=True):
            there = Region(r, "inbox", at, at + region.rows)
            lane += [wait, *([Copy(region, there)] if region != there else [])]
        lane += [*used(all_rows if ranks > 1 else own, 0, r), *part.last]
        return concurrent(lane, part.transfers if links > 1 else [])

    def multiply_arrivals(r: int, hosts: Layout | None = None) -> Lanes:
        part = GATHERINGS[algorithm](request._replace(hosts=hosts), r, into)
        own = used(Region(r, "a", 0, pieces), r * pieces, r)
        peers: list[Instruction] = []
        for wait, region, start in join(part.arrivals):
            peers += [wait, *used(region, start, r)]
        return concurrent([*part.first, *own, *peers, *part.last], part.transfers)

    make = gather_then_multiply if algorithm == "sequential" else multiply_arrivals
    if request.hosts is None:
        # a pull joins products of adjacent peers: for most ranks not all peers
        lanes = by_rank(ranks, make, None if algorithm == "pull" else request)
    else:
        lanes = over_hosts(layout(request.hosts), make, request)
    return Plan("all_gather_matmul", algorithm, buffers, lanes, result, (pieces,) * ranks)


def outputs(weights: int) -> tuple[str, ...]:
    """The names of the outputs of products with this many weights."""
    return ("out", *(f"out{i}" for i in range(1, weights)))


def join(arrivals: Sequence[Arrival], all_at_once: bool = False) -> Iterator[Arrival]:
    """Join adjacent arrivals that one signal counts: half of them, then half of the rest, …"""
    i = 0
    while i < len(arrivals):
        last = i
        while last + 1 < len(arrivals) and _adjacent(arrivals[last], arrivals[last + 1]):
            last += 1
        j = last if all_at_once else i + (last - i) // 2
        region = arrivals[i].region._replace(stop=arrivals[j].region.stop)
        yield Arrival(arrivals[j].wait, region, arrivals[i].start)
        i = j + 1


def _adjacent(one: Arrival, next_: Arrival) -> bool:
    same_place = one.region[:2] == next_.region[:2] and one.region.stop == next_.region.start
    return same_place and one.wait.signal == next_.wait.signal


def _communicate(request: Request) -> Plan:
    """The gather alone, between symmetric tensors; a pull for ``direct``, a push for
    ``sequential``.
    """
    algorithm = {"direct": "pull", "sequential": "push"}.get(request.algorithm, request.algorithm)
    push = {"order": request.order, "links": request.links} if algorithm == "push" else {}
    more: dict[str, Any] = {"hosts": request.hosts, **push}
    return all_gather(
        request.ranks, request.pieces, algorithm, symmetric_a=True, symmetric_gathered=True, **more
    )


def _buffers(workload: Workload) -> dict[str, Rows]:
    rows = Rows(workload.k, workload.dtype)
    return {
        **dict.fromkeys(("a", "staged", "inbox", "gathered"), rows),
        "out": Rows(workload.n, workload.out_dtype),
    }


OPERATOR = Operator(
    "all_gather_matmul",
    ALGORITHMS,
    all_gather_matmul,
    _communicate,
    _buffers,
    default_shards=lambda rows, ranks: (rows,) * ranks,
    result_rows=lambda shards, rank: sum(shards),
    uncut=("direct", "sequential"),
    moves_nothing=("direct",),
    reads_peers=("direct", "pull"),
    ordered=("push",),
    several_weights=True,
    auto_candidates=("direct", "sequential"),
    auto_candidates_over_links=("push", "sequential"),
)
