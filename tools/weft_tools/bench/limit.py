"""The distance of a result from the limit of its machine, and the parts of that distance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from weft_tools.bench import noise, report, tables
from weft_tools.predict import figures


class LimitPart(NamedTuple):
    """A part of a time in milliseconds, and its share of the longest time, in percent."""

    name: str
    milliseconds: float
    percent: float


class Bar(NamedTuple):
    """The median time of a measured call in milliseconds, and its parts from the beginning; of one
    that is `scaled` the bar may be cut.
    """

    name: str
    milliseconds: float
    parts: list[LimitPart]
    text: str  # the time without digits that are noise
    scaled: bool = False


class Limit(NamedTuple):
    """The times of a result as `bars`, of which `own` is the one that overlaps; the limit in
    percent of the longest; and sentences on what is above it.
    """

    bars: list[Bar]
    own: str
    percent: float
    sentences: list[str]


def views_of(result: dict[str, Any]) -> dict[str, float] | None:
    """The median milliseconds of compute, communicate, sequential and the view that overlaps, in
    this order; None for a result without them.
    """
    times = result.get("times_ms", {})
    own = "overlapped" if "overlapped" in times else "pipelined"
    names = (*figures.VIEWS[:3], own)
    return {name: times[name]["median"] for name in names} if {*names} <= {*times} else None


def limit_of(result: dict[str, Any]) -> Limit | None:
    """The limit of a result, the longer of compute and communicate; None for one without them."""
    views = views_of(result)
    if not views:
        return None
    *_, own = views
    measured = tables.times_of(result)
    times = {name: time["median"] for name, time in measured.items()} | views
    scaled = {name for name in times if tables.is_scaled(result, name)}
    limit = max(views["compute"], views["communicate"])
    longest = max(time for name, time in times.items() if name not in scaled)
    lost = _lost(result, views["compute"], limit)

    def parts(name: str, time: float) -> Iterator[LimitPart]:
        splits = name == own and lost and all(value >= 0 for value in lost.values())
        for part, value in ({"limit": limit} | lost if splits else {name: time}).items():
            yield LimitPart(part, value, min(100.0, 100 * value / longest))

    bars = [
        Bar(
            name if name in views else report.called(result, name),
            time,
            [*parts(name, time)],
            f"{time:.{noise.decimals(measured[name])}f} ms",
            name in scaled,
        )
        for name, time in times.items()
    ]
    sentences = _sentences(views, limit, lost, noise.decimals(*(measured[name] for name in views)))
    return Limit(bars, own, 100 * limit / longest, [*sentences])


def _lost(result: dict[str, Any], compute: float, limit: float) -> dict[str, float]:
    """The milliseconds above the limit, by what costs them; none where another algorithm was
    measured in chunks. Noise may make either negative.

    Of the exposed communication, what communicate takes longer than compute is in the limit.
    """
    if "chunking_ms" not in result or result.get("streamed_ms"):
        return {}
    return {"cutting": result["chunking_ms"], "waiting": result["exposed_ms"] - (limit - compute)}


def _sentences(
    views: dict[str, float], limit: float, lost: dict[str, float], digits: int
) -> Iterator[str]:
    (compute, computing), (communicate, communicating), _, (own, time) = views.items()
    longer, other = (compute, communicate) if computing == limit else (communicate, compute)
    where = "above it"
    if time < limit:
        noisy = time < noise.least(own, computing, communicating)
        where = f"below it, {'which is noise' if noisy else f'as {communicate} copies more rows'}"

    def ms(value: float, sign: str = "") -> str:
        return f"{round(value, digits) + 0.0:{sign}.{digits}f} ms"

    yield (
        f"The limit is {ms(limit)}, the time of {longer}, since it is longer than {other}. "
        f"{own.capitalize()} takes {ms(time)}, {ms(abs(time - limit))} {where}."
    )
    if lost:
        excess = f", beyond the {ms(limit - computing)} by which the limit exceeds {compute}"
        yield (
            f"The difference: cutting the product {ms(lost['cutting'], '+')}; waiting for rows "
            f"{ms(lost['waiting'], '+')}{excess if longer == communicate else ''}."
        )
