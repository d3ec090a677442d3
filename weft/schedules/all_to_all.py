"""All-to-all: block p of rank r's rows goes to rank p, as its block r."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, product

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.blocks import around, block, shard, shards
from weft.schedules.lanes import Published, notify_all, one_lane, publish, wait_all
from weft.schedules.levels import Levels, hand_out
from weft.schedules.peers import Hosts, after, local_peers
from weft.schedules.staging import one_for_each, pipeline


def all_to_all(
    ranks: int,
    pieces: int,
    *,
    symmetric_a: bool = False,
    hosts: Hosts | None = None,
    few: bool = False,
) -> Plan:
    """Plan for what every rank has for each other, cut into `pieces`: shard ``r * ranks + p`` is
    what rank r has for rank p.

    Every rank gets its shards where they lie if `symmetric_a`; else they are handed out, a piece of
    each at a time. Shards for ranks of another of the `hosts` are put there, once a rank has made
    this call; those for others of this one are staged, or go through eager buffers where rows are
    `few`.
    """
    if hosts is None and not symmetric_a and ranks > 1:
        return _through_slots(ranks, pieces)

    def lane(r: int) -> list[Instruction]:
        near = local_peers(r, hosts or (0,) * ranks)
        far = [p for p in after(r, ranks) if p not in near]
        parts = around(r * pieces, (r + 1) * pieces, ranks * pieces)
        if hosts is not None:
            parts = [(p * pieces, (p + 1) * pieces) for p in sorted(near)]
        own = (
            _hand_to(near[::-1], r, parts)
            if few
            else publish(r, ranks, parts, symmetric_a, near[::-1], near)
        )
        made = notify_all(r, "open", far) + own.first
        for p in reversed(far):
            there = shard(p, "out", r, pieces)
            made += [
                Wait(Signal("open", p), 1),
                Copy(shard(r, "a", p, pieces), there),
                Notify(p, Signal("arrived", r)),
            ]
        made.append(Copy(shard(r, "a", r, pieces), shard(r, "out", r, pieces)))
        for p in near:
            made += [
                Wait(Signal("ready", p), 1),
                Copy(shard(p, own.buffer, r, pieces), shard(r, "out", p, pieces)),
            ]
        return made + wait_all("arrived", far) + own.last

    handed = {
        "eager" if few else "staged": Buffer.of(
            "eager" if few else "workspace", shards(ranks, ranks * pieces)
        )
    }
    return _plan(ranks, pieces, handed, map(lane, range(ranks)), synchronizes=few)


@cache
def eager(levels: Levels) -> Plan:
    """All-to-all of a few rows: every rank hands out what it has for others and fetches what these
    have for it.
    """
    ranks, lanes = len(levels[-1]), []
    for r in range(ranks):
        others = [Region(r, "a", *part) for part in around(r, r + 1, ranks)]
        kept = Copy(block(r, "a", r), block(r, "out", r))
        fetched = [
            Copy(block(p, "eager", r - (r > p)), block(r, "out", p)) for p in after(r, ranks)
        ]
        handed = hand_out(others, levels)
        told = next(
            (at for at, instruction in enumerate(handed) if isinstance(instruction, Wait)), 0
        )
        lanes.append(
            (*handed[:told], kept, *handed[told:], *fetched)
        )  # peers need not wait for what is kept
    handed_on = Buffer.of(
        "eager", [[r * ranks + p for p in range(ranks) if p != r] for r in range(ranks)]
    )
    return _plan(ranks, 1, {"eager": handed_on}, lanes, synchronizes=True)


def _hand_to(readers: Sequence[int], rank: int, parts: Sequence[tuple[int, int]]) -> Published:
    """Let ranks of this host have `parts` of this rank's ``a`` at once."""
    handed = [Copy(Region(rank, "a", *part), Region(rank, "eager", *part)) for part in parts]
    return Published([*handed, *notify_all(rank, "ready", readers)], [], "eager")


def _through_slots(ranks: int, pieces: int) -> Plan:
    handed = one_for_each(ranks, pieces)

    def lane(rank: int) -> list[Instruction]:
        own = shard(rank, "a", rank, pieces)
        kept = Copy(own, own._replace(buffer="out"))

        def stage(step: int) -> list[Instruction]:
            return [
                *handed.stage_own(rank)(step),
                *([kept] if step == 0 else []),
            ]  # peers need not wait for it

        return pipeline(
            rank, [handed], [stage, handed.fetch(rank, "out", [p * pieces for p in range(ranks)])]
        )

    return _plan(ranks, pieces, {"staged": handed.room}, map(lane, range(ranks)))


def _plan(
    ranks: int,
    pieces: int,
    handed: Mapping[str, Buffer],
    lanes: Iterable[Sequence[Instruction]],
    synchronizes: bool = False,
) -> Plan:
    cut = shards(ranks**2, pieces)
    buffers = {
        "a": Buffer.of("input", shards(ranks, ranks * pieces)),
        "out": Buffer.of("output", [[*chain(*cut[r::ranks])] for r in range(ranks)]),
        **handed,
    }
    every = product(range(ranks), repeat=2)
    result = {shard(r, "out", p, pieces): (Term(p, "a", (r - p) * pieces),) for r, p in every}
    return Plan(
        "all_to_all",
        "eager" if synchronizes else "pull",
        buffers,
        one_lane(lanes),
        result,
        (pieces,) * ranks**2,
        synchronizes=synchronizes,
    )
