"""All-gather + matmul: ``out = concatenation of all ranks' a @ B``, each rank with a B of its own.

Own rows are multiplied first, without waiting; peers' rows as they arrive. Arrivals that lie side by side are joined: a product
over many rows is faster than several over few, and only the last rows are waited for in small pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Matmul, Plan, Region, Term
from weft.schedules.all_gather import GATHERINGS, Arrival, Sizes, all_gather, gather_buffers, gathered_result, keep, push
from weft.schedules.common import Hosts, Lanes, enter, everything, in_all, offsets, side_lanes, tidy
from weft.schedules.workload import Operator, Place, Rows, Variant, Workload

ALGORITHMS = ("direct", "pull", "push", "ring", "sequential")


def all_gather_matmul(
    rows: Sequence[int],
    algorithm: str,
    *,
    chunk_rows: int,
    symmetric_a: bool = False,
    gathered: bool = False,
    own_first: bool = True,
    joined: bool = True,
    weights: int = 1,
    order: str = "peer",
    links: int = 1,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """Plan for shards of `rows[rank]` rows, moved in transfers of at most `chunk_rows`.

    `symmetric_a`: the input lies in symmetric memory. `gathered`: the gathered rows are an output too. `own_first` and `joined`
    leave out one improvement each when false: own rows are multiplied last; each transfer gets a product of its own. `weights` is
    the number of weights that rows are multiplied by, each with one of the `outputs`. `order` and `links` are those of a push, and
    of the one in ``sequential``: ``peer`` or ``interleaved``, and how many lanes send beside each other. `planned`: the ranks that
    get their lanes, all unless given. `hosts` are given where there are several.
    """
    starts, outs = offsets(rows), outputs(weights)
    into = "gathered" if gathered and algorithm == "pull" else "inbox"
    sizes = Sizes(rows, chunk_rows, symmetric_a, into, order, links, hosts)

    def lanes_of(r: int) -> Lanes:
        if algorithm == "sequential":
            return _gather_then_multiply(sizes, r, gathered, outs)
        part = GATHERINGS[algorithm](sizes, r)
        own = [*_multiply(Region(r, "a", 0, rows[r]), starts[r], r, outs)]
        own += keep(Region(r, "a", 0, rows[r]), starts[r]) if gathered else []
        peers: list[Instruction] = []
        for wait, region, start in join(part.arrivals) if joined else part.arrivals:
            peers += [wait, *_multiply(region, start, r, outs)]
            peers += keep(region, start, r) if gathered else []
        compute = own + peers if own_first else peers + own
        return {"compute": tidy([*part.first, *compute, *part.last])} | side_lanes(part.transfers)

    lanes = in_all(len(rows), planned, lanes_of)
    result = gathered_result(rows, planned) if gathered else {}
    for r in planned or range(len(rows)):
        for p, start in enumerate(starts):
            for out in outs if rows[p] else ():
                result[Region(r, out, start, start + rows[p])] = (Term(p, "a", -start, weights=(r, out)),)
    buffers = gather_buffers(rows, gathered) | {out: Buffer.of("output", everything(rows)) for out in outs}
    return Plan("all_gather_matmul", algorithm, buffers, lanes, result, tuple(rows), planned=planned)


def _gather_then_multiply(sizes: Sizes, rank: int, gathered: bool, outs: Sequence[str]) -> dict[str, tuple[Instruction, ...]]:
    """All rows first, then one product over all of them; a single link is served by the lane that multiplies."""
    rows, total, start = sizes.rows, sum(sizes.rows), offsets(sizes.rows)[rank]
    part = push(sizes, rank)
    beside = part.transfers if sizes.links > 1 else []
    own, everything = Region(rank, "a", 0, rows[rank]), Region(rank, "inbox", 0, total)
    lane = [*part.first, *([] if beside else chain(*part.transfers))]
    if own.rows == total:  # nothing to gather
        everything = own
    elif own.rows:  # only writes to a workspace wait for it to be free; a rank without rows writes to none
        lane += enter(rank, len(rows)) if beside else []
        lane.append(Copy(own, Region(rank, "inbox", start, start + own.rows)))
    for wait, region, at in join(part.arrivals, all_at_once=True):
        here = Region(rank, "inbox", at, at + region.rows)
        lane += [wait, *([Copy(region, here)] if region != here else [])]
    lane += [*_multiply(everything, 0, rank, outs), *(keep(everything, 0) if gathered else []), *part.last]
    return {"compute": tidy(lane)} | side_lanes(beside)


def outputs(weights: int) -> tuple[str, ...]:
    """The names of the outputs of products with this many weights."""
    return ("out", *(f"out{i}" for i in range(1, weights)))


def _multiply(region: Region, start: int, rank: int, outs: Sequence[str]) -> Iterator[Instruction]:
    for out in outs if region.rows else ():
        yield Matmul(region, Region(rank, out, start, start + region.rows))


def join(arrivals: Sequence[Arrival], all_at_once: bool = False) -> Iterator[Arrival]:
    """Join arrivals that lie side by side and are counted by one signal: half of what is left, then half of the rest, …"""
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


def _plan(workload: Workload, variant: Variant, place: Place, *, gathered: bool = False, weights: int = 1) -> Plan:
    return all_gather_matmul(
        workload.rows,
        variant.algorithm,
        chunk_rows=variant.chunk_rows,
        symmetric_a=workload.symmetric,
        gathered=gathered,
        weights=weights,
        order=variant.order,
        links=place.links,
        planned=place.planned,
        hosts=place.hosts,
    )


def _communicate(workload: Workload, variant: Variant, place: Place) -> Plan:
    """The gather alone, between symmetric tensors; a pull, or a push, where the algorithm has none of its own."""
    algorithm = {"direct": "pull", "sequential": "push"}.get(variant.algorithm, variant.algorithm)
    return all_gather(
        workload.rows,
        algorithm,
        chunk_rows=variant.chunk_rows,
        symmetric_a=True,
        symmetric_gathered=True,
        order=variant.order,
        links=place.links if algorithm == "push" else 1,
        planned=place.planned,
        hosts=place.hosts,
    )


def _buffers(workload: Workload) -> dict[str, Rows]:
    given = Rows(workload.k, workload.dtype)
    return {**dict.fromkeys(("a", "staged", "inbox", "gathered"), given), "out": Rows(workload.n, workload.out_dtype)}


OPERATOR = Operator(
    "all_gather_matmul",
    ALGORITHMS,
    _plan,
    _communicate,
    _buffers,
    shards=lambda rows, ranks: (rows,) * ranks,
    kept=lambda shards, rank: sum(shards),
    whole=("direct", "sequential"),
    still=("direct",),
    unequal=("pull",),  # it joins products of adjacent peers, which for most ranks are not all peers
    tried=("direct", "sequential"),
    tried_over_links=("push", "sequential"),
)
