"""Nested groups of ranks, by which ranks synchronize when a signal from each to each would be too
many.

Ranks synchronize level by level: first the ranks of an innermost group with each other; then groups
of the same larger group, each rank with one rank of every other group, which represents its group
since it has synchronized with it. In groups of √W a rank notifies 2(√W - 1) peers instead of W - 1,
at the price of one more signal latency.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import accumulate, count, pairwise, permutations
from typing import NamedTuple

from weft.plan import Copy, Instruction, Region
from weft.schedules.lanes import notify_all, wait_all
from weft.schedules.peers import Hosts

SIGNAL_LATENCY = 3.0
"""The signal latency in notifies: the number that a core makes, to different peers, until the first
of them is seen.

Measured on four machines of 2 cores (Zen 3, Zen 4, Zen 5, Xeon with AMX): levels are those that
each machine's own latency gives.
"""

OVERSUBSCRIBED_SIGNAL_LATENCY = 50.0
"""The signal latency in notifies of ranks that share cores: each level then costs every rank a time
slice, and a notify wakes a sleeping rank.

Measured on a 2-core Zen 5: eager all-reduces of 16 ranks take 2.8 ms at once, 4.0 ms by levels
(`weft bench all-reduce -n 16 --sizes 8`).
"""

Levels = tuple[tuple[int, ...], ...]
"""The group of each rank, level by level: groups of one level are parts of groups of the next, and
the last level is one group.
"""


class Stage(NamedTuple):
    """The ranks that a rank notifies and waits for in a level, in order."""

    notified: list[int]
    awaited: list[int]


def synchronize(rank: int, levels: Levels, name: str) -> list[Instruction]:
    """Instructions that end after all ranks have begun them; all earlier writes are then visible to
    all ranks. `name` is the name of the signals.
    """
    lane: list[Instruction] = []
    for notified, awaited in stages(levels)[rank]:
        lane += [*notify_all(rank, name, notified), *wait_all(name, awaited)]
    return lane


def send_eagerly(own: Sequence[Region], levels: Levels) -> list[Instruction]:
    """Copy a few rows of each rank to its eager buffer, one part after the other, and synchronize:
    afterwards all ranks can read them there.
    """
    ends = [*accumulate(rows.rows for rows in own)]
    placed = [
        rows._replace(buffer="eager", start=end - rows.rows, stop=end)
        for rows, end in zip(own, ends, strict=True)
    ]
    copies = [Copy(rows, place) for rows, place in zip(own, placed, strict=True) if rows.rows]
    return [] if len(levels[-1]) == 1 else [*copies, *synchronize(own[0].rank, levels, "ready")]


@cache
def stages(levels: Levels) -> list[list[Stage]]:
    """The stages of each rank, by rank. The ranks of a larger group are assigned to the ranks of a
    smaller one round robin.
    """
    ranks = len(levels[-1])
    found: list[list[Stage]] = [[] for _ in range(ranks)]
    inner: Hosts = range(ranks)
    for outer in levels:
        notified, awaited = ([set[int]() for _ in range(ranks)] for _ in range(2))
        for units in _units(inner, outer):
            for (number, unit), (_, other) in permutations(enumerate(units), 2):
                for at, rank in enumerate(unit):
                    representative = other[at if at < len(other) else (at + number) % len(other)]
                    awaited[rank].add(representative)
                    notified[representative].add(rank)
        for rank in range(ranks):
            # in the orders of `before` and `after`
            found[rank].append(
                Stage(
                    sorted(notified[rank], key=lambda peer: (rank - peer) % ranks),
                    sorted(awaited[rank], key=lambda peer: (peer - rank) % ranks),
                )
            )
        inner = outer
    return found


def flat(ranks: int) -> Levels:
    """One level of one group."""
    return ((0,) * ranks,)


@cache
def nested(ranks: int, groups: Levels = (), latency: float = SIGNAL_LATENCY) -> Levels:
    """The fastest levels to synchronize by, where `latency` is the signal latency in notifies.

    `groups`, innermost first, are the ranks that share a cache, a package, a host. A group with too
    many parts is divided by number. There is one level if more are not faster.
    """
    found: list[tuple[int, ...]] = []
    inner = tuple(range(ranks))
    for outer in (*groups, (0,) * ranks):
        outer = numbered(outer)
        if outer != inner:
            depths = range(
                1, max(2, max(map(len, _units(inner, outer)), default=1).bit_length() + 1)
            )
            made = (_between(inner, outer, depth) for depth in depths)
            found += min(made, key=lambda levels: _cost((*found, *levels, *flat(ranks)), latency))
            inner = outer
    return min(flat(ranks), tuple(found) or flat(ranks), key=lambda levels: _cost(levels, latency))


def _cost(levels: Levels, latency: float) -> float:
    """The time to synchronize, in notifies: for each level the largest number of a rank, and the
    signal latency.
    """
    by_level = zip(*stages(levels), strict=True)
    return sum(latency + max(len(stage.notified) for stage in level) for level in by_level)


def _between(inner: Hosts, outer: Hosts, depth: int) -> list[tuple[int, ...]]:
    """`depth` levels from `inner` to `outer`, the latter included, with groups of about equal
    numbers of parts.
    """
    digits: dict[int, tuple[int, ...]] = {}
    for number, units in enumerate(_units(inner, outer)):
        parts = next(parts for parts in count(1) if parts**depth >= len(units))
        for unit, path in zip(units, _paths(len(units), parts, depth - 1), strict=True):
            digits |= dict.fromkeys(unit, (number, *path))
    return [
        numbered(digits[rank][:level] for rank in range(len(outer)))
        for level in range(depth, 0, -1)
    ]


def _paths(items: int, parts: int, depth: int) -> list[tuple[int, ...]]:
    """For each item the number of its part, of the smaller part within it, and so on."""
    if not depth:
        return [()] * items
    bounds = [items * part // parts for part in range(parts + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return [
        (part, *path) for part, size in enumerate(sizes) for path in _paths(size, parts, depth - 1)
    ]


def _units(inner: Hosts, outer: Hosts) -> list[list[list[int]]]:
    """The groups of `outer`, each as a list of its groups of `inner`, which are lists of ranks."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, (unit, group) in enumerate(zip(inner, outer, strict=True)):
        found.setdefault(group, {}).setdefault(unit, []).append(rank)
    return [[*units.values()] for units in found.values()]


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Names as numbers, in the order of first occurrence."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
