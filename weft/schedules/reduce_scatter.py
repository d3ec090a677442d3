"""Reduce-scatter: rank r gets the sum over all ranks of their rows of block r."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan import Buffer, Copy, Instruction, Plan, Reduce, Region, Signal, Term, Wait
from weft.schedules.common import Hosts, after, apart, around, before, offsets, publish, tidy
from weft.schedules.host_sums import HostSums, inbox_rows, scatter


def push(rows: Sequence[int], op: str = "sum", *, chunk_rows: int, hosts: Hosts) -> Plan:
    """`reduce_scatter` over several hosts: each adds up what its ranks have, and puts it to the ranks of the others."""
    ranks, starts, total = len(rows), offsets(rows), sum(rows)
    sums = HostSums(rows, chunk_rows, op, hosts, "at once", "a" if apart(hosts) else "partial")
    lanes = [{"compute": tidy(scatter(sums._replace(rank=r), stage)) if total else ()} for r in range(ranks)]
    result = {
        Region(r, "out", 0, kept): tuple(Term(p, "a", starts[r]) for p in range(ranks)) for r, kept in enumerate(rows) if kept
    }
    buffers = {
        "a": Buffer("input", (total,) * ranks),
        "partial": Buffer("workspace", (total,) * ranks),
        "hosted": Buffer("workspace", (total,) * ranks),
        "inbox": Buffer("workspace", inbox_rows(rows, hosts)),
        "out": Buffer("output", tuple(rows)),
    }
    return Plan("reduce_scatter", "push", buffers, tuple(lanes), result)


def stage(rank: int, start: int, stop: int) -> Instruction:
    """Put this rank's rows where others can read them."""
    return Copy(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


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
