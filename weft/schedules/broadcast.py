"""Broadcast: every rank gets the rows of one of them, the source.

Two ranks, in three pieces, time to the right; ``!`` notifies the peer, ``?`` waits for it::

    source   | stage 0 |!| stage 1 |!| stage 2 |!|
    rank 1             |?| get 0   |?| get 1   |?| get 2 |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.lazy import PerRank
from weft.schedules.blocks import block
from weft.schedules.lanes import (
    by_rank,
    enter,
    leave,
    notify_all,
    over_hosts,
    publish,
    wait_all,
)
from weft.schedules.levels import Levels, synchronize
from weft.schedules.peers import (
    Hosts,
    Layout,
    before,
    layout,
    local_peers,
    members,
    one_rank_per_host,
    other_hosts,
    rail_peer,
)
from weft.schedules.staging import Part, Stream, pipeline
from weft.schedules.workload import Collective, Request

ALGORITHMS = ("pull", "push", "ring")


def broadcast(
    ranks: int, pieces: int, source: int, *, symmetric_a: bool = False, shared: bool = False
) -> Plan:
    """The plan of a broadcast: all ranks but `source` get the rows of its ``a``, cut into `pieces`,
    as their ``out``.

    If `symmetric_a` they read the rows in place, and if the work is `shared` the source puts the
    first pieces to them: as many rows in all as each of them then reads. Else the source stages a
    piece at a time.
    """
    parts = [[Part(before(r, ranks), 0)] if r == source else [] for r in range(ranks)]
    stream = Stream("staged", parts, pieces)
    put = pieces // ranks if shared else 0

    def lane(rank: int) -> list[Instruction]:
        if ranks == 1:
            return []
        if symmetric_a:
            return (
                _from_source(source, put, ranks)
                if rank == source
                else _to_others(rank, source, pieces, put, ranks)
            )
        return pipeline(
            rank, [stream], [stream.stage_own(rank), stream.fetch(rank, "out", [0] * ranks)]
        )

    lanes = by_rank(ranks, lambda rank: {"compute": lane(rank)})
    return _plan("pull", pieces, source, lanes, staged=stream.slots)


def _plan(
    algorithm: str,
    pieces: int,
    source: int,
    lanes: PerRank[Mapping[str, tuple[Instruction, ...]]],
    **workspaces: Buffer,
) -> Plan:
    ranks = len(lanes)
    every = range(pieces)
    none = range(0)
    buffers = {
        "a": Buffer.of("input", [every if r == source else none for r in range(ranks)]),
        "staged": Buffer.of("workspace", [every] * ranks),
        "out": Buffer.of("output", [none if r == source else every for r in range(ranks)]),
        **workspaces,
    }
    result = {
        Region(r, "out", 0, pieces): (Term(source, "a", 0),) for r in range(ranks) if r != source
    }
    return Plan(
        "broadcast",
        algorithm,
        buffers,
        lanes,
        result,
        (pieces,),
        synchronizes=algorithm == "eager",
    )


def _from_source(source: int, put: int, ranks: int) -> list[Instruction]:
    peers = before(source, ranks)
    copies = [Copy(Region(source, "a", 0, put), Region(peer, "out", 0, put)) for peer in peers]
    puts = [*wait_all("open", peers), *copies, *notify_all(source, "arrived", peers)] if put else []
    own = publish(source, ranks, [], True, peers, [])
    return [*own.first, *puts, *own.last]


def _to_others(rank: int, source: int, pieces: int, put: int, ranks: int) -> list[Instruction]:
    there = Region(source, "a", put, pieces)
    own = publish(rank, ranks, [], True, [], [source])
    fetch = [
        Wait(Signal("ready", source), 1),
        Copy(there, there._replace(rank=rank, buffer="out")),
        *own.last,
    ]
    return (
        [Notify(source, Signal("open", rank)), *fetch, Wait(Signal("arrived", source), 1)]
        if put
        else fetch
    )


@cache
def eager(source: int, levels: Levels) -> Plan:
    """Broadcast of a few rows, symmetric or not: all ranks synchronize and then copy the rows from
    the eager buffer of the source.
    """
    ranks = len(levels[-1])
    shared = block(source, "eager", 0)

    def lane(r: int) -> list[Instruction]:
        barrier = synchronize(r, levels, "ready")
        if r != source:
            return [*barrier, Copy(shared, block(r, "out", 0))]
        return [Copy(block(r, "a", 0), shared), *barrier] if ranks > 1 else []

    sent = Buffer.of("eager", [range(1 if r == source else 0) for r in range(ranks)])
    lanes = by_rank(ranks, lambda rank: {"compute": lane(rank)})
    return _plan("eager", 1, source, lanes, eager=sent)


def push(source: int, hosts: Hosts, *, staged: bool = False) -> Plan:
    """Broadcast over several hosts: rows are put to one rank of each other host, and its other
    ranks read them there.

    If every rank has its own host the rows are put into its ``out``, unless `staged`, which puts
    them into a workspace.
    """
    alone = one_rank_per_host(hosts) and not staged
    arrived = Wait(Signal("arrived", source), 1)

    def lane(r: int, hosts: Layout) -> list[Instruction]:
        if r != source and alone:
            return [Notify(source, Signal("open", r)), arrived]
        if r != source:
            holder = rail_peer(source, hosts[r], hosts)
            return [arrived, Copy(block(holder, "staged", 0), block(r, "out", 0)), *leave(r, hosts)]
        local = local_peers(r, hosts)
        own = block(r, "a", 0)
        made = [] if alone else enter(r, hosts)
        if local:
            made += [Copy(own, own._replace(buffer="staged")), *notify_all(r, "arrived", local)]
        for host in other_hosts(r, hosts):
            to = rail_peer(r, host, hosts)
            made += wait_all("open", [to] if alone else [])
            made += [
                Copy(own, block(to, "out" if alone else "staged", 0)),
                *notify_all(r, "arrived", members(host, hosts)),
            ]
        return made

    return _plan("push", 1, source, _over_hosts(source, layout(hosts), lane, alone))


def ring(pieces: int, source: int, hosts: Hosts, *, staged: bool = False) -> Plan:
    """Broadcast over several hosts: each host puts pieces to the next host as they arrive, so that
    the source sends them once.
    """
    around = len(layout(hosts).members)
    alone = one_rank_per_host(hosts) and not staged
    into = "out" if alone else "staged"
    holders = [rail_peer(source, (hosts[source] + step) % around, hosts) for step in range(around)]

    def lane(r: int, hosts: Layout) -> list[Instruction]:
        step = (hosts[r] - hosts[source]) % around
        before = Signal("arrived", holders[step - 1])
        holder = holders[step]
        following = holders[step + 1] if r == holder and step + 1 < around else None
        made: list[Instruction] = []
        if into == "out":  # the previous holder may write to it once this rank has made the call
            made += [Notify(holders[step - 1], Signal("open", r))] if step else []
            made += [Wait(Signal("open", following), 1)] if following is not None else []
        elif r == source:
            made += enter(r, hosts)
            if local_peers(r, hosts):
                own = Region(r, "a", 0, pieces)
                made += [
                    Copy(own, own._replace(buffer="staged")),
                    *notify_all(r, "ready", local_peers(r, hosts)),
                ]
        for piece in range(pieces):
            here = block(r, "a" if r == source else into, piece)
            made += [Wait(before, piece + 1)] if step else []
            if following is not None:
                made += [
                    Copy(here, block(following, into, piece)),
                    *notify_all(r, "arrived", members(hosts[following], hosts)),
                ]
            if into == "staged" and step:
                made.append(Copy(here._replace(rank=holder), block(r, "out", piece)))
        if into == "staged" and r != source:
            if not step:
                kept = Region(source, "staged", 0, pieces)
                made += [
                    Wait(Signal("ready", source), 1),
                    Copy(kept, kept._replace(rank=r, buffer="out")),
                ]
            made += leave(r, hosts)
        return made

    lanes = _over_hosts(source, layout(hosts), lane, alone, pieces)
    return _plan("ring", pieces, source, lanes)


def _over_hosts(
    source: int,
    hosts: Layout,
    lane: Callable[[int, Layout], Sequence[Instruction]],
    *choices: Hashable,
) -> PerRank[Mapping[str, tuple[Instruction, ...]]]:
    """The lanes of a broadcast over several hosts."""
    around = len(hosts.members)
    holders = [rail_peer(source, (hosts[source] + step) % around, hosts) for step in (0, 1, -1)]
    return over_hosts(
        hosts,
        lambda rank, hosts: {"compute": lane(rank, hosts)},
        (source, tuple(hosts), *choices),
        *holders,
    )


def _planned(request: Request) -> Plan:
    """The plan of a broadcast from rank 0."""
    hosts = range(request.ranks)
    if request.algorithm == "pull":
        return broadcast(request.ranks, request.pieces, 0, symmetric_a=request.symmetric)
    return push(0, hosts) if request.algorithm == "push" else ring(request.pieces, 0, hosts)


COLLECTIVE = Collective(
    "broadcast",
    ALGORITHMS,
    _planned,
    partial(eager, 0),
    default_shards=lambda rows, ranks: [rows],
    reads_peers=("pull",),
    predicted=("pull",),
)
