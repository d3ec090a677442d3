"""The page of saved results, as data: a section for each."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from weft.plan.trace import Trace
from weft_tools.bench import noise, repeat, tables
from weft_tools.bench.benchmarks import Result, Shown, shown
from weft_tools.bench.captured import TableGrid, Words, captured
from weft_tools.bench.limit import Limit, limit_of, views_of
from weft_tools.bench.pictures.page.lanes import timeline
from weft_tools.bench.report import hidden, overlaps


class Figure(NamedTuple):
    """A figure that answers a question: its name, its value, and its meaning; of one that is noise
    the value is that word.
    """

    name: str
    value: str
    meaning: str


class Section(NamedTuple):
    """A result on a page.

    `notes` are its sentences with their styles, of which `verdict` is the one on the verification.
    `timeline` is an object for the page's program, `picture` an SVG file as a URI, `commands`
    repeat the measurement; each is None, or empty, where the result has none.
    """

    name: str
    about: str
    verified: bool
    verdict: Words
    figures: list[Figure]
    timeline: dict[str, Any] | None
    limit: Limit | None
    picture: str | None
    grids: list[TableGrid]
    notes: list[Words]
    facts: list[tuple[str, str]]
    commands: list[str]


def traced(traces: Sequence[Trace], results: Sequence[Result]) -> int | None:
    """The number of the result that was measured together with `traces`, None if there is none: it
    has the same part of hidden copies for each trace.
    """
    parts = {trace.title: hidden(trace) for trace in traces}
    return next(
        (n for n, result in enumerate(results) if result.get("hidden_percent") == parts), None
    )


def section(result: Result, file: str, traces: Sequence[Trace] = ()) -> Section:
    """The section of a result that was saved in a file of this name, with its traces, if any.
    Raises `ValueError` for a benchmark that this version lacks.
    """
    kind = shown(result)
    printed = captured(kind.print, result)
    title, *lines = (line for line in printed if isinstance(line, Words) and line.style != "dim")
    name, _, about = title.text.partition(": ")
    verdict = next(line for line in reversed(lines) if line.style in ("green", "bold red"))
    limit = limit_of(result)
    return Section(
        name=name,
        about=about,
        verified=result["verified"],
        verdict=verdict,
        figures=[*figures(result)],
        timeline=timeline(traces) if traces else None,
        limit=limit,
        picture=None if limit else _picture(kind, result),
        grids=[table for table in printed if isinstance(table, TableGrid)],
        notes=[line for line in lines if line is not verdict],
        facts=[*_facts(result)],
        commands=[*_commands(result, file, bool(traces))],
    )


def figures(result: Result) -> Iterator[Figure]:
    """The figures that answer how much weft gains in a result."""
    if (views := views_of(result)) and overlaps(result):
        compute, communicate, sequential, own = views
        times = result["times_ms"]
        digits = noise.decimals(times[sequential], times[own])
        sides = f"{sequential} {views[sequential]:.{digits}f} ms, {own} {views[own]:.{digits}f} ms"
        limit = max(compute, communicate, key=lambda name: views[name])
        meanings = {
            "speedup": sides,
            "limit_ratio": f"{own} / {limit}, the limit; 1 is perfect",
            "overlap_percent": f"of {communicate} is hidden behind {compute}",
        }
        for gain in tables.gains(result, meanings):
            yield Figure(gain.name, gain.value.plain, gain.meaning)
    for name, ratios in _over_sizes(result.get("rows", [])).items():
        words, meaning = f"{min(ratios):.2f}x to {max(ratios):.2f}x", f"{len(ratios)} cases"
        if tables.busy(result):
            words, meaning = tables.BUSY_MACHINE, f"{words}: {tables.WHILE_BUSY}, {meaning}"
        else:
            meaning = f"median times, {meaning}"
        yield Figure(f"weft vs {name}", words, meaning)


def _over_sizes(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """How many times as fast as each other implementation weft does the same, case by case."""
    times = dict[tuple[str, Any], float]()
    for row in rows:
        case = tuple(row.get(key) for key in ("operation", "size_bytes", "in_place"))
        times[row["implementation"], case] = row["time_us"]["median"]
    found = dict[str, list[float]]()
    for (name, case), time in times.items():
        own = times.get(("weft", case))
        if own and not name.startswith(("weft", "kernel")):
            found.setdefault(name, []).append(time / own)
    return found


def _picture(kind: Shown, result: Result) -> str:
    """The picture of a result as a URI that holds the SVG file."""
    with TemporaryDirectory() as folder:
        kind.draw(result, file := Path(folder) / "result.svg")
        return f"data:image/svg+xml;base64,{b64encode(file.read_bytes()).decode()}"


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    """The machine, the versions, the time, and the counts of wrong elements."""
    if wrong := result.get("wrong"):
        counts = dict[int, list[str]]()
        for name, count in wrong.items():
            counts.setdefault(count, []).append(name)
        for count, names in sorted(counts.items()):
            yield "wrong elements", f"{count} of {', '.join(names)}"
    for name, value in result["machine"].items():
        label, gib, _ = name.partition("_gib")
        yield label.replace("_", " "), f"{value} GiB" if gib else str(value)
    yield "versions", ", ".join(f"{name} {text}" for name, text in result["versions"].items())
    if "date" in result:
        yield "measured", result["date"].replace("T", " ").replace("+00:00", " UTC")


def _commands(result: Result, file: str, traced: bool) -> Iterator[str]:
    """The commands that measure a result again and make its page."""
    if measure := repeat.command(result):
        trace = " --trace trace.json" if traced else ""
        yield f"{measure} --json {shlex.quote(file)}{trace}"
        yield f"weft report {shlex.quote(file)}{trace}"
