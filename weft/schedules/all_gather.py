"""All-gather: every rank's rows `a` reach every rank, in rank order.

A `Gathering` is one rank's part of it, taken apart so that other operators can put work between its pieces: what to do first,
the transfers, and the order in which rows arrive. The plain all-gather runs the parts one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Value, Wait
from weft.schedules.common import (
    Hosts,
    Lanes,
    after,
    apart,
    before,
    chunks,
    enter,
    everything,
    in_all,
    in_order,
    leave,
    members,
    neighbours,
    offsets,
    others,
    publish,
    rail_peer,
    room,
    shards,
    side_lanes,
    tidy,
)
from weft.schedules.levels import Levels, hand_out
from weft.schedules.staging import Part, Stream, copies, pipeline

ALGORITHMS = ("pull", "push", "ring")


class Sizes(NamedTuple):
    """What a planner is given: rows of every rank, rows per transfer, where rows may lie, and how a push goes about it.

    Peers read `a` in place if it is symmetric; otherwise it is staged. Rows that are moved go `into` the workspace ``inbox`` or
    straight into the caller's ``gathered``, which must be symmetric where peers of this host write to it (push and ring). `order`
    and `links` are those of a push (`push`). `hosts` are given where there are several.
    """

    rows: Sequence[int]
    chunk: int
    symmetric_a: bool = False
    into: str = "inbox"
    order: str = "peer"
    links: int = 1
    hosts: Hosts | None = None


class Arrival(NamedTuple):
    """Rows of the gathered matrix, from row `start` on, lie in `region` once `wait` is over."""

    wait: Wait
    region: Region
    start: int


@dataclass
class Gathering:
    """One rank's part of an all-gather: `first`, then `transfers` beside the use of `arrivals` in their order, then `last`.

    Each list of transfers is one lane's.
    """

    first: list[Instruction]
    transfers: list[list[Instruction]]
    arrivals: list[Arrival]
    last: list[Instruction]


def direct(sizes: Sizes, rank: int) -> Gathering:
    """Nothing is moved: peers' rows are used where they lie."""
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    readers, sources = before(rank, ranks) if rows[rank] else [], [peer for peer in after(rank, ranks) if rows[peer]]
    own = publish(rank, ranks, [(0, rows[rank])], sizes.symmetric_a, readers, sources)
    arrivals = [Arrival(Wait(Signal("ready", peer), 1), Region(peer, own.buffer, 0, rows[peer]), starts[peer]) for peer in sources]
    return Gathering(own.first, [], arrivals, own.last)


def pull(sizes: Sizes, rank: int) -> Gathering:
    """Each rank gets its peers' rows, chunk by chunk."""
    published = direct(sizes, rank)
    transfers: list[Instruction] = []
    arrivals: list[Arrival] = []
    pulled = Signal("pulled", rank)
    for ready, source, start in published.arrivals:
        transfers.append(ready)
        for low, high in chunks(source.rows, sizes.chunk):
            here = Region(rank, sizes.into, start + low, start + high)
            transfers += [Copy(source._replace(start=low, stop=high), here), Notify(rank, pulled)]
            arrivals.append(Arrival(Wait(pulled, len(arrivals) + 1), here, here.start))
    last = published.last
    if sizes.symmetric_a and sizes.into == "inbox" and arrivals:
        # Staging would have waited for the workspaces of all and handed them back; here the first "ready" and each "read" say so
        # for one peer each.
        first, sources = published.arrivals[0].region.rank, {arrival.region.rank for arrival in published.arrivals}
        transfers = [free for free in enter(rank, len(sizes.rows)) if free.signal.source != first] + transfers
        last = [free for free in leave(rank, len(sizes.rows)) if free.rank not in sources] + last
    return Gathering(published.first, [transfers] if transfers else [], arrivals, last)


def push(sizes: Sizes, rank: int) -> Gathering:
    """Each rank puts its rows to all peers (full mesh), first to the one that uses them first.

    In the `order` ``peer`` a rank sends and uses rows peer after peer; ``interleaved`` the first chunk of every peer, then the
    second …, which suits links that deliver beside each other. Peers are dealt out to as many lanes as there are `links`. Where
    hosts have several ranks it puts them to one rank of each other host, and peers of a host read each other's in place.
    """
    if sizes.hosts is not None and not apart(sizes.hosts):
        return _push_to_hosts(sizes, sizes.hosts, rank)
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    sources = [peer for peer in after(rank, ranks) if rows[peer]]
    targets = before(rank, ranks) if rows[rank] else []
    first, last = _open(sizes, rank, sources)
    transfers = []
    for link in range(min(sizes.links, len(targets))):
        dealt = targets[link :: sizes.links]
        lane = _enter(sizes, rank, dealt)
        for peer, _, (low, high) in in_order(sizes.order, dict.fromkeys(dealt, rows[rank]), sizes.chunk):
            there = Region(peer, sizes.into, starts[rank] + low, starts[rank] + high)
            lane += [Copy(Region(rank, "a", low, high), there), Notify(peer, Signal("arrived", rank))]
        transfers.append(lane)
    arrivals = []
    for peer, count, (low, high) in in_order(sizes.order, {peer: rows[peer] for peer in sources}, sizes.chunk):
        here = Region(rank, sizes.into, starts[peer] + low, starts[peer] + high)
        arrivals.append(Arrival(Wait(Signal("arrived", peer), count), here, here.start))
    return Gathering(first, transfers, arrivals, last)


def _push_to_hosts(sizes: Sizes, hosts: Hosts, rank: int) -> Gathering:
    """Rows cross to each host once and are read by all its ranks where they arrive; those of neighbours where they are staged."""
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    far = [peer for peer in after(rank, ranks) if hosts[peer] != hosts[rank] and rows[peer]]
    own, transfers = Region(rank, "a", 0, rows[rank]), list[Instruction]()
    first, arrivals = _share_with_neighbours(sizes, hosts, rank)
    if rows[rank] and others(rank, hosts):
        transfers = [*enter(rank, ranks)]
        for host in others(rank, hosts):
            for low, high in chunks(rows[rank], sizes.chunk):
                there = Region(rail_peer(rank, host, hosts), "inbox", starts[rank] + low, starts[rank] + high)
                transfers.append(Copy(own._replace(start=low, stop=high), there))
                transfers += [Notify(peer, Signal("arrived", rank)) for peer in members(host, hosts)]
    for peer in far:
        holder = rail_peer(peer, hosts[rank], hosts)
        for count, (low, high) in enumerate(chunks(rows[peer], sizes.chunk), 1):
            there = Region(holder, "inbox", starts[peer] + low, starts[peer] + high)
            arrivals.append(Arrival(Wait(Signal("arrived", peer), count), there, there.start))
    return Gathering(first, [transfers] if transfers else [], arrivals, [*leave(rank, ranks)] if arrivals else [])


def _share_with_neighbours(sizes: Sizes, hosts: Hosts, rank: int) -> tuple[list[Instruction], list[Arrival]]:
    """Stage this rank's rows for the others of its host, and what of theirs can be read where they stage it."""
    rows, starts, near = sizes.rows, offsets(sizes.rows), neighbours(rank, hosts)
    first: list[Instruction] = []
    if rows[rank] and near:
        own = Region(rank, "a", 0, rows[rank])
        first = [*enter(rank, len(rows)), Copy(own, own._replace(buffer="staged"))]
        first += [Notify(peer, Signal("ready", rank)) for peer in near]
    staged = [(peer, Region(peer, "staged", 0, rows[peer])) for peer in near if rows[peer]]
    return first, [Arrival(Wait(Signal("ready", peer), 1), region, starts[peer]) for peer, region in staged]


def ring(sizes: Sizes, rank: int) -> Gathering:
    """Each rank puts its rows to the next one and hands on what it receives, so that only neighbours talk.

    Where hosts have several ranks it is the hosts that are neighbours, and a host's ranks read what one of them has received.
    """
    if sizes.hosts is not None and not apart(sizes.hosts):
        return _ring_of_hosts(sizes, sizes.hosts, rank)
    rows, ranks, starts = sizes.rows, len(sizes.rows), offsets(sizes.rows)
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    sent = [origin for origin in [rank, *before(rank, ranks)] if origin != following and rows[origin]]
    received = [origin for origin in before(rank, ranks) if rows[origin]]
    first, last = _open(sizes, rank, [previous] if received else [])
    transfers = _enter(sizes, rank, [following] if sent else [])
    arrivals: list[Arrival] = []
    for origin in [rank, *before(rank, ranks)]:
        for low, high in chunks(rows[origin], sizes.chunk):
            here = Region(rank, sizes.into, starts[origin] + low, starts[origin] + high)
            source = Region(rank, "a", low, high) if origin == rank else here
            if origin != rank:
                arrivals.append(Arrival(Wait(Signal("arrived", previous), len(arrivals) + 1), here, here.start))
            if origin in sent:
                transfers += [arrivals[-1].wait] if origin != rank else []
                transfers += [Copy(source, here._replace(rank=following)), Notify(following, Signal("arrived", rank))]
    return Gathering(first, [transfers] if transfers else [], arrivals, last)


def _ring_of_hosts(sizes: Sizes, hosts: Hosts, rank: int) -> Gathering:
    """Every rank hands all that it has to one rank of the next host, the rows of near hosts first."""
    rows, ranks, around, starts = sizes.rows, len(sizes.rows), max(hosts) + 1, offsets(sizes.rows)

    def following(holder: int) -> int:
        return rail_peer(holder, (hosts[holder] + 1) % around, hosts)

    def chain(origin: int) -> list[int]:
        """Who holds its rows, host by host."""
        holders = [origin]
        while len(holders) < around:
            holders.append(following(holders[-1]))
        return holders

    def sent(holder: int) -> list[tuple[int, int, int]]:
        """``(origin, low, high)`` of what a rank hands on, in order."""
        held = [(chain(origin).index(holder), origin) for origin in range(ranks) if holder in chain(origin)[:-1]]
        return [(origin, low, high) for _, origin in sorted(held) for low, high in chunks(rows[origin], sizes.chunk)]

    def arrival(origin: int, low: int, high: int) -> Arrival:
        """Rows of another host's rank, where they come to this one."""
        step = (hosts[rank] - hosts[origin]) % around
        before, holder = chain(origin)[step - 1 : step + 1]
        here = Region(holder, "inbox", starts[origin] + low, starts[origin] + high)
        return Arrival(Wait(Signal("arrived", before), sent(before).index((origin, low, high)) + 1), here, here.start)

    first, arrivals = _share_with_neighbours(sizes, hosts, rank)
    own = Region(rank, "a", 0, rows[rank])
    transfers: list[Instruction] = [*enter(rank, ranks)] if rows[rank] else []
    for origin, low, high in sent(rank):
        there = Region(following(rank), "inbox", starts[origin] + low, starts[origin] + high)
        if origin != rank:
            transfers.append(arrival(origin, low, high).wait)
        source = own._replace(start=low, stop=high) if origin == rank else there._replace(rank=rank)
        transfers += [Copy(source, there), *(Notify(peer, Signal("arrived", rank)) for peer in members(hosts[there.rank], hosts))]
    far = sorted((p for p in range(ranks) if hosts[p] != hosts[rank]), key=lambda p: (hosts[rank] - hosts[p]) % around)
    arrivals += [arrival(origin, low, high) for origin in far for low, high in chunks(rows[origin], sizes.chunk)]
    return Gathering(first, [transfers] if transfers else [], arrivals, [*leave(rank, ranks)] if arrivals else [])


def _open(sizes: Sizes, rank: int, sources: Sequence[int]) -> tuple[list[Instruction], list[Instruction]]:
    """What precedes and follows puts into this rank's memory: (first, last).

    A rank that receives nothing does nothing in a workspace that others do not wait for.
    """
    if sizes.into == "gathered":
        return [Notify(peer, Signal("open", rank)) for peer in sources], []
    return [], [*leave(rank, len(sizes.rows))] if sources else []


def _enter(sizes: Sizes, rank: int, targets: Sequence[int]) -> list[Instruction]:
    """What precedes a lane's puts into the memory of `targets`.

    A workspace is free when all ranks have left the plan before, a caller's own tensor when the caller has made this call. A rank
    without rows puts, if at all, only what it received, and thus after someone who has seen to it.
    """
    if sizes.into == "gathered":
        return [Wait(Signal("open", peer), 1) for peer in targets]
    return [*enter(rank, len(sizes.rows))] if sizes.rows[rank] else []


GATHERINGS: dict[str, Callable[[Sizes, int], Gathering]] = {"direct": direct, "pull": pull, "push": push, "ring": ring}


def all_gather(
    rows: Sequence[int],
    algorithm: str = "pull",
    *,
    chunk_rows: int,
    symmetric_a: bool = False,
    symmetric_gathered: bool = False,
    order: str = "peer",
    links: int = 1,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """``gathered`` = the rows `a` of all ranks in rank order; `algorithm` is ``pull``, ``push`` or ``ring``.

    A pull writes `gathered` itself, from where `a` lies if that is symmetric; else ranks hand out `chunk_rows` at a time. Push and
    ring, whose writer is a peer, do so if it is symmetric or every rank has a host of its own, and else pass a workspace. A push
    over several `links` has a lane for each. `planned`: the ranks that get their lanes, all unless given. On one host a push
    into a symmetric `gathered` needs nothing of `a` but to read it, so it may be this rank's own part of `gathered`.
    """
    ranks, starts = len(rows), offsets(rows)
    shared = hosts is not None and not apart(hosts)  # rows that arrive are read by several ranks
    straight = (symmetric_gathered and not shared) or apart(hosts)
    sizes = Sizes(rows, chunk_rows, symmetric_a, "gathered" if straight else "inbox", order, links, hosts)

    def made(buffers: Mapping[str, Buffer], lanes: Callable[[int], Lanes]) -> Plan:
        result = gathered_result(rows, planned)
        return Plan("all_gather", algorithm, buffers, in_all(ranks, planned, lanes), result, tuple(rows), planned=planned)

    if algorithm == "push" and symmetric_gathered and links == 1 and hosts is None:
        return made(gather_buffers(rows), lambda r: {"compute": tidy(_fan_out(sizes, r))})
    if algorithm == "pull" and not symmetric_a and ranks > 1:
        handed = Stream("staged", [[Part(before(r, ranks), 0, rows[r])] for r in range(ranks)], chunk_rows)
        buffers = gather_buffers(rows) | {"staged": room(handed.rows)}
        return made(buffers, lambda r: {"compute": _through_slots(handed, starts, r)})
    gather = {"pull": direct, "push": push, "ring": ring}[algorithm]

    def lanes_of(r: int) -> Lanes:
        part = gather(sizes, r)
        own = keep(Region(r, "a", 0, rows[r]), starts[r])
        beside = part.transfers if links > 1 else []
        lane = [*part.first, *([] if beside else chain(*part.transfers))]
        staged = [at for at, instruction in enumerate(part.first) if isinstance(instruction, Copy)]
        at = staged[-1] + 1 if staged else len(lane)  # own rows are copied in one pass with their staging
        lane[at:at] = own
        for wait, region, start in part.arrivals:
            lane += [wait, *keep(region, start, r)]
        return {"compute": tidy([*lane, *part.last])} | side_lanes(beside)

    return made(gather_buffers(rows), lanes_of)


@cache
def eager(rows: tuple[int, ...], levels: Levels) -> Plan:
    """All-gather of a few rows, whether symmetric or not: every rank hands out its own and reads its peers'."""
    ranks, starts, lanes = len(rows), offsets(rows), []
    for r in range(ranks):
        own = Region(r, "a", 0, rows[r])
        handed = hand_out(own, levels)
        lane = [*handed[:1], *keep(own, starts[r]), *handed[1:]]  # own rows are copied in one pass
        for peer in after(r, ranks):
            lane += keep(Region(peer, "eager", 0, rows[peer]), starts[peer], r)
        lanes.append({"compute": tuple(lane)})
    buffers = gather_buffers(rows) | {"eager": Buffer.of("eager", shards(rows))}
    return Plan("all_gather", "eager", buffers, tuple(lanes), gathered_result(rows, None), tuple(rows), meets=True)


def _through_slots(handed: Stream, starts: Sequence[int], rank: int) -> tuple[Instruction, ...]:
    """Stage own rows, copy them to `gathered` as well, for which peers need not wait, and fetch what peers stage."""

    def stage(step: int) -> list[Instruction]:
        own = [Region(rank, "a", part.start, part.stop) for part in handed.handed_out(rank, step)]
        kept = [keep(rows, starts[rank] + rows.start) for rows in own]
        return [*handed.stage(rank, step, copies(rank, "a")), *chain(*kept)]

    return pipeline(rank, [handed], [stage, handed.fetch(rank, "gathered", starts)])


def _fan_out(sizes: Sizes, rank: int) -> list[Instruction]:
    """Put each chunk to its place on all ranks, this one included, before the next: an engine then reads it from memory once."""
    rows, ranks, start = sizes.rows, len(sizes.rows), offsets(sizes.rows)[rank]
    sources = [peer for peer in after(rank, ranks) if rows[peer]]
    targets = before(rank, ranks) if rows[rank] else []
    first, _ = _open(sizes, rank, sources)
    lane = [*first, *_enter(sizes, rank, targets)]
    for low, high in chunks(rows[rank], sizes.chunk):
        own = Region(rank, "a", low, high)
        lane += [Copy(own, Region(r, "gathered", start + low, start + high)) for r in [rank, *targets]]
        lane += [Notify(peer, Signal("arrived", rank)) for peer in targets]
    return lane + [Wait(Signal("arrived", peer), len([*chunks(rows[peer], sizes.chunk)])) for peer in sources]


def keep(region: Region, start: int, rank: int | None = None) -> list[Instruction]:
    """Copy an arrival to its place in `gathered` on `rank` (the region's own by default), unless it lies there."""
    here = Region(region.rank if rank is None else rank, "gathered", start, start + region.rows)
    return [Copy(region, here)] if region.rows and region.buffer != "gathered" else []


def gather_buffers(rows: Sequence[int], gathered: bool = True) -> dict[str, Buffer]:
    """The buffers of any gathering; `gathered` says whether the caller wants the gathered rows."""
    buffers = {
        "a": Buffer.of("input", shards(rows)),
        "staged": Buffer.of("workspace", shards(rows)),
        "inbox": Buffer.of("workspace", everything(rows)),
    }
    return buffers | ({"gathered": Buffer.of("output", everything(rows))} if gathered else {})


def gathered_result(rows: Sequence[int], planned: tuple[int, ...] | None) -> dict[Region, Value]:
    """What `gathered` must hold on each of the planned ranks, all unless given."""
    starts, ranks = offsets(rows), range(len(rows))
    return {
        Region(r, "gathered", starts[p], starts[p] + rows[p]): (Term(p, "a", -starts[p]),)
        for r in planned or ranks
        for p in ranks
        if rows[p]
    }
