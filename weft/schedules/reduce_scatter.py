"""Reduce-scatter: rank r gets the sum over all ranks of their rows of block r."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

from weft.plan import Buffer, Copy, Instruction, Plan, Reduce, Region, Signal, Term, Value, Wait
from weft.schedules.common import Hosts, after, apart, around, before, block, everything, publish, shards, tidy
from weft.schedules.host_rings import HostRing, of_rows
from weft.schedules.host_sums import HostSums, inbox, scatter
from weft.schedules.levels import Levels, hand_out
from weft.schedules.staging import Arrival, Stream, copies, one_for_each, pipeline

ALGORITHMS = ("direct", "push", "ring")


def put(pieces: int, hosts: Hosts, algorithm: str, op: str = "sum") -> Plan:
    """Reduce-scatter over several hosts, each of which adds up what its ranks have.

    ``push``: it puts that to the ranks of the others; ``ring``: to the next host, which adds its own.
    """
    ranks = len(hosts)
    sums = HostSums(pieces, op, hosts, True, "a" if apart(hosts) else "partial")
    every = [sums._replace(rank=r) for r in range(ranks)]
    made = [of_rows(HostRing(own), stage) if algorithm == "ring" else scatter(own, stage) for own in every]
    spaces = dict.fromkeys(("partial", "hosted", "running", "summed"), Buffer.of("workspace", everything(ranks, pieces)))
    lanes = tuple({"compute": tidy(lane)} for lane in made)
    buffers = _buffers(ranks, pieces) | spaces | {"inbox": inbox(pieces, hosts)}
    return Plan("reduce_scatter", algorithm, buffers, lanes, _result(ranks, pieces), (pieces,) * ranks)


def _buffers(ranks: int, pieces: int) -> dict[str, Buffer]:
    return {"a": Buffer.of("input", everything(ranks, pieces)), "out": Buffer.of("output", shards(ranks, pieces))}


def _result(ranks: int, pieces: int) -> dict[Region, Value]:
    return {Region(r, "out", 0, pieces): tuple(Term(p, "a", r * pieces) for p in range(ranks)) for r in range(ranks)}


def stage(rank: int, start: int, stop: int) -> Instruction:
    """Put this rank's rows where others can read them."""
    return Copy(Region(rank, "a", start, stop), Region(rank, "partial", start, stop))


def reduce_scatter(ranks: int, pieces: int, op: str = "sum", *, symmetric_a: bool = False) -> Plan:
    """Every rank keeps its own rows of all, cut into `pieces`, reduced in rank order.

    Where `symmetric_a` peers' rows are read where they lie; else they are handed out, a piece for each peer at a time.
    """
    handed, direct = one_for_each(ranks, pieces), symmetric_a or ranks == 1
    made = [_direct(r, ranks, pieces, op) if direct else _through_slots(r, op, handed) for r in range(ranks)]
    buffers, lanes = _buffers(ranks, pieces) | {"staged": handed.room}, tuple({"compute": lane} for lane in made)
    return Plan("reduce_scatter", "direct", buffers, lanes, _result(ranks, pieces), (pieces,) * ranks)


@cache
def eager(levels: Levels, op: str = "sum") -> Plan:
    """Reduce-scatter of a few rows, whether symmetric or not: every rank hands out what others keep and reduces what it keeps."""
    ranks, lanes = len(levels[-1]), []
    for r in range(ranks):
        terms = tuple(block(p, "a", r) if p == r else block(p, "eager", r - (r > p)) for p in range(ranks))
        handed = hand_out([Region(r, "a", *part) for part in around(r, r + 1, ranks)], levels)
        lanes.append({"compute": (*handed, Reduce(terms, block(r, "out", 0), op))})
    buffers = _buffers(ranks, 1) | {"eager": Buffer.of("eager", [[p for p in range(ranks) if p != r] for r in range(ranks)])}
    return Plan("reduce_scatter", "eager", buffers, tuple(lanes), _result(ranks, 1), (1,) * ranks, meets=True)


def _direct(rank: int, ranks: int, pieces: int, op: str) -> tuple[Instruction, ...]:
    peers, start = after(rank, ranks), rank * pieces
    own = publish(rank, ranks, [], True, before(rank, ranks), peers)
    terms = tuple(Region(p, "a", start, start + pieces) for p in range(ranks))
    reduced = Reduce(terms, Region(rank, "out", 0, pieces), op)
    return (*own.first, *(Wait(Signal("ready", peer), 1) for peer in peers), reduced, *own.last)


def _through_slots(rank: int, op: str, handed: Stream) -> tuple[Instruction, ...]:
    def reduced(step: int) -> list[Instruction]:
        if step >= handed.pieces:
            return []
        own = block(rank, "a", rank * handed.pieces + step)
        return sum_of(rank, own, handed.arrivals(rank, step), block(rank, "out", step), op)

    return pipeline(rank, [handed], [lambda step: handed.stage(rank, step, copies(rank, "a")), reduced])


def sum_of(rank: int, own: Region, arrivals: Sequence[Arrival], into: Region, op: str, *copies: Copy) -> list[Instruction]:
    """Reduce a rank's own rows and those that its peers have handed to it, in rank order, copy the sum, and thank them."""
    found = {rank: own} | {arrival.peer: arrival.region for arrival in arrivals}
    reduced = Reduce(tuple(found[r] for r in sorted(found)), into, op)
    return [*(a.wait for a in arrivals), reduced, *copies, *chain(*(a.thanks for a in arrivals))]
