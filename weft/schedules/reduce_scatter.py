"""Reduce-scatter: rank r gets the sum over all ranks of their rows of block r."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan import Buffer, Instruction, Plan, Reduce, Region, Signal, Term, Wait
from weft.schedules.common import after, around, before, offsets, publish


def reduce_scatter(rows: Sequence[int], op: str = "sum", *, symmetric_a: bool = False) -> Plan:
    """Every rank has ``sum(rows)`` rows and keeps block r of `rows[r]`, reduced in rank order where the peers' rows lie."""
    ranks, starts, total = len(rows), offsets(rows), sum(rows)
    lanes, result = [], {}
    for r in range(ranks):
        stop = starts[r] + rows[r]
        readers = [peer for peer in before(r, ranks) if rows[peer]]
        sources = after(r, ranks) if rows[r] else []
        own = publish(r, ranks, around(starts[r], stop, total), symmetric_a, readers, sources)
        lane: list[Instruction] = [*own.first, *(Wait(Signal("ready", peer), 1) for peer in sources)]
        if rows[r]:
            blocks = tuple(Region(p, "a" if p == r else own.buffer, starts[r], stop) for p in range(ranks))
            lane.append(Reduce(blocks, Region(r, "out", 0, rows[r]), op))
            result[Region(r, "out", 0, rows[r])] = tuple(Term(p, "a", starts[r]) for p in range(ranks))
        lanes.append({"compute": (*lane, *own.last)})
    buffers = {
        "a": Buffer("input", (total,) * ranks),
        "staged": Buffer("workspace", (total,) * ranks),
        "out": Buffer("output", tuple(rows)),
    }
    return Plan("reduce_scatter", "direct", buffers, tuple(lanes), result)
