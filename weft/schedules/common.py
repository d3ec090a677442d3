"""What all planners share: who comes after whom, how rows are cut, and how workspaces are handed from plan to plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Copy, Instruction, Notify, Region, Signal, Wait


def after(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in rotated order, r+1 first, so that no rank is everyone's first target."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def before(rank: int, ranks: int) -> list[int]:
    """The peers of `rank` in the order in which they come to it when each visits its peers in rotated order: r-1 first."""
    return [(rank - step) % ranks for step in range(1, ranks)]


def offsets(rows: Sequence[int]) -> list[int]:
    """Where each rank's rows begin in the gathered matrix."""
    return [0, *accumulate(rows)][:-1]


def chunks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """``0:rows`` cut into pieces of `size` rows, the last one possibly shorter."""
    return ((start, min(start + size, rows)) for start in range(0, rows, size))


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
    rank: int, ranks: int, pieces: Sequence[tuple[int, int]], symmetric: bool, readers: Sequence[int], sources: Sequence[int]
) -> Published:
    """Let `readers` read `pieces` of this rank's ``a``; this rank reads from `sources`, which publish theirs alike.

    Readers wait for "ready". A symmetric input is read where it lies, and is the caller's again only when every reader has said
    "read"; others are staged in a workspace. A rank that reads nothing does nothing that its readers do not wait for, so it need
    not say that it is done.
    """
    ready: list[Instruction] = [Notify(peer, Signal("ready", rank)) for peer in readers]
    if symmetric:
        read: list[Instruction] = [Notify(peer, Signal("read", rank)) for peer in sources]
        return Published(ready, [*read, *(Wait(Signal("read", peer), 1) for peer in readers)], "a")
    stage = [Copy(Region(rank, "a", *piece), Region(rank, "staged", *piece)) for piece in pieces if piece[0] < piece[1]]
    first = [*enter(rank, ranks), *stage, *ready] if readers else []
    return Published(first, [*leave(rank, ranks)] if sources else [], "staged")


def around(start: int, stop: int, total: int) -> list[tuple[int, int]]:
    """``0:total`` without ``start:stop``."""
    return [(0, start), (stop, total)]


def split(total: int, parts: int) -> list[int]:
    """`total` rows in `parts` even shares, the first ones a row larger where it does not divide."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def tidy(lane: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The lane without the waits that add nothing: those an earlier one includes, and those that the next one overtakes."""
    kept: list[Instruction] = []
    waited: dict[Signal, int] = {}
    for instruction in lane:
        if isinstance(instruction, Wait):
            if waited.get(instruction.signal, -1) >= instruction.count:
                continue
            waited[instruction.signal] = instruction.count
            if kept and isinstance(kept[-1], Wait) and kept[-1].signal == instruction.signal:
                kept.pop()
        kept.append(instruction)
    return tuple(kept)
