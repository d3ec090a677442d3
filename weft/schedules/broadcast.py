"""Broadcast: every rank gets the rows of one of them, the source."""

from __future__ import annotations

from weft.plan import Buffer, Copy, Instruction, Plan, Region, Signal, Term, Wait
from weft.schedules.common import before, publish


def broadcast(rows: int, ranks: int, source: int, *, symmetric_a: bool = False) -> Plan:
    """All ranks but `source` get its rows where they lie. The source has them as ``a``, the others as ``out``."""
    lanes, result = [], {}
    for r in range(ranks):
        if r == source:
            own = publish(r, ranks, [(0, rows)], symmetric_a, before(r, ranks) if rows else [], [])
            lanes.append({"compute": (*own.first, *own.last)})
            continue
        own = publish(r, ranks, [], symmetric_a, [], [source] if rows else [])
        there, here = Region(source, own.buffer, 0, rows), Region(r, "out", 0, rows)
        fetch: list[Instruction] = [Wait(Signal("ready", source), 1), Copy(there, here)] if rows else []
        lanes.append({"compute": (*fetch, *own.last)})
        if rows:
            result[here] = (Term(source, "a", 0),)
    at_source = tuple(rows if r == source else 0 for r in range(ranks))
    buffers = {
        "a": Buffer("input", at_source),
        "staged": Buffer("workspace", at_source),
        "out": Buffer("output", tuple(rows - there for there in at_source)),
    }
    return Plan("broadcast", "pull", buffers, tuple(lanes), result)
