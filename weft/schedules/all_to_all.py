"""All-to-all: block p of rank r's rows goes to rank p, as its block r."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.common import Hosts, Published, after, around, before, block, publish
from weft.schedules.levels import Levels, hand_out
from weft.schedules.staging import copies, one_for_each, pipeline


def all_to_all(ranks: int, pieces: int, *, symmetric_a: bool = False, hosts: Hosts | None = None, few: bool = False) -> Plan:
    """Plan for what every rank has for each other, cut into `pieces`: shard ``r * ranks + p`` is what rank r has for rank p.

    Every rank gets its shards where they lie if `symmetric_a`; else they are handed out, a piece of each at a time. Shards for
    ranks of another of the `hosts` are put there, once a rank has made this call; those for others of this one are staged, or go
    through eager buffers where rows are `few`.
    """
    if hosts is None and not symmetric_a and ranks > 1:
        return _through_slots(ranks, pieces)

    def shard(rank: int, buffer: str, number: int) -> Region:
        """What a rank has for another, or has from it."""
        return Region(rank, buffer, number * pieces, (number + 1) * pieces)

    def lane(r: int) -> tuple[Instruction, ...]:
        near = [p for p in range(ranks) if hosts is None or hosts[p] == hosts[r]]
        far = [p for p in after(r, ranks) if p not in near]
        sources, readers = ([p for p in order(r, ranks) if p in near] for order in (after, before))
        parts = around(r * pieces, (r + 1) * pieces, ranks * pieces)
        if hosts is not None:
            parts = [(p * pieces, (p + 1) * pieces) for p in near if p != r]
        own = _hand_to(readers, r, parts) if few else publish(r, ranks, parts, symmetric_a, readers, sources)
        made: list[Instruction] = [*(Notify(p, Signal("open", r)) for p in far), *own.first]
        for p in (p for p in before(r, ranks) if p in far):
            made += [Wait(Signal("open", p), 1), Copy(shard(r, "a", p), shard(p, "out", r)), Notify(p, Signal("arrived", r))]
        made.append(Copy(shard(r, "a", r), shard(r, "out", r)))
        for p in sources:
            made += [Wait(Signal("ready", p), 1), Copy(shard(p, own.buffer, r), shard(r, "out", p))]
        return (*made, *(Wait(Signal("arrived", p), 1) for p in far), *own.last)

    buffers = _buffers(ranks, pieces)
    buffers |= {"eager": replace(buffers["a"], role="eager")} if few else {"staged": replace(buffers["a"], role="workspace")}
    return _plan(ranks, pieces, buffers, [lane(r) for r in range(ranks)], meets=few)


@cache
def eager(levels: Levels) -> Plan:
    """All-to-all of a few rows: every rank hands out what it has for others and fetches what these have for it."""
    ranks, lanes = len(levels[-1]), []
    for r in range(ranks):
        others = [Region(r, "a", *part) for part in around(r, r + 1, ranks)]
        kept = Copy(block(r, "a", r), block(r, "out", r))
        fetched = [Copy(block(p, "eager", r - (r > p)), block(r, "out", p)) for p in after(r, ranks)]
        handed = hand_out(others, levels)
        told = next((at for at, instruction in enumerate(handed) if isinstance(instruction, Wait)), 0)
        lanes.append((*handed[:told], kept, *handed[told:], *fetched))  # peers need not wait for what is kept
    handed_on = Buffer.of("eager", [[r * ranks + p for p in range(ranks) if p != r] for r in range(ranks)])
    return _plan(ranks, 1, _buffers(ranks, 1) | {"eager": handed_on}, lanes, meets=True)


def _hand_to(readers: Sequence[int], rank: int, parts: Sequence[tuple[int, int]]) -> Published:
    """Let ranks of this host have `parts` of this rank's ``a`` at once."""
    handed = [Copy(Region(rank, "a", *part), Region(rank, "eager", *part)) for part in parts]
    return Published([*handed, *(Notify(peer, Signal("ready", rank)) for peer in readers)], [], "eager")


def _through_slots(ranks: int, pieces: int) -> Plan:
    handed = one_for_each(ranks, pieces)

    def lane(rank: int) -> tuple[Instruction, ...]:
        own = Region(rank, "a", rank * pieces, (rank + 1) * pieces)
        kept = Copy(own, own._replace(buffer="out"))

        def stage(step: int) -> list[Instruction]:
            return [*handed.stage(rank, step, copies(rank, "a")), *([kept] if step == 0 else [])]  # peers need not wait for it

        return pipeline(rank, [handed], [stage, handed.fetch(rank, "out", [p * pieces for p in range(ranks)])])

    return _plan(ranks, pieces, _buffers(ranks, pieces) | {"staged": handed.room}, [lane(r) for r in range(ranks)])


def _plan(
    ranks: int, pieces: int, buffers: Mapping[str, Buffer], lanes: Sequence[tuple[Instruction, ...]], meets: bool = False
) -> Plan:
    result = {
        Region(r, "out", p * pieces, (p + 1) * pieces): (Term(p, "a", (r - p) * pieces),)
        for r in range(ranks)
        for p in range(ranks)
    }
    algorithm, named = "eager" if meets else "pull", tuple({"compute": lane} for lane in lanes)
    return Plan("all_to_all", algorithm, buffers, named, result, (pieces,) * ranks**2, meets=meets)


def _buffers(ranks: int, pieces: int) -> dict[str, Buffer]:
    shards = [range(number * pieces, (number + 1) * pieces) for number in range(ranks**2)]
    return {
        "a": Buffer.of("input", [range(r * ranks * pieces, (r + 1) * ranks * pieces) for r in range(ranks)]),
        "out": Buffer.of("output", [[*chain(*shards[r::ranks])] for r in range(ranks)]),
    }
