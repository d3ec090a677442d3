"""Groups of ranks within groups: how ranks learn of each other when a signal from each to each
would be too many.

Ranks *meet* level by level: first those of an innermost group, each with each; then groups of the
same larger group, each rank with one of every other group, which speaks for its whole group since
it has met it. In groups of √W a rank tells 2(√W - 1) others instead of W - 1, and hears of the last
one a hop later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import accumulate, count, pairwise, permutations
from typing import NamedTuple

from weft.plan import Copy, Instruction, Region
from weft.schedules.common import Hosts, hear, tell
from weft.schedules.thresholds import Thresholds

Levels = tuple[tuple[int, ...], ...]
"""The group of each rank, level by level: those of one level are parts of those of the next, and in
the last all are together.
"""


class Stage(NamedTuple):
    """Whom a rank tells and whom it hears in a level, in the order in which it does."""

    told: list[int]
    heard: list[int]


def synchronize(rank: int, levels: Levels, name: str) -> list[Instruction]:
    """Hold until all ranks have come here; what each did before is then visible to all. `name` is
    that of the signals.
    """
    lane: list[Instruction] = []
    for told, heard in meetings(levels)[rank]:
        lane += [*tell(rank, name, told), *hear(name, heard)]
    return lane


def hand_out(own: Sequence[Region], levels: Levels) -> list[Instruction]:
    """Let all ranks have a few rows, one part after the other: once they have met, they find them
    in the eager buffers.
    """
    ends = [*accumulate(rows.rows for rows in own)]
    placed = [
        rows._replace(buffer="eager", start=end - rows.rows, stop=end)
        for rows, end in zip(own, ends, strict=True)
    ]
    handed = [Copy(rows, place) for rows, place in zip(own, placed, strict=True) if rows.rows]
    return [] if len(levels[-1]) == 1 else [*handed, *synchronize(own[0].rank, levels, "ready")]


@cache
def meetings(levels: Levels) -> list[list[Stage]]:
    """The stages of each rank, by rank. A group of more ranks than another speaks to that one's
    ranks in turn.
    """
    ranks = len(levels[-1])
    stages: list[list[Stage]] = [[] for _ in range(ranks)]
    inner: Hosts = range(ranks)
    for outer in levels:
        told, heard = ([set[int]() for _ in range(ranks)] for _ in range(2))
        for units in _units(inner, outer):
            for (number, unit), (_, other) in permutations(enumerate(units), 2):
                for place, rank in enumerate(unit):
                    speaker = other[place if place < len(other) else (place + number) % len(other)]
                    heard[rank].add(speaker)
                    told[speaker].add(rank)
        for rank in range(ranks):
            tells = sorted(
                told[rank], key=lambda peer: (rank - peer) % ranks
            )  # in the order of `before`
            stages[rank].append(
                Stage(tells, sorted(heard[rank], key=lambda peer: (peer - rank) % ranks))
            )  # and of `after`
        inner = outer
    return stages


def flat(ranks: int) -> Levels:
    """One level, in which all are together."""
    return ((0,) * ranks,)


@cache
def nested(ranks: int, known: Levels = (), hop: float = Thresholds.hop) -> Levels:
    """The levels by which ranks meet soonest, where a hop takes as long as so many notifies.

    `known`, innermost first, are groups of ranks that are near each other: those that share a
    cache, a package, a host. Groups with too many parts are divided by number. It is one level
    where nothing is gained by more.
    """
    found: list[tuple[int, ...]] = []
    inner = tuple(range(ranks))
    for outer in (*known, (0,) * ranks):
        outer = numbered(outer)
        if outer != inner:
            depths = range(
                1, max(2, max(map(len, _units(inner, outer)), default=1).bit_length() + 1)
            )
            made = (_between(inner, outer, depth) for depth in depths)
            found += min(made, key=lambda levels: _cost((*found, *levels, *flat(ranks)), hop))
            inner = outer
    return min(flat(ranks), tuple(found) or flat(ranks), key=lambda levels: _cost(levels, hop))


def _cost(levels: Levels, hop: float) -> float:
    """How long ranks take to meet, in notifies: in each level as many as the one with most has to
    make, and a hop.
    """
    stages = zip(*meetings(levels), strict=True)
    return sum(hop + max(len(stage.told) for stage in level) for level in stages)


def _between(inner: Hosts, outer: Hosts, depth: int) -> list[tuple[int, ...]]:
    """So many levels from one to another, the latter included, with about as many parts in the
    groups of each.
    """
    digits: dict[int, tuple[int, ...]] = {}
    for number, units in enumerate(_units(inner, outer)):
        ways = next(ways for ways in count(1) if ways**depth >= len(units))
        for unit, path in zip(units, _paths(len(units), ways, depth - 1), strict=True):
            digits |= dict.fromkeys(unit, (number, *path))
    return [
        numbered(digits[rank][:kept] for rank in range(len(outer))) for kept in range(depth, 0, -1)
    ]


def _paths(items: int, ways: int, depth: int) -> list[tuple[int, ...]]:
    """For each of so many items in which part it is, in which part of that, and so on."""
    if not depth:
        return [()] * items
    bounds = [items * part // ways for part in range(ways + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return [
        (part, *path) for part, size in enumerate(sizes) for path in _paths(size, ways, depth - 1)
    ]


def _units(inner: Hosts, outer: Hosts) -> list[list[list[int]]]:
    """The groups of `outer`, each as a list of those of `inner` that it consists of, as lists of
    ranks.
    """
    found: dict[int, dict[int, list[int]]] = {}
    for rank, (unit, group) in enumerate(zip(inner, outer, strict=True)):
        found.setdefault(group, {}).setdefault(unit, []).append(rank)
    return [[*units.values()] for units in found.values()]


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Names as numbers, in the order in which they first come."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
