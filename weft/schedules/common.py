"""What all planners share: who comes after whom, which blocks are whose, and how workspaces are handed from plan to plan.

A rank's rows are cut into as many pieces as every other's, and a piece is a block: rank r has ``r * pieces : (r + 1) * pieces``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.plan import Buffer, Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Wait
from weft.plan.language import ROOM


def after(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in rotated order, r+1 first, so that no rank is everyone's first target."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def before(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in the order in which they come to it when each visits its peers in rotated order: r-1 first."""
    return [(rank - step) % ranks for step in range(1, ranks)]


Hosts = Sequence[int]
"""The host of each rank, numbered from 0. Ranks of a host share memory; others can only be sent rows."""


def apart(hosts: Hosts | None) -> bool:
    """Whether every rank has a host of its own."""
    return hosts is not None and len(set(hosts)) == len(hosts)


def members(host: int, hosts: Hosts) -> list[int]:
    """The ranks of a host."""
    return [rank for rank, its in enumerate(hosts) if its == host]


def others(rank: int, hosts: Hosts) -> list[int]:
    """The other hosts, in the order in which their ranks come after `rank`."""
    return [*dict.fromkeys(hosts[peer] for peer in after(rank, len(hosts)) if hosts[peer] != hosts[rank])]


def neighbours(rank: int, hosts: Hosts) -> list[int]:
    """The other ranks of its host, in rotated order."""
    return [peer for peer in after(rank, len(hosts)) if hosts[peer] == hosts[rank]]


def rail_peer(rank: int, host: int, hosts: Hosts) -> int:
    """The rank of `host` that deals with `rank` of another host on behalf of all: each has about as many to deal with."""
    return members(host, hosts)[members(hosts[rank], hosts).index(rank) % hosts.count(host)]


def block(rank: int, buffer: str, number: int) -> Region:
    """A single block of a buffer."""
    return Region(rank, buffer, number, number + 1)


def enter(rank: int, ranks: int) -> list[Wait]:
    """Hold until no rank still uses a workspace on behalf of an earlier plan; every plan that uses workspaces begins with it."""
    return [Wait(Signal("free", peer), 0) for peer in after(rank, ranks)]


def leave(rank: int, ranks: int) -> list[Notify]:
    """Tell all peers that this rank has done everything it does with any workspace; the last thing in such a plan."""
    return [Notify(peer, Signal("free", rank)) for peer in before(rank, ranks)]


class Published(NamedTuple):
    """How a rank lets peers read its rows: what comes first and last, and the buffer in which they find them."""

    first: list[Instruction]
    last: list[Instruction]
    buffer: str


def publish(
    rank: int, ranks: int, parts: Sequence[tuple[int, int]], symmetric: bool, readers: Sequence[int], sources: Sequence[int]
) -> Published:
    """Let `readers` read `parts` of this rank's ``a``; this rank reads from `sources`, which publish theirs alike.

    Readers wait for "ready". A symmetric input is read where it lies, and is the caller's again only when every reader has said
    "read"; others are staged in a workspace. A rank that only publishes sends no "free": its readers' waits already cover all that
    it does.
    """
    ready: list[Instruction] = [Notify(peer, Signal("ready", rank)) for peer in readers]
    if symmetric:
        read: list[Instruction] = [Notify(peer, Signal("read", rank)) for peer in sources]
        return Published(ready, [*read, *(Wait(Signal("read", peer), 1) for peer in readers)], "a")
    stage = [Copy(Region(rank, "a", *piece), Region(rank, "staged", *piece)) for piece in parts if piece[0] < piece[1]]
    first = [*enter(rank, ranks), *stage, *ready] if readers else []
    return Published(first, [*leave(rank, ranks)] if sources else [], "staged")


def around(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """``0:total`` without ``start:stop``."""
    return [(0, start), (stop, total)]


def everything(ranks: int, pieces: int) -> tuple[range, ...]:
    """All blocks, on every rank."""
    return (range(ranks * pieces),) * ranks


def shards(ranks: int, pieces: int) -> tuple[range, ...]:
    """Each rank's own blocks."""
    return tuple(range(rank * pieces, (rank + 1) * pieces) for rank in range(ranks))


def room(blocks: Sequence[int]) -> Buffer:
    """Workspaces with room for so many blocks on each rank."""
    return Buffer.of("workspace", [(ROOM,) * count for count in blocks])


def without_products(plan: Plan) -> Plan:
    """What is left of a plan if the products are there from the beginning, as an input.

    It does not wait until peers have read that, so the caller must before it writes to it again.
    """

    def left(instruction: Instruction) -> tuple[Instruction, ...]:
        match instruction:
            case Matmul(src, Region(_, "out") as dst):  # of a single rank, whose product is the sum
                return (Reduce((src._replace(buffer="partial"),), dst),)
            case Matmul(src, Region(_, "inbox") as dst):  # made where it is added up
                return (Copy(src._replace(buffer="partial"), dst),)
            case Matmul():
                return ()
        return (instruction,)

    lanes = tuple({name: tuple(kept for i in lane for kept in left(i)) for name, lane in lanes.items()} for lanes in plan.lanes)
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name != "a"}
    return replace(plan, lanes=lanes, buffers=buffers | {"partial": replace(buffers["partial"], role="input")}, result={})


def tidy(lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The lane without the waits that add nothing: those an earlier one includes, and those that a later one overtakes at once."""
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


def tidied(lanes: Mapping[str, Sequence[Instruction]]) -> Lanes:
    """All lanes of a rank, tidy."""
    return {name: tidy(lane) for name, lane in lanes.items()}


def in_order(order: str, peers: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """``(peer, piece)`` of all pieces of these peers.

    `order` is ``peer``, peer after peer, or ``interleaved``: the first piece of every peer, then the second …
    """
    if order == "interleaved":
        return [(peer, piece) for piece in range(pieces) for peer in peers]
    return [(peer, piece) for peer in peers for piece in range(pieces)]


def side_lanes(transfers: Sequence[Sequence[Instruction]]) -> dict[str, tuple[Instruction, ...]]:
    """Lanes for transfers: ``comm``, ``comm1``, …"""
    return {f"comm{number or ''}": tidy(lane) for number, lane in enumerate(transfers)}


Lanes = Mapping[str, tuple[Instruction, ...]]


def in_all(ranks: int, planned: tuple[int, ...] | None, lanes: Callable[[int], Lanes]) -> tuple[Lanes, ...]:
    """The lanes of all ranks, empty for those that are not `planned`."""
    return tuple(lanes(rank) if planned is None or rank in planned else {} for rank in range(ranks))
