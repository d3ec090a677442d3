"""All-to-all: block p of rank r's rows goes to rank p, as its block r."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan import Buffer, Copy, Instruction, Plan, Region, Signal, Term, Wait
from weft.schedules.common import after, around, before, offsets, publish


def all_to_all(rows: Sequence[Sequence[int]], *, symmetric_a: bool = False) -> Plan:
    """Plan for `rows[r][p]` rows from rank r to rank p; every rank gets its blocks where they lie."""
    ranks = len(rows)
    lanes, result = [], {}
    for r in range(ranks):
        received = [rows[p][r] for p in range(ranks)]
        at, into = offsets(rows[r]), offsets(received)
        sources = [p for p in after(r, ranks) if rows[p][r]]
        readers = [p for p in before(r, ranks) if rows[r][p]]
        own = publish(r, ranks, around(at[r], at[r] + rows[r][r], sum(rows[r])), symmetric_a, readers, sources)
        lane: list[Instruction] = [*own.first]
        for p in [r, *sources]:
            start = offsets(rows[p])[r]
            here = Region(r, "out", into[p], into[p] + rows[p][r])
            lane += [Wait(Signal("ready", p), 1)] if p != r else []
            lane += [Copy(Region(p, "a" if p == r else own.buffer, start, start + here.rows), here)] if here.rows else []
            if here.rows:
                result[here] = (Term(p, "a", start - here.start),)
        lanes.append({"compute": (*lane, *own.last)})
    sent = tuple(sum(counts) for counts in rows)
    buffers = {
        "a": Buffer("input", sent),
        "staged": Buffer("workspace", sent),
        "out": Buffer("output", tuple(sum(counts) for counts in zip(*rows, strict=True))),
    }
    return Plan("all_to_all", "pull", buffers, tuple(lanes), result)
