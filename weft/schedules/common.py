"""What all planners share: who comes after whom, which blocks are whose, and how workspaces are
handed from plan to plan.

A rank's rows are cut into as many pieces as every other's, and a piece is a block: rank r has ``r *
pieces : (r + 1) * pieces``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from weft.plan import (
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Term,
    Value,
    Wait,
)


def after(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in rotated order, r+1 first, so that no rank is everyone's first target."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def before(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in the order in which they come to it when each visits its peers in
    rotated order: r-1 first.
    """
    return [(rank - step) % ranks for step in range(1, ranks)]


Hosts = Sequence[int]
"""The host of each rank, numbered from 0. Ranks of a host share memory; others can only be sent
rows.
"""


def apart(hosts: Hosts | None) -> bool:
    """Whether every rank has a host of its own."""
    return hosts is not None and len(set(hosts)) == len(hosts)


def members(host: int, hosts: Hosts) -> list[int]:
    """The ranks of a host."""
    return [rank for rank, its in enumerate(hosts) if its == host]


def others(rank: int, hosts: Hosts) -> list[int]:
    """The other hosts, in the order in which their ranks come after `rank`."""
    return [
        *dict.fromkeys(
            hosts[peer] for peer in after(rank, len(hosts)) if hosts[peer] != hosts[rank]
        )
    ]


def neighbours(rank: int, hosts: Hosts) -> list[int]:
    """The other ranks of its host, in rotated order."""
    return [peer for peer in after(rank, len(hosts)) if hosts[peer] == hosts[rank]]


@cache
def rail_peer(rank: int, host: int, hosts: Hosts) -> int:
    """The rank of `host` that deals with `rank` on behalf of all: itself on its own, elsewhere each
    with about as many.
    """
    return members(host, hosts)[members(hosts[rank], hosts).index(rank) % hosts.count(host)]


def block(rank: int, buffer: str, number: int) -> Region:
    """A single block of a buffer."""
    return Region(rank, buffer, number, number + 1)


def shard(rank: int, buffer: str, owner: int, pieces: int) -> Region:
    """The blocks of `owner` in a buffer that has those of all."""
    return Region(rank, buffer, owner * pieces, (owner + 1) * pieces)


def tell(rank: int, name: str, peers: Iterable[int]) -> list[Instruction]:
    """Raise the signal `name` of this rank on peers."""
    return [Notify(peer, Signal(name, rank)) for peer in peers]


def hear(name: str, peers: Iterable[int], count: int = 1) -> list[Instruction]:
    """Wait until each of these peers has raised its signal `name` so often."""
    return [Wait(Signal(name, peer), count) for peer in peers]


def enter(rank: int, ranks: int) -> list[Instruction]:
    """Hold until no rank still uses a workspace on behalf of an earlier plan; every plan that uses
    workspaces begins with it.
    """
    return hear("free", after(rank, ranks), 0)


def leave(rank: int, ranks: int) -> list[Instruction]:
    """Tell all peers that this rank has done everything it does with any workspace; the last thing
    in such a plan.
    """
    return tell(rank, "free", before(rank, ranks))


class Published(NamedTuple):
    """How a rank lets peers read its rows: what comes first and last, and the buffer in which they
    find them.
    """

    first: list[Instruction]
    last: list[Instruction]
    buffer: str


def publish(
    rank: int,
    ranks: int,
    parts: Sequence[tuple[int, int]],
    symmetric: bool,
    readers: Sequence[int],
    sources: Sequence[int],
) -> Published:
    """Let `readers` read `parts` of this rank's ``a``; this rank reads from `sources`, which
    publish theirs alike.

    Readers wait for "ready". A symmetric input is read where it lies, and is the caller's again
    only when every reader has said "read"; others are staged in a workspace. A rank that only
    publishes sends no "free": its readers' waits already cover all that it does.
    """
    ready = tell(rank, "ready", readers)
    if symmetric:
        return Published(ready, tell(rank, "read", sources) + hear("read", readers), "a")
    stage = [
        Copy(Region(rank, "a", *piece), Region(rank, "staged", *piece))
        for piece in parts
        if piece[0] < piece[1]
    ]
    first = [*enter(rank, ranks), *stage, *ready] if readers else []
    return Published(first, leave(rank, ranks) if sources else [], "staged")


def around(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """``0:total`` without ``start:stop``."""
    return [(0, start), (stop, total)]


def everything(ranks: int, pieces: int) -> tuple[range, ...]:
    """All blocks, on every rank."""
    return (range(ranks * pieces),) * ranks


def shards(ranks: int, pieces: int) -> tuple[range, ...]:
    """Each rank's own blocks."""
    return tuple(range(rank * pieces, (rank + 1) * pieces) for rank in range(ranks))


def without_products(plan: Plan) -> Plan:
    """What is left of a plan if the products are there from the beginning, as an input.

    It does not wait until peers have read that, so the caller must before it writes to it again.
    """

    def left(instruction: Instruction) -> tuple[Instruction, ...]:
        match instruction:
            case Compute(
                _, (src,), Region(_, "out") as dst
            ):  # of a single rank, whose product is the sum
                return (Reduce((src._replace(buffer="partial"),), dst),)
            case Compute(_, (src,), Region(_, "inbox") as dst):  # made where it is added up
                return (Copy(src._replace(buffer="partial"), dst),)
            case Compute():
                return ()
        return (instruction,)

    lanes = tuple(
        {name: tuple(kept for i in lane for kept in left(i)) for name, lane in lanes.items()}
        for lanes in plan.lanes
    )
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name != "a"}
    return replace(
        plan,
        lanes=lanes,
        buffers=buffers | {"partial": replace(buffers["partial"], role="input")},
        result={},
    )


def tidy(lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The lane without the waits that add nothing: those an earlier one includes, and those that a
    later one overtakes at once.
    """
    kept: list[Instruction] = []
    waited: dict[Signal, int] = {}
    waits: dict[Signal, int] = {}  # where those are kept that nothing has followed yet but waits
    for instruction in lane:
        if isinstance(instruction, Wait):
            if waited.get(instruction.signal, -1) >= instruction.count:
                continue
            waited[instruction.signal] = instruction.count
            if (place := waits.setdefault(instruction.signal, len(kept))) < len(kept):
                kept[place] = instruction
                continue
        else:
            waits.clear()
        kept.append(instruction)
    return tuple(kept)


def in_order(order: str, peers: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """``(peer, piece)`` of all pieces of these peers.

    `order` is ``peer``, peer after peer, or ``interleaved``: the first piece of every peer, then
    the second …
    """
    if order == "interleaved":
        return [(peer, piece) for piece in range(pieces) for peer in peers]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


Lanes = Mapping[str, Sequence[Instruction]]


def beside(compute: Sequence[Instruction], transfers: Iterable[Sequence[Instruction]]) -> Lanes:
    """The lane ``compute`` with lanes for transfers, where there are some, beside it: ``comm``,
    ``comm1``, …
    """
    return {"compute": compute} | {
        f"comm{number or ''}": lane for number, lane in enumerate(filter(None, transfers))
    }


def in_all(
    ranks: int, planned: tuple[int, ...] | None, lanes: Callable[[int], Lanes]
) -> tuple[Mapping[str, tuple[Instruction, ...]], ...]:
    """The lanes of all ranks, tidy, and none for those that are not `planned`."""
    made = (lanes(rank) if planned is None or rank in planned else {} for rank in range(ranks))
    return tuple({name: tidy(lane) for name, lane in of_rank.items()} for of_rank in made)


def one_lane(
    lanes: Iterable[Sequence[Instruction]],
) -> tuple[Mapping[str, tuple[Instruction, ...]], ...]:
    """The lanes of ranks that have one each, tidy."""
    return tuple({"compute": tidy(lane)} for lane in lanes)


def sum_result(
    kept: Sequence[range], planned: tuple[int, ...] | None = None, factor: str | None = None
) -> dict[Region, Value]:
    """What ``out`` must hold on the planned ranks: of the blocks that each keeps the sum over all
    ranks.

    It is one of products if there is a `factor`, the buffer that names their weight.
    """
    ranks = range(len(kept))
    return {
        Region(r, "out", 0, len(kept[r])): tuple(
            Term(p, "a", kept[r].start, (p, factor) if factor else None) for p in ranks
        )
        for r in planned or ranks
    }
