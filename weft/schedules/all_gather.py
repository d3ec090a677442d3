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
    block,
    enter,
    everything,
    in_all,
    in_order,
    leave,
    members,
    neighbours,
    others,
    publish,
    rail_peer,
    shards,
    side_lanes,
    tidy,
)
from weft.schedules.levels import Levels, hand_out
from weft.schedules.staging import Part, Stream, copies, pipeline

ALGORITHMS = ("pull", "push", "ring")


class Choices(NamedTuple):
    """What a planner is given: ranks, the pieces of each one's rows, where rows may lie, and how a push goes about it.

    Peers read `a` in place if it is symmetric; otherwise it is staged. Rows that are moved go `into` the workspace ``inbox`` or
    straight into the caller's ``gathered``, which must be symmetric where peers of this host write to it (push and ring). `order`
    and `links` are those of a push (`push`). `hosts` are given where there are several.
    """

    ranks: int
    pieces: int
    symmetric_a: bool = False
    into: str = "inbox"
    order: str = "peer"
    links: int = 1
    hosts: Hosts | None = None


class Arrival(NamedTuple):
    """Rows of the gathered matrix, from block `start` on, lie in `region` once `wait` is over."""

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


def direct(choices: Choices, rank: int) -> Gathering:
    """Nothing is moved: peers' rows are used where they lie."""
    ranks, pieces, peers = choices.ranks, choices.pieces, after(rank, choices.ranks)
    own = publish(rank, ranks, [(0, pieces)], choices.symmetric_a, before(rank, ranks), peers)
    arrivals = [Arrival(Wait(Signal("ready", peer), 1), Region(peer, own.buffer, 0, pieces), peer * pieces) for peer in peers]
    return Gathering(own.first, [], arrivals, own.last)


def pull(choices: Choices, rank: int) -> Gathering:
    """Each rank gets its peers' rows, piece by piece."""
    published = direct(choices, rank)
    transfers: list[Instruction] = []
    arrivals: list[Arrival] = []
    pulled = Signal("pulled", rank)
    for ready, (peer, buffer, _, _), start in published.arrivals:
        transfers.append(ready)
        for piece in range(choices.pieces):
            here = block(rank, choices.into, start + piece)
            transfers += [Copy(block(peer, buffer, piece), here), Notify(rank, pulled)]
            arrivals.append(Arrival(Wait(pulled, len(arrivals) + 1), here, here.start))
    if choices.symmetric_a and choices.into == "inbox" and arrivals:
        # Staging would have waited for the workspaces of all and handed them back; here the first "ready" and each "read" say so
        # for one peer each.
        first = published.arrivals[0].region.rank
        transfers = [free for free in enter(rank, choices.ranks) if free.signal.source != first] + transfers
    return Gathering(published.first, [transfers] if transfers else [], arrivals, published.last)


def push(choices: Choices, rank: int) -> Gathering:
    """Each rank puts its rows to all peers (full mesh), first to the one that uses them first.

    In the `order` ``peer`` a rank sends and uses rows peer after peer; ``interleaved`` the first piece of every peer, then the
    second …, which suits links that deliver beside each other. Peers are dealt out to as many lanes as there are `links`. Where
    hosts have several ranks it puts them to one rank of each other host, and peers of a host read each other's in place.
    """
    if choices.hosts is not None and not apart(choices.hosts):
        return _push_to_hosts(choices, choices.hosts, rank)
    ranks, pieces, order = choices.ranks, choices.pieces, choices.order
    sources, targets = after(rank, ranks), before(rank, ranks)
    first, last = _open(choices, rank, sources)
    transfers = []
    for link in range(min(choices.links, len(targets))):
        dealt = targets[link :: choices.links]
        lane = _enter(choices, rank, dealt)
        for peer, piece in in_order(order, dealt, pieces):
            there = block(peer, choices.into, rank * pieces + piece)
            lane += [Copy(block(rank, "a", piece), there), Notify(peer, Signal("arrived", rank))]
        transfers.append(lane)
    arrivals = []
    for peer, piece in in_order(order, sources, pieces):
        here = block(rank, choices.into, peer * pieces + piece)
        arrivals.append(Arrival(Wait(Signal("arrived", peer), piece + 1), here, here.start))
    return Gathering(first, transfers, arrivals, last)


def _push_to_hosts(choices: Choices, hosts: Hosts, rank: int) -> Gathering:
    """Rows cross to each host once and are read by all its ranks where they arrive; those of neighbours where they are staged."""
    ranks, pieces = choices.ranks, choices.pieces
    transfers = list[Instruction]()
    first, arrivals = _share_with_neighbours(choices, hosts, rank)
    if others(rank, hosts):
        transfers = [*enter(rank, ranks)]
        for host in others(rank, hosts):
            for piece in range(pieces):
                there = block(rail_peer(rank, host, hosts), "inbox", rank * pieces + piece)
                transfers.append(Copy(block(rank, "a", piece), there))
                transfers += [Notify(peer, Signal("arrived", rank)) for peer in members(host, hosts)]
    for peer in (peer for peer in after(rank, ranks) if hosts[peer] != hosts[rank]):
        holder = rail_peer(peer, hosts[rank], hosts)
        for piece in range(pieces):
            there = block(holder, "inbox", peer * pieces + piece)
            arrivals.append(Arrival(Wait(Signal("arrived", peer), piece + 1), there, there.start))
    return Gathering(first, [transfers] if transfers else [], arrivals, [*leave(rank, ranks)] if arrivals else [])


def _share_with_neighbours(choices: Choices, hosts: Hosts, rank: int) -> tuple[list[Instruction], list[Arrival]]:
    """Stage this rank's rows for the others of its host, and what of theirs can be read where they stage it."""
    pieces, near = choices.pieces, neighbours(rank, hosts)
    first: list[Instruction] = []
    if near:
        own = Region(rank, "a", 0, pieces)
        first = [*enter(rank, choices.ranks), Copy(own, own._replace(buffer="staged"))]
        first += [Notify(peer, Signal("ready", rank)) for peer in near]
    arrivals = [Arrival(Wait(Signal("ready", peer), 1), Region(peer, "staged", 0, pieces), peer * pieces) for peer in near]
    return first, arrivals


def ring(choices: Choices, rank: int) -> Gathering:
    """Each rank puts its rows to the next one and hands on what it receives, so that only neighbours talk.

    Where hosts have several ranks it is the hosts that are neighbours, and a host's ranks read what one of them has received.
    """
    if choices.hosts is not None and not apart(choices.hosts):
        return _ring_of_hosts(choices, choices.hosts, rank)
    ranks, pieces = choices.ranks, choices.pieces
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    first, last = _open(choices, rank, [previous] if ranks > 1 else [])
    transfers = _enter(choices, rank, [following] if ranks > 1 else [])
    arrivals: list[Arrival] = []
    for origin in [rank, *before(rank, ranks)]:
        for piece in range(pieces):
            here = block(rank, choices.into, origin * pieces + piece)
            source = block(rank, "a", piece) if origin == rank else here
            if origin != rank:
                arrivals.append(Arrival(Wait(Signal("arrived", previous), len(arrivals) + 1), here, here.start))
            if origin != following:
                transfers += [arrivals[-1].wait] if origin != rank else []
                transfers += [Copy(source, here._replace(rank=following)), Notify(following, Signal("arrived", rank))]
    return Gathering(first, [transfers] if transfers else [], arrivals, last)


def _ring_of_hosts(choices: Choices, hosts: Hosts, rank: int) -> Gathering:
    """Every rank hands all that it has to one rank of the next host, the rows of near hosts first."""
    ranks, pieces, around = choices.ranks, choices.pieces, max(hosts) + 1

    def following(holder: int) -> int:
        return rail_peer(holder, (hosts[holder] + 1) % around, hosts)

    def chain(origin: int) -> list[int]:
        """Who holds its rows, host by host."""
        holders = [origin]
        while len(holders) < around:
            holders.append(following(holders[-1]))
        return holders

    def sent(holder: int) -> list[tuple[int, int]]:
        """``(origin, piece)`` of what a rank hands on, in order."""
        held = [(chain(origin).index(holder), origin) for origin in range(ranks) if holder in chain(origin)[:-1]]
        return [(origin, piece) for _, origin in sorted(held) for piece in range(pieces)]

    def arrival(origin: int, piece: int) -> Arrival:
        """Rows of another host's rank, where they come to this one."""
        step = (hosts[rank] - hosts[origin]) % around
        before, holder = chain(origin)[step - 1 : step + 1]
        here = block(holder, "inbox", origin * pieces + piece)
        return Arrival(Wait(Signal("arrived", before), sent(before).index((origin, piece)) + 1), here, here.start)

    first, arrivals = _share_with_neighbours(choices, hosts, rank)
    transfers: list[Instruction] = [*enter(rank, ranks)]
    for origin, piece in sent(rank):
        there = block(following(rank), "inbox", origin * pieces + piece)
        if origin != rank:
            transfers.append(arrival(origin, piece).wait)
        source = block(rank, "a", piece) if origin == rank else there._replace(rank=rank)
        transfers += [Copy(source, there), *(Notify(peer, Signal("arrived", rank)) for peer in members(hosts[there.rank], hosts))]
    far = sorted((p for p in range(ranks) if hosts[p] != hosts[rank]), key=lambda p: (hosts[rank] - hosts[p]) % around)
    arrivals += [arrival(origin, piece) for origin in far for piece in range(pieces)]
    return Gathering(first, [transfers], arrivals, [*leave(rank, ranks)] if arrivals else [])


def _open(choices: Choices, rank: int, sources: Sequence[int]) -> tuple[list[Instruction], list[Instruction]]:
    """What precedes and follows puts into this rank's memory: (first, last)."""
    if choices.into == "gathered":
        return [Notify(peer, Signal("open", rank)) for peer in sources], []
    return [], [*leave(rank, choices.ranks)]


def _enter(choices: Choices, rank: int, targets: Sequence[int]) -> list[Instruction]:
    """What precedes a lane's puts into the memory of `targets`.

    A workspace is free when all ranks have left the plan before, a caller's own tensor when the caller has made this call.
    """
    if choices.into == "gathered":
        return [Wait(Signal("open", peer), 1) for peer in targets]
    return [*enter(rank, choices.ranks)]


GATHERINGS: dict[str, Callable[[Choices, int], Gathering]] = {"direct": direct, "pull": pull, "push": push, "ring": ring}


def all_gather(
    ranks: int,
    pieces: int,
    algorithm: str = "pull",
    *,
    symmetric_a: bool = False,
    symmetric_gathered: bool = False,
    order: str = "peer",
    links: int = 1,
    planned: tuple[int, ...] | None = None,
    hosts: Hosts | None = None,
) -> Plan:
    """``gathered`` = the rows `a` of all ranks in rank order, each in `pieces`; `algorithm` is ``pull``, ``push`` or ``ring``.

    A pull writes `gathered` itself, from where `a` lies if that is symmetric; else ranks hand out a piece at a time. Push and
    ring, whose writer is a peer, do so if it is symmetric or every rank has a host of its own, and else pass a workspace. A push
    over several `links` has a lane for each. `planned`: the ranks that get their lanes, all unless given. On one host a push
    into a symmetric `gathered` needs nothing of `a` but to read it, so it may be this rank's own part of `gathered`.
    """
    shared = hosts is not None and not apart(hosts)  # rows that arrive are read by several ranks
    straight = (symmetric_gathered and not shared) or apart(hosts)
    choices = Choices(ranks, pieces, symmetric_a, "gathered" if straight else "inbox", order, links, hosts)

    def made(buffers: Mapping[str, Buffer], lanes: Callable[[int], Lanes]) -> Plan:
        result = gathered_result(ranks, pieces, planned)
        return Plan("all_gather", algorithm, buffers, in_all(ranks, planned, lanes), result, (pieces,) * ranks, planned=planned)

    if algorithm == "push" and symmetric_gathered and links == 1 and hosts is None:
        return made(gather_buffers(ranks, pieces), lambda r: {"compute": tidy(_fan_out(choices, r))})
    if algorithm == "pull" and not symmetric_a and ranks > 1:
        handed = Stream("staged", [[Part(before(r, ranks), 0)] for r in range(ranks)], pieces)
        buffers = gather_buffers(ranks, pieces) | {"staged": handed.room}
        return made(buffers, lambda r: {"compute": _through_slots(handed, r)})
    gather = {"pull": direct, "push": push, "ring": ring}[algorithm]

    def lanes_of(r: int) -> Lanes:
        part = gather(choices, r)
        own = keep(Region(r, "a", 0, pieces), r * pieces)
        beside = part.transfers if links > 1 else []
        lane = [*part.first, *([] if beside else chain(*part.transfers))]
        staged = [at for at, instruction in enumerate(part.first) if isinstance(instruction, Copy)]
        at = staged[-1] + 1 if staged else len(lane)  # own rows are copied in one pass with their staging
        lane[at:at] = own
        for wait, region, start in part.arrivals:
            lane += [wait, *keep(region, start, r)]
        return {"compute": tidy([*lane, *part.last])} | side_lanes(beside)

    return made(gather_buffers(ranks, pieces), lanes_of)


@cache
def eager(levels: Levels) -> Plan:
    """All-gather of a few rows, whether symmetric or not: every rank hands out its own and reads its peers'."""
    ranks, lanes = len(levels[-1]), []
    for r in range(ranks):
        own = block(r, "a", 0)
        handed = hand_out([own], levels)
        fetched = chain(*(keep(block(peer, "eager", 0), peer, r) for peer in after(r, ranks)))
        lanes.append({"compute": (*handed[:1], *keep(own, r), *handed[1:], *fetched)})  # own rows are copied in one pass
    buffers = gather_buffers(ranks, 1) | {"eager": Buffer.of("eager", shards(ranks, 1))}
    return Plan("all_gather", "eager", buffers, tuple(lanes), gathered_result(ranks, 1, None), (1,) * ranks, meets=True)


def _through_slots(handed: Stream, rank: int) -> tuple[Instruction, ...]:
    """Stage own rows, copy them to `gathered` as well, for which peers need not wait, and fetch what peers stage."""
    starts = [r * handed.pieces for r in range(handed.ranks)]

    def stage(step: int) -> list[Instruction]:
        kept = keep(block(rank, "a", step), starts[rank] + step) if step < handed.pieces else []
        return [*handed.stage(rank, step, copies(rank, "a")), *kept]

    return pipeline(rank, [handed], [stage, handed.fetch(rank, "gathered", starts)])


def _fan_out(choices: Choices, rank: int) -> list[Instruction]:
    """Put each piece to its place on all ranks, this one included, before the next: an engine then reads it from memory once."""
    ranks, pieces = choices.ranks, choices.pieces
    sources, targets = after(rank, ranks), before(rank, ranks)
    first, _ = _open(choices, rank, sources)
    lane = [*first, *_enter(choices, rank, targets)]
    for piece in range(pieces):
        lane += [Copy(block(rank, "a", piece), block(r, "gathered", rank * pieces + piece)) for r in [rank, *targets]]
        lane += [Notify(peer, Signal("arrived", rank)) for peer in targets]
    return lane + [Wait(Signal("arrived", peer), pieces) for peer in sources]


def keep(region: Region, start: int, rank: int | None = None) -> list[Instruction]:
    """Copy an arrival to its place in `gathered` on `rank` (the region's own by default), unless it lies there."""
    here = Region(region.rank if rank is None else rank, "gathered", start, start + region.rows)
    return [Copy(region, here)] if region.buffer != "gathered" else []


def gather_buffers(ranks: int, pieces: int, gathered: bool = True) -> dict[str, Buffer]:
    """The buffers of any gathering; `gathered` says whether the caller wants the gathered rows."""
    buffers = {
        "a": Buffer.of("input", shards(ranks, pieces)),
        "staged": Buffer.of("workspace", shards(ranks, pieces)),
        "inbox": Buffer.of("workspace", everything(ranks, pieces)),
    }
    return buffers | ({"gathered": Buffer.of("output", everything(ranks, pieces))} if gathered else {})


def gathered_result(ranks: int, pieces: int, planned: tuple[int, ...] | None) -> dict[Region, Value]:
    """What `gathered` must hold on each of the planned ranks, all unless given."""
    return {
        Region(r, "gathered", p * pieces, (p + 1) * pieces): (Term(p, "a", -p * pieces),)
        for r in planned or range(ranks)
        for p in range(ranks)
    }
