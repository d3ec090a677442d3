"""All-reduce: every rank gets the sum over all ranks of their rows. All algorithms give equal bits on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Term, Value, Wait
from weft.schedules.common import Hosts, after, apart, around, before, block, enter, everything, leave, publish, tidy
from weft.schedules.host_rings import HostRing, of_rows
from weft.schedules.host_sums import HostSums, inbox, part_of, reduce
from weft.schedules.levels import Levels, hand_out
from weft.schedules.reduce_scatter import stage, sum_of
from weft.schedules.staging import Part, Stream, copies, one_for_each, pipeline

ALGORITHMS = ("one_shot", "two_shot", "ring")


def all_reduce(
    ranks: int, pieces: int, algorithm: str, op: str = "sum", *, symmetric_a: bool = False, symmetric_out: bool = False
) -> Plan:
    """Plan for rows that are shared out over the ranks, each one's share in `pieces`.

    ``one_shot``: every rank reduces all rows in rank order where the peers' lie; least waiting. ``two_shot``: each rank reduces its
    share so, and puts it to all ranks' ``out`` if that is symmetric; else every rank copies the others' shares. Least work. Where
    neither `a` nor ``out`` is symmetric, both ways go a piece at a time.
    ``ring``: share by share from neighbour to neighbour, each adding its own, in the order of the ring; only neighbours talk.
    """
    two_shot = _two_shot_into_out if symmetric_out else _two_shot
    make = {"one_shot": _one_shot, "two_shot": two_shot, "ring": _ring}[algorithm]
    spaces = dict.fromkeys(("staged", "reduced", "inbox"), Buffer.of("workspace", everything(ranks, pieces)))
    if algorithm == "two_shot" and not (symmetric_a or symmetric_out) and ranks > 1:
        staged, reduced = _streams(ranks, pieces)
        lanes = [_through_slots(r, op, staged, reduced) for r in range(ranks)]
        spaces = {"staged": staged.room, "reduced": reduced.room}
    else:
        lanes = [tidy(make(r, ranks, pieces, op, symmetric_a)) for r in range(ranks)]
    buffers, result = _buffers(ranks, pieces) | spaces, _result(ranks, pieces)
    return Plan("all_reduce", algorithm, buffers, tuple({"compute": lane} for lane in lanes), result, (pieces,) * ranks)


def _buffers(ranks: int, pieces: int) -> dict[str, Buffer]:
    every = everything(ranks, pieces)
    return {"a": Buffer.of("input", every), "out": Buffer.of("output", every)}


def _result(ranks: int, pieces: int) -> dict[Region, Value]:
    terms = tuple(Term(p, "a", 0) for p in range(ranks))
    return {Region(r, "out", 0, ranks * pieces): terms for r in range(ranks)}


@cache
def eager(levels: Levels, op: str = "sum") -> Plan:
    """All-reduce of a few rows, whether symmetric or not: every rank hands out its own and reduces all of them, in rank order."""
    ranks, lanes = len(levels[-1]), []
    for r in range(ranks):
        everyone = tuple(Region(p, "a" if p == r else "eager", 0, ranks) for p in range(ranks))
        reduced = Reduce(everyone, Region(r, "out", 0, ranks), op)
        lanes.append({"compute": (*hand_out([everyone[r]], levels), reduced)})
    buffers = _buffers(ranks, 1) | {"eager": Buffer.of("eager", everything(ranks, 1))}
    return Plan("all_reduce", "eager", buffers, tuple(lanes), _result(ranks, 1), (1,) * ranks, meets=True)


def put(pieces: int, hosts: Hosts, algorithm: str, op: str = "sum") -> Plan:
    """All-reduce over several hosts, each of which adds up what its ranks have.

    ``two_shot``: it puts that to the ranks that keep a share each, and these put its sum to all hosts. ``ring``: it puts it to the
    next host, which adds its own, and complete sums go round once more.
    """
    ranks = len(hosts)
    sums = HostSums(pieces, op, hosts, True, "a" if apart(hosts) else "partial")
    every = [sums._replace(rank=r) for r in range(ranks)]
    made = [of_rows(HostRing(own, everywhere=True), stage) if algorithm == "ring" else reduce(own, stage) for own in every]
    spaces = dict.fromkeys(("partial", "hosted", "running", "summed"), Buffer.of("workspace", everything(ranks, pieces)))
    buffers, lanes = _buffers(ranks, pieces) | spaces | {"inbox": inbox(pieces, hosts)}, [{"compute": tidy(lane)} for lane in made]
    return Plan("all_reduce", algorithm, buffers, tuple(lanes), _result(ranks, pieces), (pieces,) * ranks)


def _one_shot(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    peers, every = after(rank, ranks), ranks * pieces
    own = publish(rank, ranks, [(0, every)], symmetric, before(rank, ranks), peers)
    everyone = tuple(Region(p, "a" if p == rank else own.buffer, 0, every) for p in range(ranks))
    waits = [Wait(Signal("ready", peer), 1) for peer in peers]
    return [*own.first, *waits, Reduce(everyone, Region(rank, "out", 0, every), op), *own.last]


def _two_shot(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    peers, start, stop = after(rank, ranks), rank * pieces, (rank + 1) * pieces
    own = publish(rank, ranks, around(start, stop, ranks * pieces), symmetric, before(rank, ranks), peers)
    sources = tuple(Region(p, "a" if p == rank else own.buffer, start, stop) for p in range(ranks))
    here = Region(rank, "reduced", start, stop)
    lane: list[Instruction] = [*own.first, *(Wait(Signal("ready", peer), 1) for peer in peers)]
    lane += [Reduce(sources, here, op), Copy(here, here._replace(buffer="out"))]
    lane += [Notify(peer, Signal("reduced", rank)) for peer in before(rank, ranks)]
    for peer in peers:
        there = Region(peer, "reduced", peer * pieces, (peer + 1) * pieces)
        lane += [Wait(Signal("reduced", peer), 1), Copy(there, there._replace(rank=rank, buffer="out"))]
    return lane + own.last


def _streams(ranks: int, pieces: int) -> tuple[Stream, Stream]:
    """What is handed to those who reduce it, and what they hand back to all: it shows that they have read the former.

    Who hands out a step to be reduced has long fetched what it was given in the steps before.
    """
    sums = [[Part(after(r, ranks), r * pieces)] for r in range(ranks)]
    return one_for_each(ranks, pieces, None), Stream("reduced", sums, pieces, "reduced", None)


def _through_slots(rank: int, op: str, staged: Stream, reduced: Stream) -> tuple[Instruction, ...]:
    """Stage a step, reduce the one before, fetch the one before that.

    Rows of ``out`` are written when this rank has staged those of ``a``, so they may be the same tensor.
    """

    def reduce_own(step: int) -> list[Instruction]:
        def make(number: int, slot: Region) -> list[Instruction]:
            own, out = block(rank, "a", number), block(rank, "out", number)
            return sum_of(rank, own, staged.arrivals(rank, step), out, op, Copy(out, slot))

        return reduced.stage(rank, step, make)

    fetch = reduced.fetch(rank, "out", [own[0].start for own in reduced.parts])
    return pipeline(rank, [staged, reduced], [lambda step: staged.stage(rank, step, copies(rank, "a")), reduce_own, fetch])


def _two_shot_into_out(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    """A share is put to its place on every rank in one pass with its sum.

    "ready" says that a rank's rows may be read and its ``out`` written; "reduced" that both is done, so nothing else need be handed
    back. Of ``a`` and ``out`` a rank uses the same share only, so they may be the same tensor.
    """
    peers, start, stop = after(rank, ranks), rank * pieces, (rank + 1) * pieces
    own = publish(rank, ranks, around(start, stop, ranks * pieces), symmetric, before(rank, ranks), peers)
    sources = tuple(Region(p, "a" if p == rank else own.buffer, start, stop) for p in range(ranks))
    here = Region(rank, "out", start, stop)
    return [
        *own.first,
        *(Wait(Signal("ready", peer), 1) for peer in peers),
        Reduce(sources, here, op),
        *(Copy(here, here._replace(rank=peer)) for peer in before(rank, ranks)),
        *(Notify(peer, Signal("reduced", rank)) for peer in before(rank, ranks)),
        *(Wait(Signal("reduced", peer), 1) for peer in peers),
    ]


def _ring(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    """Share s starts at rank s+1 and is complete at rank s, whence it goes round again as it is."""
    following, previous = (rank + 1) % ranks, Signal("arrived", (rank - 1) % ranks)
    sent = Notify(following, Signal("arrived", rank))

    def share(s: int, buffer: str, at: int = rank) -> Region:
        return Region(at, buffer, s * pieces, (s + 1) * pieces)

    lane: list[Instruction] = [*enter(rank, ranks)]
    for step in range(ranks):
        s = (rank - 1 - step) % ranks
        lane += [Wait(previous, step)] if step else []
        if step == ranks - 1:
            terms = (share(s, "inbox"), share(s, "a")) if step else (share(s, "a"),)
            lane.append(Reduce(terms, share(s, "out"), op))
        elif step:
            here = share(s, "inbox")
            lane += [Reduce((here, share(s, "a")), here, part_of(op)), Copy(here, share(s, "inbox", following)), sent]
        else:
            lane += [Copy(share(s, "a"), share(s, "inbox", following)), sent]
    for step in range(ranks - 1):
        s, arriving = (rank - step) % ranks, (rank - 1 - step) % ranks
        lane += [Copy(share(s, "out"), share(s, "reduced", following)), sent]
        lane += [Wait(previous, ranks + step), Copy(share(arriving, "reduced"), share(arriving, "out"))]
    return [*lane, *leave(rank, ranks)]
