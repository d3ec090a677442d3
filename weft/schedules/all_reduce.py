"""All-reduce: every rank gets the sum over all ranks of their rows. All algorithms give equal bits
on all ranks.

Rank 0 of two, in two pieces of a share, time to the right; ``!`` notifies the peer, ``?`` waits for
it::

    one_shot  | stage all rows |!|?| add all rows |
    two_shot  | stage its rows 0 |!| stage 1 |!|?| add own share 0 |!|?| add 1 |!|
                |?| get the peer's sums 0 |?| get 1 |
"""

from __future__ import annotations

from functools import cache, partial

from weft.plan import Buffer, Copy, Instruction, Notify, Plan, Reduce, Region, Signal, Wait
from weft.plan.binding import split
from weft.schedules.blocks import block, everything, shard
from weft.schedules.host_sums import part_of
from weft.schedules.lanes import (
    Lanes,
    by_rank,
    enter,
    leave,
    notify_all,
    over_hosts,
    wait_all,
)
from weft.schedules.levels import Levels, send_eagerly
from weft.schedules.peers import Hosts, Layout, after, before, layout
from weft.schedules.reduce_scatter import put_sums, reduce_published, sum_of, sum_plan
from weft.schedules.staging import Part, Stream, one_for_each, pipeline
from weft.schedules.workload import Collective

ALGORITHMS = ("one_shot", "two_shot", "ring")


def all_reduce(
    ranks: int,
    pieces: int,
    algorithm: str,
    op: str = "sum",
    *,
    symmetric_a: bool = False,
    symmetric_out: bool = False,
) -> Plan:
    """The plan of an all-reduce of rows of which each rank has a share, cut into `pieces`.

    ``one_shot``: every rank reduces all rows in rank order, peers' rows in place; least waiting.
    ``two_shot``: each rank reduces its share in the same manner, and puts the sum to the ``out`` of
    all ranks if it is symmetric; else every rank copies the shares of its peers. Least work. If
    neither `a` nor ``out`` is symmetric, rows and sums are staged a piece at a time. ``ring``: each
    share passes from rank to rank, and each rank adds its own rows, in the order of the ring; only
    adjacent ranks communicate.
    """
    if algorithm == "two_shot" and not (symmetric_a or symmetric_out) and ranks > 1:
        staged, reduced = _streams(ranks, pieces)
        make = partial(_through_slots, op=op, staged=staged, reduced=reduced)
        spaces = {"staged": staged.slots, "reduced": reduced.slots}
    else:
        two_shot = _two_shot_into_out if symmetric_out else _two_shot
        of = {"one_shot": _one_shot, "two_shot": two_shot, "ring": _ring}[algorithm]
        make = partial(of, ranks=ranks, pieces=pieces, op=op, symmetric=symmetric_a)
        spaces = dict.fromkeys(
            ("staged", "reduced", "inbox"), Buffer.of("workspace", everything(ranks, pieces))
        )
    request = ranks, pieces, op, symmetric_a, symmetric_out
    lanes = by_rank(ranks, lambda rank: {"compute": make(rank)}, request)
    return sum_plan("all_reduce", algorithm, pieces, op, lanes, spaces, everywhere=True)


@cache
def eager(levels: Levels, op: str = "sum") -> Plan:
    """All-reduce of a few rows, symmetric or not: every rank sends its rows eagerly and reduces all
    rows, in rank order.
    """
    ranks = len(levels[-1])

    def lanes(r: int) -> Lanes:
        everyone = tuple(Region(p, "a" if p == r else "eager", 0, ranks) for p in range(ranks))
        reduced = Reduce(everyone, Region(r, "out", 0, ranks), op)
        return {"compute": [*send_eagerly([everyone[r]], levels), reduced]}

    sent = Buffer.of("eager", everything(ranks, 1))
    every = by_rank(ranks, lanes, (levels, op))
    spaces = {"eager": sent}
    return sum_plan("all_reduce", "eager", 1, op, every, spaces, everywhere=True)


@cache
def eager_over_hosts(hosts: Hosts, op: str = "sum") -> Plan:
    """All-reduce of a few rows over hosts of one rank each: every rank puts its rows to all, and
    reduces all rows, in rank order. So they cross the wire once, which costs less than waiting
    twice.
    """
    ranks = len(hosts)

    def lanes(r: int, hosts: Layout) -> Lanes:
        own = rows_of(r, r)
        lane: list[Instruction] = [Copy(Region(r, "a", 0, ranks), own)]
        for peer in after(r, hosts):
            lane += [Copy(own, rows_of(r, peer)), *notify_all(r, "arrived", [peer])]
        lane += wait_all("arrived", after(r, hosts))
        terms = tuple(rows_of(peer, r) for peer in range(ranks))
        return {"compute": [*lane, Reduce(terms, Region(r, "out", 0, ranks), op)]}

    def rows_of(rank: int, on: int) -> Region:
        return Region(on, "eager", rank * ranks, (rank + 1) * ranks)

    every = over_hosts(layout(hosts), lanes, (tuple(hosts), op))
    spaces = {"eager": Buffer.of("eager", [[*range(ranks)] * ranks] * ranks)}
    return sum_plan("all_reduce", "eager", 1, op, every, spaces, everywhere=True)


def put(pieces: int, hosts: Hosts, algorithm: str, op: str = "sum") -> Plan:
    """All-reduce over several hosts, each of which adds up the rows of its ranks.

    ``two_shot``: each host puts the sum of a share to the rank that owns the share, which puts the
    total to all hosts. ``ring``: it puts the sum to the next host, which adds its own, and complete
    sums go round once more.
    """
    return put_sums("all_reduce", pieces, hosts, algorithm, op, everywhere=True)


def _one_shot(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> list[Instruction]:
    every = 0, ranks * pieces
    lane, last = reduce_published(
        rank, ranks, pieces, every, Region(rank, "out", *every), op, symmetric=symmetric
    )
    return lane + last


def _two_shot(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> list[Instruction]:
    here = shard(rank, "out", rank, pieces)
    lane, last = reduce_published(rank, ranks, pieces, here[2:], here, op, symmetric=symmetric)
    if (
        ranks > 1
        # in this order only peers read the copy, so an engine may use non-temporal stores
    ):
        lane += [
            Copy(here, here._replace(buffer="reduced")),
            *notify_all(rank, "reduced", before(rank, ranks)),
        ]
    for peer in after(rank, ranks):
        lane += [
            Wait(Signal("reduced", peer), 1),
            Copy(shard(peer, "reduced", peer, pieces), shard(rank, "out", peer, pieces)),
        ]
    return lane + last


def _streams(ranks: int, pieces: int) -> tuple[Stream, Stream]:
    """The stream of rows to the ranks that reduce them, and the stream of sums back to all ranks.

    Neither needs "taken": a sum arrives only after its rows were read, and a rank that stages the
    rows of a step has fetched the sums of the steps whose slots are used again.
    """
    sums = [[Part(after(r, ranks), r * pieces)] for r in range(ranks)]
    return one_for_each(ranks, pieces, None), Stream("reduced", sums, pieces, "reduced", None)


def _through_slots(rank: int, op: str, staged: Stream, reduced: Stream) -> list[Instruction]:
    """Stage a step, reduce the previous one, fetch the one before it.

    Rows of ``out`` are written after this rank has staged the same rows of ``a``, so both may be
    one tensor.
    """

    def reduce_own(step: int) -> list[Instruction]:
        def make(number: int, slot: Region) -> list[Instruction]:
            own, out = block(rank, "a", number), block(rank, "out", number)
            return sum_of(rank, own, staged.arrivals(rank, step), out, op, Copy(out, slot))

        return reduced.stage(rank, step, make)

    fetch = reduced.fetch(rank, "out", [own[0].start for own in reduced.parts])
    return pipeline(rank, [staged, reduced], [staged.stage_own(rank), reduce_own, fetch])


def _two_shot_into_out(
    rank: int, ranks: int, pieces: int, op: str, symmetric: bool
) -> list[Instruction]:
    """A share is put to its place on every rank in one pass with its sum.

    "ready" permits peers to read a rank's rows and to write its ``out``; "reduced" states that both
    is done, so no other signal releases them. A rank accesses the same share of ``a`` and of
    ``out`` only, so both may be one tensor.
    """
    here = shard(rank, "out", rank, pieces)
    targets = before(rank, ranks)
    lane, _ = reduce_published(rank, ranks, pieces, here[2:], here, op, symmetric=symmetric)
    lane += [Copy(here, here._replace(rank=peer)) for peer in targets]
    return lane + notify_all(rank, "reduced", targets) + wait_all("reduced", after(rank, ranks))


def _ring(rank: int, ranks: int, pieces: int, op: str, symmetric: bool) -> list[Instruction]:
    """Share s starts at rank s+1 and is complete at rank s, from which its sum goes round again."""
    following = (rank + 1) % ranks
    previous = Signal("arrived", (rank - 1) % ranks)
    sent = Notify(following, Signal("arrived", rank))
    lane = enter(rank, ranks)
    for step in range(ranks):
        s = (rank - 1 - step) % ranks
        own, here = shard(rank, "a", s, pieces), shard(rank, "inbox", s, pieces)
        terms = (here, own) if step else (own,)
        lane += [Wait(previous, step)] if step else []
        if step == ranks - 1:
            lane.append(Reduce(terms, here._replace(buffer="out"), op))
        else:
            lane += [Reduce(terms, here, part_of(op))] if step else []
            lane += [Copy(here if step else own, here._replace(rank=following)), sent]
    for step in range(ranks - 1):
        out, arriving = (shard(rank, "out", (rank - s) % ranks, pieces) for s in (step, step + 1))
        lane += [Copy(out, out._replace(rank=following, buffer="reduced")), sent]
        lane += [Wait(previous, ranks + step), Copy(arriving._replace(buffer="reduced"), arriving)]
    return lane + leave(rank, ranks)


COLLECTIVE = Collective(
    "all_reduce",
    ALGORITHMS,
    lambda request: all_reduce(
        request.ranks,
        request.pieces,
        request.algorithm,
        symmetric_a=request.symmetric,
        symmetric_out=request.symmetric,
    ),
    eager,
    default_shards=split,
    reduces=True,
    reads_peers=("one_shot",),
    predicted=ALGORITHMS,
)
