"""Reduce-scatter: rank r gets the sum over all ranks of their rows of block r."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Plan, Reduce, Region, Signal, Term, Wait
from weft.schedules.common import Hosts, after, apart, before, everything, offsets, publish, room, shards, tidy
from weft.schedules.host_rings import HostRing, of_rows
from weft.schedules.host_sums import HostSums, inbox, scatter
from weft.schedules.levels import Levels, hand_out
from weft.schedules.staging import Arrival, Part, Stream, copies, pipeline

ALGORITHMS = ("direct", "push", "ring")


def put(rows: Sequence[int], algorithm: str, op: str = "sum", *, chunk_rows: int, hosts: Hosts) -> Plan:
    """Reduce-scatter over several hosts, each of which adds up what its ranks have.

    ``push``: it puts that to the ranks of the others; ``ring``: to the next host, which adds its own.
    """
    ranks, starts, total = len(rows), offsets(rows), sum(rows)
    sums = HostSums(rows, chunk_rows, op, hosts, True, "a" if apart(hosts) else "partial")
    every = [sums._replace(rank=r) for r in range(ranks)]
    made = (
        [of_rows(HostRing(own), stage) if algorithm == "ring" else scatter(own, stage) for own in every] if total else [[]] * ranks
    )
    result = {
        Region(r, "out", 0, kept): tuple(Term(p, "a", starts[r]) for p in range(ranks)) for r, kept in enumerate(rows) if kept
    }
    buffers = {"a": Buffer.of("input", everything(rows)), "out": Buffer.of("output", shards(rows))}
    buffers |= dict.fromkeys(("partial", "hosted", "running", "summed"), Buffer.of("workspace", everything(rows)))
    buffers["inbox"] = inbox(rows, hosts)
    return Plan("reduce_scatter", algorithm, buffers, tuple({"compute": tidy(lane)} for lane in made), result, tuple(rows))


def stage(rank: int, start: int, stop: int) -> Instruction:
    """Put this rank's rows where others can read them."""
    return Copy(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


def reduce_scatter(rows: Sequence[int], op: str = "sum", *, symmetric_a: bool = False, chunk_rows: int | None = None) -> Plan:
    """Every rank has ``sum(rows)`` rows and keeps block r of `rows[r]`, reduced in rank order.

    Where `symmetric_a` peers' rows are read where they lie; else they are handed out, `chunk_rows` of each block at a time.
    """
    ranks, starts = len(rows), offsets(rows)
    handed = blocks_of(rows, chunk_rows)
    lanes, result = [], {}
    for r in range(ranks):
        lanes.append({"compute": _direct(r, rows, op) if symmetric_a or ranks == 1 else _through_slots(r, rows, op, handed)})
        if rows[r]:
            result[Region(r, "out", 0, rows[r])] = tuple(Term(p, "a", starts[r]) for p in range(ranks))
    buffers = {
        "a": Buffer.of("input", everything(rows)),
        "staged": room(handed.rows),
        "out": Buffer.of("output", shards(rows)),
    }
    return Plan("reduce_scatter", "direct", buffers, tuple(lanes), result, tuple(rows))


@cache
def eager(rows: tuple[int, ...], levels: Levels, op: str = "sum") -> Plan:
    """Reduce-scatter of a few rows, whether symmetric or not: every rank hands out all of its own and reduces its block of them."""
    ranks, starts, lanes, result = len(rows), offsets(rows), [], {}
    for r in range(ranks):
        blocks = tuple(Region(p, "a" if p == r else "eager", starts[r], starts[r] + rows[r]) for p in range(ranks))
        handed = hand_out(Region(r, "a", 0, sum(rows)), levels)
        lanes.append({"compute": (*handed, Reduce(blocks, Region(r, "out", 0, rows[r]), op))})
        result[Region(r, "out", 0, rows[r])] = tuple(Term(p, "a", starts[r]) for p in range(ranks))
    buffers = {"a": Buffer.of("input", everything(rows)), "eager": Buffer.of("eager", everything(rows))}
    buffers["out"] = Buffer.of("output", shards(rows))
    return Plan("reduce_scatter", "eager", buffers, tuple(lanes), result, tuple(rows), meets=True)


def blocks_of(rows: Sequence[int], chunk_rows: int | None, taken: str | None = "taken") -> Stream:
    """Every rank hands each peer its rows of that peer's block."""
    starts, ranks = offsets(rows), range(len(rows))
    parts = [[Part([p] if p != r else [], starts[p], starts[p] + rows[p]) for p in ranks] for r in ranks]
    return Stream("staged", parts, chunk_rows or max(1, *rows), taken=taken)


def _direct(rank: int, rows: Sequence[int], op: str) -> tuple[Instruction, ...]:
    ranks, start = len(rows), offsets(rows)[rank]
    readers, sources = [peer for peer in before(rank, ranks) if rows[peer]], after(rank, ranks) if rows[rank] else []
    own = publish(rank, ranks, [], True, readers, sources)
    blocks = tuple(Region(p, "a", start, start + rows[rank]) for p in range(ranks))
    reduced = [Reduce(blocks, Region(rank, "out", 0, rows[rank]), op)] if rows[rank] else []
    return (*own.first, *(Wait(Signal("ready", peer), 1) for peer in sources), *reduced, *own.last)


def _through_slots(rank: int, rows: Sequence[int], op: str, handed: Stream) -> tuple[Instruction, ...]:
    start = offsets(rows)[rank]

    def reduced(step: int) -> list[Instruction]:
        if not (arrivals := handed.arrivals(rank, step)):
            return []
        own = Region(rank, "a", start + arrivals[0].at, start + arrivals[0].at + arrivals[0].region.rows)
        here = Region(rank, "out", own.start - start, own.stop - start)
        return sum_of(rank, own, arrivals, here, op)

    return pipeline(rank, [handed], [lambda step: handed.stage(rank, step, copies(rank, "a")), reduced])


def sum_of(rank: int, own: Region, arrivals: Sequence[Arrival], into: Region, op: str, *copies: Copy) -> list[Instruction]:
    """Reduce a rank's own rows and those that its peers have handed to it, in rank order, copy the sum, and thank them."""
    found = {rank: own} | {arrival.peer: arrival.region for arrival in arrivals}
    reduced = Reduce(tuple(found[r] for r in sorted(found)), into, op)
    return [*(a.wait for a in arrivals), reduced, *copies, *chain(*(a.thanks for a in arrivals))]
