"""The distance of a result from the limit of its machine, and the parts of that distance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from weft.bench import tables
from weft.predict import figures


class Part(NamedTuple):
    """A part of a time in milliseconds, and its share of the longest time, in percent."""

    name: str
    milliseconds: float
    percent: float


class Bar(NamedTuple):
    """The median time of a measured call in milliseconds, and its parts from the beginning."""

    name: str
    milliseconds: float
    parts: list[Part]


class Limit(NamedTuple):
    """The times of a result as `bars`, the limit in percent of the longest, and sentences on what
    is above it.
    """

    bars: list[Bar]
    percent: float
    sentences: list[str]


def limit_of(result: dict[str, Any]) -> Limit | None:
    """The limit of a result, the longer of compute and communicate; None for one without them."""
    times = {name: time["median"] for name, time in tables.times_of(result).items()}
    if not {*figures.VIEWS} <= {*times}:
        return None
    limit, longest = max(times["compute"], times["communicate"]), max(times.values())
    lost = _lost(result, times["compute"], limit)

    def parts(name: str, time: float) -> Iterator[Part]:
        splits = name == "pipelined" and all(value >= 0 for value in lost.values()) and lost
        for part, value in ({"limit": limit} | lost if splits else {name: time}).items():
            yield Part(part, value, 100 * value / longest)

    bars = [Bar(name, time, [*parts(name, time)]) for name, time in times.items()]
    return Limit(bars, 100 * limit / longest, [*_sentences(times, limit, lost)])


def _lost(result: dict[str, Any], compute: float, limit: float) -> dict[str, float]:
    """The milliseconds of pipelined above the limit, by what costs them; none where another
    algorithm was measured in chunks. Noise may make either negative.

    Of the exposed communication, what communicate takes longer than compute is in the limit.
    """
    if "chunking_ms" not in result or result.get("streamed_ms"):
        return {}
    return {"cutting": result["chunking_ms"], "waiting": result["exposed_ms"] - (limit - compute)}


def _sentences(times: dict[str, float], limit: float, lost: dict[str, float]) -> Iterator[str]:
    name = "compute" if times["compute"] == limit else "communicate"
    above = times["pipelined"] - limit
    where = f"{abs(above):.3f} ms {'above' if above >= 0 else 'below'} it"
    yield (
        f"The limit is {limit:.3f} ms, the time of {name}, since it is longer than "
        f"{'communicate' if name == 'compute' else 'compute'}. Pipelined takes "
        f"{times['pipelined']:.3f} ms, {where}{'' if above >= 0 else ', which is noise'}."
    )
    if lost:
        yield (
            f"The difference: cutting the product {lost['cutting']:+.3f} ms; waiting for rows "
            f"{lost['waiting']:+.3f} ms, beyond the {limit - times['compute']:.3f} ms by which the "
            "limit exceeds compute."
        )
