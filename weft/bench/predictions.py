"""Predictions for people and programs: the figures of a benchmark, every way, what holds the best
one up, and a plain answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.text import Text

import weft.predict as predict
from weft.bench import figures, tables
from weft.bench.plots import COLOURS, DASHED, picture
from weft.predict import OPERATORS, Variant, Workload
from weft.predict.machine import Machine

_WORTH = 0.02  # what a change must save to be worth telling
_RESOURCES = {
    "products twice as fast": "the product",
    "links of twice the bandwidth": "the link",
    "memory twice as fast": "memory",
    "no latencies": "latency",
    "no interference": "interference of communication and computation",
}


def answer(
    case: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> dict[str, Any]:
    """What is predicted for a case, as a JSON object. Times are in milliseconds; K is that of a
    rank's product.
    """
    found = predict.forecast(case, machine, algorithm, chunk_rows)
    best, took = found.ways[0]
    return {
        "predicted": case.operator.replace("_", "-"),
        "machine": machine.name,
        "ranks": case.ranks,
        "hosts": len(set(machine.hosts or (0,))),
        "shape": {"m": sum(case.rows), "k": case.k, "n": case.n},
        "dtype": case.dtype,
        "out_dtype": case.out_dtype,
        "link": machine.links[-1].gbs * 8 if machine.links[-1].idle else None,
        **to_json(case, best),
        "times_ms": dict(
            zip(figures.VIEWS, (1e3 * seconds for seconds in (*found[:3], took)), strict=True)
        ),
        "ways": [{**to_json(case, way), "ms": 1e3 * seconds} for way, seconds in found.ways],
        "speedup": figures.speedup(found.sequential, took),
        "overlap_percent": figures.overlap_percent(found.compute, found.communicate, took)
        if found.communicate
        else None,
        "limit_ratio": figures.limit_ratio(found.compute, found.communicate, took),
        "saved_percent": {
            what: 100 * saved for what, saved in predict.savings(case, best, machine)
        },
        "measured_on": machine.ranks,
    }


def variant(found: dict[str, Any]) -> Variant:
    """The variant of an entry of an answer's ways, or of the answer itself: the best one."""
    return Variant(found["algorithm"], found["pieces"], found["order"])


def to_json(case: Workload, variant: Variant) -> dict[str, Any]:
    """A variant as a JSON object, with the most rows of its transfers."""
    rows = OPERATORS[case.operator].chunk_rows(case.rows, variant)
    return {**variant._asdict(), "chunk_rows": rows}


def show(result: dict[str, Any], console: Console) -> None:
    """Print an answer as tables, and in plain words."""
    times, link, size = result["times_ms"], result["link"], _size(result["shape"])
    where = f"{result['machine']}{f', emulated link of {link:g} Gbit/s' if link else ''}"
    hosts = f" on {result['hosts']} hosts" if result["hosts"] > 1 else ""
    title = f"{result['predicted']} on {where}, PREDICTED: {result['ranks']} ranks{hosts}, {size}, {result['dtype']}"
    console.print(Text(title, "bold"), soft_wrap=True)
    table = tables.table(("", "ms", "vs sequential", "rows per piece"))
    for name in ("compute", "communicate"):
        table.add_row(name, _ms(times[name]), "", "")
    for way in result["ways"]:
        table.add_row(
            str(variant(way)),
            _ms(way["ms"]),
            f"{times['sequential'] / way['ms']:.2f}x",
            str(way["chunk_rows"]),
        )
    if all(way["algorithm"] != "sequential" for way in result["ways"]):
        table.add_row("sequential", _ms(times["sequential"]), "1.00x", "")
    console.print(table)
    overlap = (
        "" if result["overlap_percent"] is None else f"overlap {result['overlap_percent']:.0f} %, "
    )
    console.print(
        f"speedup {result['speedup']:.2f}x, {overlap}limit ratio {result['limit_ratio']:.3f}",
        highlight=False,
    )
    for line in (*words(result), ""):
        console.print(line, highlight=False, soft_wrap=True)


def collective(operator: str, sizes: Sequence[int], ranks: int, machine: Machine) -> dict[str, Any]:
    """What is predicted for a collective of each of these sizes in bytes on each rank, as a JSON
    object; times in microseconds.
    """
    found = [(size, way) for size in sizes for way in predict.ways(operator, size, ranks, machine)]
    rows = [
        {"bytes": size, "way": way.name, "us": 1e6 * way.seconds, "notifies": way.notifies}
        for size, way in found
    ]
    return {
        "predicted": operator.replace("_", "-"),
        "machine": machine.name,
        "ranks": ranks,
        "rows": rows,
    }


def show_collective(found: dict[str, Any], console: Console) -> None:
    """Print what is predicted for a collective as a table."""
    console.print(
        Text(
            f"{found['predicted']} on {found['machine']}, PREDICTED: {found['ranks']} ranks", "bold"
        ),
        soft_wrap=True,
    )
    table = tables.table(("bytes of each rank", "way", "us", "notifies of a rank"), left=("way",))
    for row in found["rows"]:
        table.add_row(str(row["bytes"]), row["way"], f"{row['us']:.2f}", str(row["notifies"]))
    console.print(table)


def words(result: dict[str, Any]) -> list[str]:
    """The answer in plain words: whether overlap helps, by how much, what holds it up and what
    would change that.
    """
    best, ways = variant(result), result["ways"]
    sequential, pipelined = (_ms(result["times_ms"][name]) for name in ("sequential", "pipelined"))
    if best.algorithm == "sequential":
        lines = [
            f"Overlap would not help: one after the other takes {sequential} ms, and no "
            "overlapping way is faster."
        ]
    elif result["speedup"] < 1 + _WORTH:
        lines = [
            f"Overlap would hardly help: {best} takes {pipelined} ms, sequential {sequential}."
        ]
    else:
        gain = f"{result['speedup']:.2f} times as fast"
        lines = [f"Overlap helps: {best} takes {pipelined} ms instead of {sequential}, {gain}."]
    if len(ways) > 1 and (
        second := next((way for way in ways[1:] if way["algorithm"] != "sequential"), None)
    ):
        name = str(variant(second))
        lines[0] += f" {name[0].upper()}{name[1:]} would take {_ms(second['ms'])} ms."
    saved = [
        (what, percent)
        for what, percent in result["saved_percent"].items()
        if percent > 100 * _WORTH
    ]
    if saved:
        most = [f"{what} would save {percent:.0f} %" for what, percent in saved]
        lines.append(f"The bottleneck is {_RESOURCES[saved[0][0]]}: {', '.join(most)}.")
    if result["measured_on"] and result["ranks"] > result["measured_on"]:
        lines.append(
            f"The profile was fitted on {result['measured_on']} ranks; beyond them its second link "
            "is an assumption."
        )
    return lines


def total(results: list[dict[str, Any]]) -> str:
    """What several operators, one after the other, take together."""
    compute, _, sequential, pipelined = (
        sum(result["times_ms"][name] for result in results) for name in figures.VIEWS
    )
    gain = f"{sequential / pipelined:.2f} times as fast, {100 * (1 - pipelined / sequential):.0f} % less time"
    return (
        f"Together: {_ms(pipelined)} ms instead of {_ms(sequential)}: {gain}. "
        f"The products alone take {_ms(compute)} ms, which no overlap can beat."
    )


def show_comparison(result: dict[str, Any], measured: dict[str, Any], console: Console) -> None:
    """Print predicted beside measured times in one table."""
    table = tables.table(("", "predicted ms", "measured ms", "error"))
    for name, times in measured["times_ms"].items():
        ms = result["times_ms"][name]
        table.add_row(
            name, _ms(ms), _ms(times["median"]), f"{100 * (ms / times['median'] - 1):+.0f} %"
        )
    for name in ("speedup", "limit_ratio"):
        table.add_row(
            name,
            f"{result[name]:.3f}",
            f"{measured[name]:.3f}",
            f"{100 * (result[name] / measured[name] - 1):+.0f} %",
        )
    console.print(table)


def show_sweep(
    what: str, results: list[dict[str, Any]], values: Sequence[float], console: Console
) -> None:
    """Print the times of a sweep in one table."""
    columns = (
        what,
        "compute ms",
        "communicate",
        "sequential",
        "pipelined",
        "speedup",
        "by",
        "bottleneck",
    )
    table = tables.table(columns, left=("by", "bottleneck"))
    for value, result in zip(values, results, strict=True):
        cells = [_ms(result["times_ms"][name]) for name in figures.VIEWS]
        bottleneck = _RESOURCES[next(iter(result["saved_percent"]))]
        table.add_row(
            f"{value:g}", *cells, f"{result['speedup']:.2f}x", str(variant(result)), bottleneck
        )
    console.print(table)


def draw_sweep(
    what: str, results: list[dict[str, Any]], values: Sequence[float], path: Path
) -> None:
    """Draw the times of a sweep, and what overlap gains, into a PNG or SVG file."""
    first = results[0]
    shape = {**first["shape"], **({what: what.upper()} if what in first["shape"] else {})}
    ranks = "" if what == "ranks" else f"{first['ranks']} ranks, "
    title = f"{first['predicted']} on {first['machine']}: {ranks}{_size(shape)} {first['dtype']}"
    with picture(path, 11, 4.4, title) as figure:
        times, gains = figure.subplots(1, 2)
        for name in figures.VIEWS:
            look: dict[str, Any] = (
                {"linestyle": DASHED} if name in ("compute", "communicate") else {"marker": "o"}
            )
            times.plot(
                values,
                [result["times_ms"][name] for result in results],
                color=COLOURS[name],
                label=name,
                **look,
            )
        gains.plot(
            values,
            [result["speedup"] for result in results],
            color=COLOURS["pipelined"],
            marker="o",
        )
        gains.axhline(1, color=COLOURS["text"], linewidth=1, linestyle=DASHED)
        times.set_yscale("log", base=2)
        times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axes, says in (
            (times, "milliseconds, predicted"),
            (gains, "speedup: sequential / pipelined, predicted"),
        ):
            axes.set_xscale("log", base=2)
            axes.set_xticks(
                values, [f"{value:g}" for value in values], rotation=30 if len(values) > 8 else 0
            )
            axes.minorticks_off()
            axes.set_xlabel({"link": "GB/s of the link"}.get(what, what))
            axes.set_title(says)
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def _size(shape: dict[str, Any]) -> str:
    return "x".join(map(str, shape.values()))
