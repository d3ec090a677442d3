"""All-reduce: every rank gets the sum over all ranks of their rows. All algorithms give equal bits on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Role, Signal, Term, Wait
from weft.schedules.common import Hosts, after, apart, around, before, enter, everything, leave, offsets, publish, room, split, tidy
from weft.schedules.host_rings import HostRing, of_rows
from weft.schedules.host_sums import HostSums, inbox, part_of, reduce
from weft.schedules.levels import Levels, hand_out
from weft.schedules.reduce_scatter import blocks_of, stage, sum_of
from weft.schedules.staging import Part, Stream, copies, pipeline

ALGORITHMS = ("one_shot", "two_shot", "ring")


def all_reduce(
    rows: int,
    ranks: int,
    algorithm: str,
    op: str = "sum",
    *,
    symmetric_a: bool = False,
    symmetric_out: bool = False,
    chunk_rows: int | None = None,
) -> Plan:
    """Plan for `rows` rows on each of `ranks` ranks.

    ``one_shot``: every rank reduces all rows in rank order where the peers' lie; least waiting. ``two_shot``: rank r reduces block
    r so, and puts it to all ranks' ``out`` if that is symmetric; else every rank copies the others' blocks. Least work. Where
    neither `a` nor ``out`` is symmetric, both ways go `chunk_rows` of each block at a time.
    ``ring``: block by block from neighbour to neighbour, each adding its own, in the order of the ring; only neighbours talk.
    """
    if rows < ranks:  # not a row for everyone: there is nothing to share out
        algorithm = "one_shot"
    two_shot = _two_shot_into_out if symmetric_out else _two_shot
    make = {"one_shot": _one_shot, "two_shot": two_shot, "ring": _ring}[algorithm]
    blocks = split(rows, ranks)
    buffers = {"a": Buffer.of("input", everything(blocks)), "out": Buffer.of("output", everything(blocks))}
    spaces = dict.fromkeys(("staged", "reduced", "inbox"), Buffer.of("workspace", everything(blocks)))
    if algorithm == "two_shot" and not (symmetric_a or symmetric_out) and ranks > 1:
        staged, reduced = _streams(blocks, chunk_rows)
        lanes = tuple({"compute": _through_slots(r, op, staged, reduced)} for r in range(ranks))
        spaces = {"staged": room(staged.rows), "reduced": room(reduced.rows)}
    else:
        lanes = tuple({"compute": tidy(make(r, rows, ranks, op, symmetric_a)) if rows else ()} for r in range(ranks))
    terms = tuple(Term(p, "a", 0) for p in range(ranks))
    result = {Region(r, "out", 0, rows): terms for r in range(ranks) if rows}
    return Plan("all_reduce", algorithm, buffers | spaces, lanes, result, tuple(blocks))


@cache
def eager(rows: int, levels: Levels, op: str = "sum") -> Plan:
    """All-reduce of a few rows, whether symmetric or not: every rank hands out its own and reduces all of them, in rank order."""
    ranks, every = len(levels[-1]), range(rows)
    lanes = []
    for r in range(ranks):
        everyone = tuple(Region(p, "a" if p == r else "eager", 0, rows) for p in range(ranks))
        reduced = Reduce(everyone, Region(r, "out", 0, rows), op)
        lanes.append({"compute": (*hand_out(everyone[r], levels), reduced)})
    terms = tuple(Term(p, "a", 0) for p in range(ranks))
    roles: tuple[Role, ...] = ("input", "output", "eager")
    buffers = {name: Buffer.of(role, [every] * ranks) for name, role in zip(("a", "out", "eager"), roles, strict=True)}
    result = {Region(r, "out", 0, rows): terms for r in range(ranks)}
    return Plan("all_reduce", "eager", buffers, tuple(lanes), result, tuple(split(rows, ranks)), meets=True)


def put(rows: int, ranks: int, algorithm: str, op: str = "sum", *, chunk_rows: int, hosts: Hosts) -> Plan:
    """All-reduce over several hosts, each of which adds up what its ranks have.

    ``two_shot``: it puts that to the ranks that keep a block each, and these put its sum to all hosts. ``ring``: it puts it to the
    next host, which adds its own, and complete sums go round once more.
    """
    blocks = split(rows, ranks)
    sums = HostSums(blocks, chunk_rows, op, hosts, True, "a" if apart(hosts) else "partial")
    every = [sums._replace(rank=r) for r in range(ranks)]
    ring = algorithm == "ring"
    made = (
        [of_rows(HostRing(own, everywhere=True), stage) if ring else reduce(own, stage) for own in every] if rows else [[]] * ranks
    )
    buffers = {"a": Buffer.of("input", everything(blocks)), "out": Buffer.of("output", everything(blocks))}
    buffers |= dict.fromkeys(("partial", "hosted", "running", "summed"), Buffer.of("workspace", everything(blocks)))
    buffers["inbox"] = inbox(blocks, hosts)
    terms, lanes = tuple(Term(p, "a", 0) for p in range(ranks)), tuple({"compute": tidy(lane)} for lane in made)
    result = {Region(r, "out", 0, rows): terms for r in range(ranks) if rows}
    return Plan("all_reduce", algorithm, buffers, lanes, result, tuple(blocks))


def _one_shot(rank: int, rows: int, ranks: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    peers = after(rank, ranks)
    own = publish(rank, ranks, [(0, rows)], symmetric, before(rank, ranks), peers)
    everyone = tuple(Region(p, "a" if p == rank else own.buffer, 0, rows) for p in range(ranks))
    return [
        *own.first,
        *(Wait(Signal("ready", peer), 1) for peer in peers),
        Reduce(everyone, Region(rank, "out", 0, rows), op),
        *own.last,
    ]


def _two_shot(rank: int, rows: int, ranks: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    blocks = split(rows, ranks)
    starts = offsets(blocks)
    start, stop = starts[rank], starts[rank] + blocks[rank]
    readers = [peer for peer in before(rank, ranks) if blocks[peer]]
    reducers = [peer for peer in after(rank, ranks) if blocks[peer]]
    own = publish(rank, ranks, around(start, stop, rows), symmetric, readers, after(rank, ranks) if blocks[rank] else [])
    lane: list[Instruction] = [*own.first]
    if blocks[rank]:
        sources = tuple(Region(p, "a" if p == rank else own.buffer, start, stop) for p in range(ranks))
        here = Region(rank, "reduced", start, stop)
        lane += [Wait(Signal("ready", peer), 1) for peer in after(rank, ranks)]
        lane += [Reduce(sources, here, op), Copy(here, here._replace(buffer="out"))]
        lane += [Notify(peer, Signal("reduced", rank)) for peer in before(rank, ranks)]
    for peer in reducers:
        there = Region(peer, "reduced", starts[peer], starts[peer] + blocks[peer])
        lane += [Wait(Signal("reduced", peer), 1), Copy(there, there._replace(rank=rank, buffer="out"))]
    return lane + own.last


def _streams(blocks: Sequence[int], chunk_rows: int | None) -> tuple[Stream, Stream]:
    """What is handed to those who reduce it, and what they hand back to all: it shows that they have read the former.

    Who hands out a step to be reduced has long fetched what it was given in the steps before.
    """
    staged, ranks = blocks_of(blocks, chunk_rows, None), len(blocks)
    sums = [[Part(after(r, ranks), start, start + blocks[r])] for r, start in enumerate(offsets(blocks))]
    return staged, Stream("reduced", sums, staged.chunk, "reduced", None)


def _through_slots(rank: int, op: str, staged: Stream, reduced: Stream) -> tuple[Instruction, ...]:
    """Stage a step, reduce the one before, fetch the one before that.

    Rows of ``out`` are written when this rank has staged those of ``a``, so they may be the same tensor.
    """

    def reduce_own(step: int) -> list[Instruction]:
        arrivals = staged.arrivals(rank, step)

        def make(part: Part, there: Region) -> list[Instruction]:
            own = Region(rank, "a", part.start, part.stop)
            out = own._replace(buffer="out")
            return sum_of(rank, own, arrivals, out, op, Copy(out, there))

        return reduced.stage(rank, step, make)

    fetch = reduced.fetch(rank, "out", [own[0].start for own in reduced.parts])
    return pipeline(rank, [staged, reduced], [lambda step: staged.stage(rank, step, copies(rank, "a")), reduce_own, fetch])


def _two_shot_into_out(rank: int, rows: int, ranks: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    """A block is put to its place on every rank in one pass with its sum.

    "ready" says that a rank's rows may be read and its ``out`` written; "reduced" that both is done, so nothing else need be handed
    back. Of ``a`` and ``out`` a rank
    uses the same block only, so they may be the same tensor.
    """
    blocks, peers = split(rows, ranks), after(rank, ranks)
    start = offsets(blocks)[rank]
    stop = start + blocks[rank]
    own = publish(rank, ranks, around(start, stop, rows), symmetric, before(rank, ranks), peers)
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


def _ring(rank: int, rows: int, ranks: int, op: str, symmetric: bool) -> Sequence[Instruction]:
    """Block b starts at rank b+1 and is complete at rank b, whence it goes round again as it is."""
    blocks = split(rows, ranks)
    starts = offsets(blocks)
    following, previous = (rank + 1) % ranks, Signal("arrived", (rank - 1) % ranks)
    sent, received = Notify(following, Signal("arrived", rank)), 0

    def block(b: int, buffer: str, at: int = rank) -> Region:
        return Region(at, buffer, starts[b], starts[b] + blocks[b])

    lane: list[Instruction] = [*enter(rank, ranks)]
    for step in range(ranks):
        b = (rank - 1 - step) % ranks
        if not blocks[b]:
            continue
        if step:
            received += 1
            lane.append(Wait(previous, received))
        if step == ranks - 1:
            sources = (block(b, "inbox"), block(b, "a")) if ranks > 1 else (block(b, "a"),)
            lane.append(Reduce(sources, block(b, "out"), op))
        elif step:
            here = block(b, "inbox")
            lane += [Reduce((here, block(b, "a")), here, part_of(op)), Copy(here, block(b, "inbox", following)), sent]
        else:
            lane += [Copy(block(b, "a"), block(b, "inbox", following)), sent]
    for step in range(ranks - 1):
        b, arriving = (rank - step) % ranks, (rank - 1 - step) % ranks
        if blocks[b]:
            lane += [Copy(block(b, "out"), block(b, "reduced", following)), sent]
        if blocks[arriving]:
            received += 1
            lane += [Wait(previous, received), Copy(block(arriving, "reduced"), block(arriving, "out"))]
    return [*lane, *leave(rank, ranks)]
