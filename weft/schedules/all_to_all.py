"""All-to-all: block p of rank r's rows goes to rank p, as its block r.

Rank 0 of two that reads its peer's memory, in two pieces of a block, time to the right; ``!``
notifies the peer, ``?`` waits for it::

    compute  | stage piece 0 for the peer |!| keep own block | stage piece 1 |!|?| get 0 |?| get 1 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.plan.binding import split
from weft.plan.lazy import Deferred, PerRank
from weft.schedules.blocks import around, block, shard, shards
from weft.schedules.lanes import (
    Lanes,
    Published,
    by_rank,
    notify_all,
    over_hosts,
    publish,
    wait_all,
)
from weft.schedules.levels import Levels, send_eagerly
from weft.schedules.peers import Hosts, Layout, after, layout, local_peers
from weft.schedules.staging import one_for_each, pipeline
from weft.schedules.workload import Collective


def all_to_all(
    ranks: int,
    pieces: int,
    *,
    symmetric_a: bool = False,
    hosts: Hosts | None = None,
    few: bool = False,
) -> Plan:
    """The plan of an all-to-all of shards cut into `pieces`: shard ``r * ranks + p`` has the rows
    of rank r for rank p.

    If `symmetric_a` every rank copies its shards from its peers' inputs; else they are staged, a
    piece of each at a time. Shards for a rank of another of the `hosts` are put there, after that
    rank has made this call; shards for ranks of the same host are staged, or sent eagerly if rows
    are `few`.
    """
    if hosts is None and not symmetric_a and ranks > 1:
        return _through_slots(ranks, pieces)

    def lane(r: int, hosts: Layout) -> list[Instruction]:
        local = local_peers(r, hosts)
        remote = [p for p in after(r, hosts) if hosts[p] != hosts[r]]
        parts = around(r * pieces, (r + 1) * pieces, ranks * pieces)
        if several:
            parts = [(p * pieces, (p + 1) * pieces) for p in sorted(local)]
        own = (
            _send(local[::-1], r, parts)
            if few
            else publish(r, hosts, parts, symmetric_a, local[::-1], local)
        )
        made = notify_all(r, "open", remote) + own.first
        for p in reversed(remote):
            there = shard(p, "out", r, pieces)
            made += [
                Wait(Signal("open", p), 1),
                Copy(shard(r, "a", p, pieces), there),
                Notify(p, Signal("arrived", r)),
            ]
        made.append(Copy(shard(r, "a", r, pieces), shard(r, "out", r, pieces)))
        for p in local:
            made += [
                Wait(Signal("ready", p), 1),
                Copy(shard(p, own.buffer, r, pieces), shard(r, "out", p, pieces)),
            ]
        return made + wait_all("arrived", remote) + own.last

    several = hosts is not None
    of = layout(hosts or (0,) * ranks)
    request = pieces, symmetric_a, several, few
    lanes = (
        over_hosts(of, lambda r, hosts: {"compute": lane(r, hosts)}, (*request, of))
        if several
        else by_rank(ranks, lambda r: {"compute": lane(r, of)}, (ranks, *request))
    )
    workspace = {
        "eager" if few else "staged": Buffer.of(
            "eager" if few else "workspace", shards(ranks, ranks * pieces)
        )
    }
    return _plan(ranks, pieces, workspace, lanes, synchronizes=few)


@cache
def eager(levels: Levels) -> Plan:
    """All-to-all of a few rows: every rank sends the rows for its peers eagerly and fetches its
    own.
    """
    ranks = len(levels[-1])

    def lane(r: int) -> Lanes:
        others = [Region(r, "a", *part) for part in around(r, r + 1, ranks)]
        kept = Copy(block(r, "a", r), block(r, "out", r))
        fetched = [
            Copy(block(p, "eager", r - (r > p)), block(r, "out", p)) for p in after(r, ranks)
        ]
        sent = send_eagerly(others, levels)
        waits = next(
            (at for at, instruction in enumerate(sent) if isinstance(instruction, Wait)), 0
        )
        # peers need not wait for the copy of this rank's own rows
        return {"compute": [*sent[:waits], kept, *sent[waits:], *fetched]}

    workspace = Buffer.of(
        "eager", [[r * ranks + p for p in range(ranks) if p != r] for r in range(ranks)]
    )
    lanes = by_rank(ranks, lane, levels)
    return _plan(ranks, 1, {"eager": workspace}, lanes, synchronizes=True)


def _send(readers: Sequence[int], rank: int, parts: Sequence[tuple[int, int]]) -> Published:
    """Send `parts` of this rank's ``a`` eagerly to ranks of this host."""
    sent = [Copy(Region(rank, "a", *part), Region(rank, "eager", *part)) for part in parts]
    return Published([*sent, *notify_all(rank, "ready", readers)], [], "eager")


def _through_slots(ranks: int, pieces: int) -> Plan:
    stream = one_for_each(ranks, pieces)

    def lane(rank: int) -> Lanes:
        own = shard(rank, "a", rank, pieces)
        kept = Copy(own, own._replace(buffer="out"))

        def stage(step: int) -> list[Instruction]:
            # peers need not wait for the copy of this rank's own rows
            return [*stream.stage_own(rank)(step), *([kept] if step == 0 else [])]

        starts = [p * pieces for p in range(ranks)]
        return {"compute": pipeline(rank, [stream], [stage, stream.fetch(rank, "out", starts)])}

    lanes = by_rank(ranks, lane, (ranks, pieces))
    return _plan(ranks, pieces, {"staged": stream.slots}, lanes)


def _plan(
    ranks: int,
    pieces: int,
    workspace: Mapping[str, Buffer],
    lanes: PerRank[Mapping[str, tuple[Instruction, ...]]],
    synchronizes: bool = False,
) -> Plan:
    every = range(ranks)

    def received(r: int) -> Sequence[int]:
        """The blocks for a rank: its piece of every rank's rows."""
        if pieces == 1:
            return range(r, ranks**2, ranks)
        starts = ((p * ranks + r) * pieces for p in every)
        return [number for start in starts for number in range(start, start + pieces)]

    buffers = {
        "a": Buffer.of("input", shards(ranks, ranks * pieces)),
        "out": Buffer.of("output", map(received, every)),
        **workspace,
    }
    result = Deferred(
        lambda: {
            shard(r, "out", p, pieces): (Term(p, "a", (r - p) * pieces),)
            for r, p in product(every, repeat=2)
        }
    )
    return Plan(
        "all_to_all",
        "eager" if synchronizes else "pull",
        buffers,
        lanes,
        result,
        (pieces,) * ranks**2,
        synchronizes=synchronizes,
    )


COLLECTIVE = Collective(
    "all_to_all",
    ("pull",),
    lambda request: all_to_all(request.ranks, request.pieces, symmetric_a=request.symmetric),
    eager,
    default_shards=lambda rows, ranks: split(rows, ranks) * ranks,
    predicted=("pull",),
)
