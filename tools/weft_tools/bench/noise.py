"""The noise of a result: how far the times of one call differ from run to run, and the figures of
overlap that mean nothing beside that. Times are in milliseconds, as in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Time = Mapping[str, float]

_ROUNDED = 0.005
"""Half a unit of the last digit of a ratio as it is shown."""


def spread(time: Time) -> float:
    """How far runs of a call differ: the median less the least time, 0 if that is unknown."""
    return time["median"] - time.get("min", time["median"])


def decimals(*times: Time) -> int:
    """The digits after the point that noise does not change in all of these times, at most 3."""
    differ = max(map(spread, times))
    return min(3, max(0, -math.floor(math.log10(differ)))) if differ > 0 else 3


def between(one: Time, other: Time) -> float:
    """The least difference of two times that is more than noise."""
    return (spread(one) + spread(other)) / 2


def alike(one: Time, other: Time) -> bool:
    """Whether two times differ by noise alone."""
    return abs(one["median"] - other["median"]) <= between(one, other)


def least(name: str, compute: float, communicate: float) -> float:
    """The least time that a view of this name can take, of those that overlap.

    A fused operator, ``pipelined``, may take less than communicate, which alone copies rows that
    the operator reads where they are.
    """
    return compute if name == "pipelined" else max(compute, communicate)


def doubts(result: Mapping[str, Any]) -> dict[str, str]:
    """The reasons for which figures of a result's overlap are noise, by the keys of the figures."""
    times = result["times_ms"]
    name = "overlapped" if "overlapped" in times else "pipelined"
    compute, sequential, own = times["compute"], times["sequential"], times[name]
    found = dict[str, str]()
    if spread(own) and alike(sequential, own):
        found["speedup"] = f"sequential and {name} differ by less than the runs of each"
    possible = least(name, compute["median"], times["communicate"]["median"])
    if own["median"] < (1 - _ROUNDED) * possible:
        found["limit_ratio"] = "faster than the limit, which cannot be"
    if result["overlap_percent"] > 100 * (1 + _ROUNDED):
        found["overlap_percent"] = "more than all of communicate, which cannot be"
    elif times["communicate"]["median"] < between(compute, own):
        found["overlap_percent"] = "communicate takes less than the runs of the others differ"
    return found
