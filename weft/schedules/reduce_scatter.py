"""Reduce-scatter: rank r gets the sum over all ranks of their rows of block r.

Rank 0 of two by a push, in two pieces of a block, time to the right; ``!`` notifies the peer, ``?``
waits for it::

    compute  | put its rows 0 |!| put its rows 1 |!|?| add own and arrived 0 |?| add 1 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Plan, Reduce, Region
from weft.plan.binding import split
from weft.plan.lazy import PerRank
from weft.schedules.blocks import around, block, everything, shards, sum_result
from weft.schedules.host_rings import HostRing
from weft.schedules.host_sums import HostSums, spaces
from weft.schedules.lanes import Lanes, by_rank, over_hosts, publish, wait_all
from weft.schedules.levels import Levels, send_eagerly
from weft.schedules.peers import Hosts, Layout, after, before, layout, one_rank_per_host
from weft.schedules.staging import SlotArrival, Stream, one_for_each, pipeline
from weft.schedules.workload import Collective, Request

ALGORITHMS = ("direct", "push", "ring")


def put(pieces: int, hosts: Hosts, algorithm: str, op: str = "sum") -> Plan:
    """Reduce-scatter over several hosts, each of which adds up the rows of its ranks.

    ``push``: each host puts its sums to the owners; ``ring``: to the next host, which adds its own
    rows.
    """
    return put_sums("reduce_scatter", pieces, hosts, algorithm, op, everywhere=False)


def put_sums(
    operator: str, pieces: int, hosts: Hosts, algorithm: str, op: str, *, everywhere: bool
) -> Plan:
    """Sums over several hosts: a reduce-scatter or, if sums are kept `everywhere`, an
    all-reduce.
    """
    kind = HostRing if algorithm == "ring" else HostSums
    source = "a" if one_rank_per_host(hosts) else "partial"

    def lanes(rank: int, hosts: Layout) -> Lanes:
        part = kind(rank, pieces, hosts, op, everywhere, at_once=True, source=source)
        return {"compute": part.of_rows(stage)}

    every = over_hosts(layout(hosts), lanes, (pieces, tuple(hosts), op, everywhere))
    workspaces = spaces(pieces, hosts)
    return sum_plan(operator, algorithm, pieces, op, every, workspaces, everywhere=everywhere)


def sum_plan(
    operator: str,
    algorithm: str,
    pieces: int,
    op: str,
    lanes: PerRank[Mapping[str, tuple[Instruction, ...]]],
    workspaces: Mapping[str, Buffer],
    *,
    everywhere: bool,
) -> Plan:
    """A reduce-scatter by `op` or, if sums are kept `everywhere`, an all-reduce through these
    workspaces; ``eager`` synchronizes.
    """
    ranks = len(lanes)
    every = everything(len(lanes), pieces)
    owned = every if everywhere else shards(ranks, pieces)
    buffers = {"a": Buffer.of("input", every), "out": Buffer.of("output", owned), **workspaces}
    synchronizes = algorithm == "eager"
    return Plan(
        operator,
        algorithm,
        buffers,
        lanes,
        sum_result(owned, op),
        (pieces,) * ranks,
        synchronizes=synchronizes,
    )


def stage(rank: int, start: int, stop: int) -> Instruction:
    """Copy this rank's rows to a workspace, where peers can read them."""
    return Copy(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


def reduce_scatter(ranks: int, pieces: int, op: str = "sum", *, symmetric_a: bool = False) -> Plan:
    """The plan of a reduce-scatter of shards cut into `pieces`; each rank reduces its shard in rank
    order.

    If `symmetric_a` peers' rows are read in place; else they are staged, a piece for each peer at a
    time.
    """
    stream = one_for_each(ranks, pieces)

    def lanes(rank: int) -> Lanes:
        if not symmetric_a and ranks > 1:
            return {"compute": _through_slots(rank, op, stream)}
        share = (rank * pieces, (rank + 1) * pieces)
        out = Region(rank, "out", 0, pieces)
        first, last = reduce_published(rank, ranks, pieces, share, out, op, symmetric=True)
        return {"compute": [*first, *last]}

    every = by_rank(ranks, lanes, (ranks, pieces, op, symmetric_a))
    spaces = {"staged": stream.slots}
    return sum_plan("reduce_scatter", "direct", pieces, op, every, spaces, everywhere=False)


def reduce_published(
    rank: int,
    ranks: int,
    pieces: int,
    share: tuple[int, int],
    into: Region,
    op: str,
    *,
    symmetric: bool,
) -> tuple[list[Instruction], list[Instruction]]:
    """Publish own rows, and reduce a share of the rows of all ranks in place, in rank order; the
    second list are the last instructions of the plan.

    Peers read the rows outside this rank's share, or all rows if the share of each rank is all
    rows.
    """
    every = 0, ranks * pieces
    parts = [every] if share == every else around(*share, ranks * pieces)
    own = publish(rank, ranks, parts, symmetric, before(rank, ranks), after(rank, ranks))
    terms = tuple(Region(p, "a" if p == rank else own.buffer, *share) for p in range(ranks))
    return [*own.first, *wait_all("ready", after(rank, ranks)), Reduce(terms, into, op)], own.last


@cache
def eager(levels: Levels, op: str = "sum") -> Plan:
    """Reduce-scatter of a few rows, symmetric or not: every rank sends the rows of its peers'
    shards eagerly and reduces its own shard.
    """
    ranks = len(levels[-1])

    def lanes(r: int) -> Lanes:
        terms = tuple(
            block(p, "a", r) if p == r else block(p, "eager", r - (r > p)) for p in range(ranks)
        )
        sent = send_eagerly([Region(r, "a", *part) for part in around(r, r + 1, ranks)], levels)
        return {"compute": [*sent, Reduce(terms, block(r, "out", 0), op)]}

    eager_blocks = Buffer.of("eager", [[p for p in range(ranks) if p != r] for r in range(ranks)])
    every = by_rank(ranks, lanes, (levels, op))
    spaces = {"eager": eager_blocks}
    return sum_plan("reduce_scatter", "eager", 1, op, every, spaces, everywhere=False)


def _through_slots(rank: int, op: str, stream: Stream) -> list[Instruction]:
    def reduced(step: int) -> list[Instruction]:
        own = block(rank, "a", rank * stream.pieces + step)
        return sum_of(rank, own, stream.arrivals(rank, step), block(rank, "out", step), op)

    return pipeline(rank, [stream], [stream.stage_own(rank), reduced])


def sum_of(
    rank: int, own: Region, arrivals: Sequence[SlotArrival], into: Region, op: str, *copies: Copy
) -> list[Instruction]:
    """Reduce a rank's own rows and the rows that its peers have staged for it, in rank order, copy
    the sum, and acknowledge the arrivals.
    """
    found = {rank: own} | {arrival.peer: arrival.region for arrival in arrivals}
    reduced = Reduce(tuple(found[r] for r in sorted(found)), into, op)
    return [
        *(a.wait for a in arrivals),
        reduced,
        *copies,
        *chain(*(a.acknowledge for a in arrivals)),
    ]


def _planned(request: Request) -> Plan:
    if request.algorithm == "direct":
        return reduce_scatter(request.ranks, request.pieces, symmetric_a=request.symmetric)
    return put(request.pieces, range(request.ranks), request.algorithm)


COLLECTIVE = Collective(
    "reduce_scatter",
    ALGORITHMS,
    _planned,
    eager,
    default_shards=split,
    reduces=True,
    reads_peers=("direct",),
    predicted=("direct",),
)
