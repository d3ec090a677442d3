"""All-to-all: block p of rank r's rows goes to rank p, as its block r."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Region, Signal, Term, Wait
from weft.schedules.common import Hosts, after, around, before, offsets, publish, room, shards
from weft.schedules.staging import Part, Stream, copies, pipeline


def all_to_all(
    rows: Sequence[Sequence[int]], *, symmetric_a: bool = False, chunk_rows: int | None = None, hosts: Hosts | None = None
) -> Plan:
    """Plan for `rows[r][p]` rows from rank r to rank p.

    Every rank gets its blocks where they lie if `symmetric_a`; else they are handed out, `chunk_rows` of each at a time. Blocks for
    ranks of another of the `hosts` are put there, once a rank has made this call.
    """
    ranks = len(rows)
    if hosts is None and not symmetric_a and ranks > 1:
        return _through_slots(rows, chunk_rows)
    lanes, result = [], {}
    for r in range(ranks):
        received = [rows[p][r] for p in range(ranks)]
        at, into = offsets(rows[r]), offsets(received)
        near = [p for p in range(ranks) if hosts is None or hosts[p] == hosts[r]]
        sources = [p for p in after(r, ranks) if rows[p][r] and p in near]
        readers = [p for p in before(r, ranks) if rows[r][p] and p in near]
        givers = [p for p in after(r, ranks) if rows[p][r] and p not in near]
        takers = [p for p in before(r, ranks) if rows[r][p] and p not in near]
        pieces = around(at[r], at[r] + rows[r][r], sum(rows[r]))
        if hosts is not None:
            pieces = [(at[p], at[p] + rows[r][p]) for p in near if p != r]
        own = publish(r, ranks, pieces, symmetric_a, readers, sources)
        lane: list[Instruction] = [*(Notify(p, Signal("open", r)) for p in givers), *own.first]
        for p in takers:
            there = offsets([rows[q][p] for q in range(ranks)])[r]
            block = Region(r, "a", at[p], at[p] + rows[r][p])
            lane += [Wait(Signal("open", p), 1), Copy(block, Region(p, "out", there, there + block.rows))]
            lane.append(Notify(p, Signal("arrived", r)))
        for p in [r, *sources]:
            start = offsets(rows[p])[r]
            here = Region(r, "out", into[p], into[p] + rows[p][r])
            lane += [Wait(Signal("ready", p), 1)] if p != r else []
            lane += [Copy(Region(p, "a" if p == r else own.buffer, start, start + here.rows), here)] if here.rows else []
            if here.rows:
                result[here] = (Term(p, "a", start - here.start),)
        for p in givers:
            lane.append(Wait(Signal("arrived", p), 1))
            result[Region(r, "out", into[p], into[p] + rows[p][r])] = (Term(p, "a", offsets(rows[p])[r] - into[p]),)
        lanes.append({"compute": (*lane, *own.last)})
    buffers = _buffers(rows)
    return Plan(
        "all_to_all", "pull", buffers | {"staged": replace(buffers["a"], role="workspace")}, tuple(lanes), result, _pieces(rows)
    )


def _through_slots(rows: Sequence[Sequence[int]], chunk_rows: int | None) -> Plan:
    ranks = range(len(rows))
    parts = [
        [Part([p] if p != r else [], start, start + count) for p, (start, count) in enumerate(zip(offsets(own), own, strict=True))]
        for r, own in enumerate(rows)
    ]
    handed = Stream("staged", parts, chunk_rows or max(1, *(count for counts in rows for count in counts)))
    into = [offsets([rows[p][r] for p in ranks]) for r in ranks]
    result = {
        Region(r, "out", into[r][p], into[r][p] + rows[p][r]): (Term(p, "a", parts[p][r].start - into[r][p]),)
        for r in ranks
        for p in ranks
        if rows[p][r]
    }

    def lane(rank: int) -> tuple[Instruction, ...]:
        own, at = parts[rank][rank], into[rank][rank]
        kept = [Copy(Region(rank, "a", own.start, own.stop), Region(rank, "out", at, at + own.stop - own.start))]
        kept = kept if own.start < own.stop else []

        def stage(step: int) -> list[Instruction]:
            return [*handed.stage(rank, step, copies(rank, "a")), *(kept if step == 0 else [])]  # peers need not wait for it

        fetch = handed.fetch(rank, "out", into[rank])
        return pipeline(rank, [handed], [stage, fetch]) if any(map(handed.steps, ranks)) else tuple(kept)

    lanes = tuple({"compute": lane(r)} for r in ranks)
    return Plan("all_to_all", "pull", _buffers(rows) | {"staged": room(handed.rows)}, lanes, result, _pieces(rows))


def _pieces(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shard ``r * ranks + p`` is what rank r has for rank p."""
    return tuple(count for counts in rows for count in counts)


def _buffers(rows: Sequence[Sequence[int]]) -> dict[str, Buffer]:
    ranks, blocks = len(rows), shards(_pieces(rows))
    return {
        "a": Buffer.of("input", [[*chain(*blocks[r * ranks : (r + 1) * ranks])] for r in range(ranks)]),
        "out": Buffer.of("output", [[*chain(*blocks[r::ranks])] for r in range(ranks)]),
    }
