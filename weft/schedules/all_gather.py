"""All-gather: every rank's rows `a` reach every rank, in rank order.

A `Gathering` is one rank's part of it, divided so that other operators can put work between its
pieces: the first instructions, the transfers, and the arrivals in their order. The plain all-gather
runs them one after the other.

Rank 0 of two, in two pieces, time to the right; ``!`` notifies the peer, ``?`` waits for it::

    push     | put a0 |!| put a1 |!| keep own |?| keep the peer's a0 |?| keep its a1 |
    pull     | stage a0 |!| keep own a0 | stage a1 |!| keep own a1 |?| get a0 |?| get a1 |

Between these pieces the fused operator puts its products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from weft.plan import (
    Buffer,
    Copy,
    Instruction,
    Notify,
    Plan,
    Region,
    Signal,
    Term,
    Value,
    Wait,
)
from weft.plan.launch import Launch
from weft.plan.lazy import Deferred
from weft.schedules.blocks import block, everything, shard, shards
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    concurrent,
    enter_at,
    notify_all,
    open_to,
    over_hosts,
    publish,
    wait_all,
)
from weft.schedules.levels import Levels, send_eagerly
from weft.schedules.peers import (
    Hosts,
    Layout,
    after,
    before,
    in_order,
    layout,
    local_peers,
    members,
    one_rank_per_host,
    rail_peer,
)
from weft.schedules.staging import Part, Stream, pipeline
from weft.schedules.workload import Collective, Request

ALGORITHMS = ("pull", "push", "ring", "kernel")


class Arrival(NamedTuple):
    """Rows of the gathered matrix, from block `start` on, which are in `region` after `wait`."""

    wait: Wait
    region: Region
    start: int


@dataclass
class Gathering:
    """One rank's part of an all-gather: `first`, then `transfers` concurrent with the use of
    `arrivals` in their order, then `last`.

    Each list of transfers is one lane. Transfers write `into` the workspace ``inbox``, or directly
    into the caller's ``gathered``, which must be symmetric if peers of this host write to it (push
    and ring).
    """

    first: list[Instruction]
    transfers: list[list[Instruction]]
    arrivals: list[Arrival]
    last: list[Instruction]


def direct(request: Request, rank: int, into: str = "") -> Gathering:
    """No rows are moved: peers' rows are used in place."""
    return _published(
        request, rank, request.symmetric, before(rank, request.ranks), after(rank, request.ranks)
    )


def _published(
    request: Request, rank: int, symmetric: bool, readers: Sequence[int], peers: Sequence[int]
) -> Gathering:
    """A gathering in which `readers` use this rank's rows in place, and this rank the rows of
    `peers`.
    """
    pieces = request.pieces
    ranks = layout(request.hosts or range(request.ranks))
    own = publish(rank, ranks, [(0, pieces)], symmetric, readers, peers)
    arrivals = [
        Arrival(Wait(Signal("ready", peer), 1), Region(peer, own.buffer, 0, pieces), peer * pieces)
        for peer in peers
    ]
    return Gathering(own.first, [], arrivals, own.last)


def pull(request: Request, rank: int, into: str) -> Gathering:
    """Each rank gets its peers' rows, piece by piece."""
    published = direct(request, rank)
    transfers: list[Instruction] = []
    arrivals: list[Arrival] = []
    pulled = Signal("pulled", rank)
    for ready, (peer, buffer, _, _), start in published.arrivals:
        transfers.append(ready)
        for piece in range(request.pieces):
            here = block(rank, into, start + piece)
            transfers += [Copy(block(peer, buffer, piece), here), Notify(rank, pulled)]
            arrivals.append(Arrival(Wait(pulled, len(arrivals) + 1), here, here.start))
    if request.symmetric and into == "inbox" and arrivals:
        # Staging would wait for the workspaces of all ranks and release them. Of a symmetric input
        # the first "ready", and each "read", imply that for one peer only.
        first = published.arrivals[0].region.rank
        transfers = (
            wait_all("free", (peer for peer in after(rank, request.ranks) if peer != first), 0)
            + transfers
        )
    return Gathering(published.first, [transfers], arrivals, published.last)


def push(request: Request, rank: int, into: str = "inbox") -> Gathering:
    """Each rank puts its rows to all peers (full mesh), first to the one that uses them first.

    In the `order` ``peer`` a rank sends and uses rows peer after peer; ``interleaved`` the first
    piece of every peer, then the second …, which suits links that deliver concurrently. Each of the
    `links` has a lane that serves its share of the peers. If hosts have several ranks, a rank puts
    its rows to one rank of each other host, where all ranks of that host read them; ranks of its
    own host read its staged rows.
    """
    pieces = request.pieces
    order = request.order
    hosts = layout(request.hosts or range(request.ranks))
    if request.links > 1:
        hosts = hosts.toward(None)  # links take turns over all hosts
    local = local_peers(rank, hosts)
    part = _published(request, rank, False, local, local)
    sources = [peer for peer in after(rank, hosts) if hosts[peer] != hosts[rank]]
    first, last = open_to(sources, into, rank, hosts)
    remote = dict.fromkeys(hosts[peer] for peer in sources[::-1])
    notified = {rail_peer(rank, host, hosts): members(host, hosts) for host in remote}
    targets = [*notified]
    transfers = []
    for link in range(min(request.links, len(targets))):
        served = targets[link :: request.links]
        lane = enter_at(served, into, rank, hosts)
        for peer, piece in in_order(order, served, pieces):
            lane.append(Copy(block(rank, "a", piece), block(peer, into, rank * pieces + piece)))
            lane += notify_all(rank, "arrived", notified[peer])
        transfers.append(lane)
    for peer, piece in in_order(order, sources, pieces):
        there = block(rail_peer(peer, hosts[rank], hosts), into, peer * pieces + piece)
        part.arrivals.append(Arrival(Wait(Signal("arrived", peer), piece + 1), there, there.start))
    return Gathering(first + part.first, transfers, part.arrivals, last)


def ring(request: Request, rank: int, into: str) -> Gathering:
    """Each rank puts its rows, and the rows that it receives, to the next rank, so that only
    adjacent ranks communicate.

    If hosts have several ranks, hosts are adjacent instead of ranks: every rank puts all rows that
    it has to one rank of the next host, the rows of the nearest hosts first, and all ranks of a
    host read the rows that one of them has received.
    """
    pieces = request.pieces
    hosts = layout(request.hosts or range(request.ranks))
    count = len(hosts.members)
    local = local_peers(rank, hosts)
    arrived = Counter[int]()
    to, previous = (rail_peer(rank, (hosts[rank] + step) % count, hosts) for step in (1, -1))
    sent = notify_all(rank, "arrived", members(hosts[to], hosts))
    part = _published(request, rank, False, local, local)
    first, last = open_to([previous] if count > 1 else [], into, rank, hosts)
    transfers = enter_at([to] if count > 1 else [], into, rank, hosts)
    for distance, origin, sender, holder in _journeys(hosts)[hosts[rank]]:
        if not (hosts.sees(to) or hosts.sees(previous)):
            break  # only adjacent hosts exchange rows
        for piece in range(pieces):
            here = block(holder, into, origin * pieces + piece)
            if distance:
                arrived[sender] += 1
                part.arrivals.append(
                    Arrival(Wait(Signal("arrived", sender), arrived[sender]), here, here.start)
                )
            if holder == rank and distance + 1 < count:
                transfers += [part.arrivals[-1].wait] if origin != rank else []
                transfers += [
                    Copy(
                        block(rank, "a", piece) if origin == rank else here, here._replace(rank=to)
                    ),
                    *sent,
                ]
    return Gathering(first + part.first, [transfers], part.arrivals, last)


@cache
def _journeys(hosts: Layout) -> list[list[tuple[int, int, int, int]]]:
    """For each host of a ring all ranks, nearest hosts first, each with the ranks that hold its
    rows in transit: ``(distance in hosts, rank, its holder on the previous host, here)``.
    """
    count = len(hosts.members)
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
    held = {origin: (origin, origin) for origin in range(len(hosts))}
    for distance in range(count):
        for origin, (sender, holder) in held.items():
            found[hosts[holder]].append((distance, origin, sender, holder))
            held[origin] = holder, rail_peer(holder, (hosts[holder] + 1) % count, hosts)
    return found


GATHERINGS: dict[str, Callable[[Request, int, str], Gathering]] = {
    "direct": direct,
    "pull": pull,
    "push": push,
    "ring": ring,
}


def all_gather(
    ranks: int,
    pieces: int,
    algorithm: str = "pull",
    *,
    symmetric_a: bool = False,
    symmetric_gathered: bool = False,
    order: str = "peer",
    links: int = 1,
    hosts: Hosts | None = None,
    launch: Launch | None = None,
) -> Plan:
    """``gathered`` = the rows `a` of all ranks in rank order, each in `pieces`; `algorithm` is one
    of `ALGORITHMS`.

    In a pull each rank copies its peers' rows to `gathered`, directly from `a` if it is symmetric;
    else ranks stage a piece at a time. In push and ring a peer writes: to `gathered` if it is
    symmetric or every rank has its own host, and else to a workspace. `hosts` are those of a
    `Request`. On one host a push into a symmetric `gathered` only reads `a`, so `a` may be this
    rank's own part of `gathered`.

    A ``kernel`` is a push, uncut, that the GPU's SMs make by the `launch` given: to `gathered`, or
    to a workspace, from which each rank copies all rows.
    """
    kernel = algorithm == "kernel"
    pieces = 1 if kernel else pieces
    # whether several ranks of a host read the rows that arrive
    shared = hosts is not None and not one_rank_per_host(hosts)
    directly = (symmetric_gathered and not shared) or one_rank_per_host(hosts)
    into = "gathered" if directly else "inbox"
    request = Request(ranks, pieces, algorithm, symmetric_a, order, hosts, links=links)
    through_slots = algorithm == "pull" and not symmetric_a and ranks > 1
    sent = [[Part(before(r, ranks), 0)] for r in range(ranks if through_slots else 0)]
    stream = Stream("staged", sent, pieces)
    pushed_at_once = algorithm == "push" and symmetric_gathered and links == 1 and hosts is None
    gather = {"pull": direct, "push": push, "ring": ring, "kernel": push}[algorithm]

    def lanes(r: int, hosts: Layout | None = None) -> Lanes:
        if through_slots:
            return {"compute": _through_slots(stream, r)}
        if pushed_at_once or kernel:
            return {"compute": _fan_out(request, r, into)}
        part = gather(request._replace(hosts=hosts), r, into)
        own = keep(Region(r, "a", 0, pieces), r * pieces, r)
        lane = [*part.first, *([] if links > 1 else chain(*part.transfers))]
        staged = [at for at, instruction in enumerate(part.first) if isinstance(instruction, Copy)]
        at = (
            staged[-1] + 1 if staged else len(lane)
        )  # own rows are copied in one pass with their staging
        lane[at:at] = own
        for wait, region, start in part.arrivals:
            lane += [wait, *keep(region, start, r)]
        return concurrent([*lane, *part.last], part.transfers if links > 1 else [])

    buffers, result = gather_plan(ranks, pieces, ["gathered"])
    if through_slots:
        buffers["staged"] = stream.slots
    return Plan(
        "all_gather",
        algorithm,
        buffers,
        by_rank(ranks, lanes, (request, into))
        if hosts is None
        else over_hosts(layout(hosts), lanes, (request, into)),
        result,
        (pieces,) * ranks,
        launch=(launch or Launch()) if kernel else None,
    )


@cache
def eager(levels: Levels) -> Plan:
    """All-gather of a few rows, symmetric or not: every rank sends its rows eagerly and reads its
    peers' rows.
    """
    ranks = len(levels[-1])

    def lanes(r: int) -> Lanes:
        own = block(r, "a", 0)
        sent = send_eagerly([own], levels)
        fetched = chain(*(keep(block(peer, "eager", 0), peer, r) for peer in after(r, ranks)))
        # own rows are copied in one pass
        return {"compute": [*sent[:1], *keep(own, r, r), *sent[1:], *fetched]}

    buffers, result = gather_plan(ranks, 1, ["gathered"])
    buffers["eager"] = Buffer.of("eager", shards(ranks, 1))
    every = by_rank(ranks, lanes, levels)
    return Plan("all_gather", "eager", buffers, every, result, (1,) * ranks, synchronizes=True)


def _through_slots(stream: Stream, rank: int) -> list[Instruction]:
    """Stage own rows, copy them to `gathered` as well, for which peers need not wait, and fetch
    the rows that peers stage.
    """
    starts = [r * stream.pieces for r in range(stream.ranks)]

    def stage(step: int) -> list[Instruction]:
        kept = (
            keep(block(rank, "a", step), starts[rank] + step, rank) if step < stream.pieces else []
        )
        return [*stream.stage_own(rank)(step), *kept]

    return pipeline(rank, [stream], [stage, stream.fetch(rank, "gathered", starts)])


def _fan_out(request: Request, rank: int, into: str) -> list[Instruction]:
    """Put each piece to its place on all ranks, this one included, before the next: an engine then
    reads it from memory once.
    """
    ranks, pieces = request.ranks, request.pieces
    sources, targets = after(rank, ranks), before(rank, ranks)
    first, last = open_to(sources, into, rank, ranks)
    lane = first + enter_at(targets, into, rank, ranks)
    for piece in range(pieces):
        lane += [
            Copy(block(rank, "a", piece), block(r, into, rank * pieces + piece))
            for r in [rank, *targets]
        ]
        lane += notify_all(rank, "arrived", targets)
    lane += wait_all("arrived", sources, pieces)
    return lane + keep(Region(rank, into, 0, ranks * pieces), 0, rank) + last


def keep(region: Region, start: int, rank: int) -> list[Instruction]:
    """Copy an arrival to its place in `gathered` on `rank`, unless it arrived there."""
    return (
        [Copy(region, Region(rank, "gathered", start, start + region.rows))]
        if region.buffer != "gathered"
        else []
    )


def gather_plan(
    ranks: int, pieces: int, outputs: Sequence[str]
) -> tuple[dict[str, Buffer], Mapping[Region, Value]]:
    """The buffers of a gathering with these `outputs`, and the result.

    ``gathered`` has the gathered rows, all other outputs their products.
    """
    every, own = everything(ranks, pieces), shards(ranks, pieces)
    buffers = {
        "a": Buffer.of("input", own),
        "staged": Buffer.of("workspace", own),
        "inbox": Buffer.of("workspace", every),
    }

    def result() -> dict[Region, Value]:
        return {
            shard(r, name, p, pieces): (
                Term(p, "a", -p * pieces, None if name == "gathered" else (r, name)),
            )
            for name in outputs
            for r in range(ranks)
            for p in range(ranks)
        }

    return buffers | {name: Buffer.of("output", every) for name in outputs}, Deferred(result)


COLLECTIVE = Collective(
    "all_gather",
    ALGORITHMS,
    lambda request: all_gather(
        request.ranks,
        request.pieces,
        request.algorithm,
        symmetric_a=request.symmetric,
        symmetric_gathered=request.symmetric,
        links=request.links,
    ),
    eager,
    default_shards=lambda rows, ranks: [rows] * ranks,
    reads_peers=("pull",),
    launched=("kernel",),
    predicted=("pull",),
    predicted_over_links=("push",),
)
