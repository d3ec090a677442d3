"""Predictions as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from weft.cli.tables import table
from weft_tools.predict import figures
from weft_tools.predict.answers import RESOURCES, baseline, ms, variant, words


def show(result: dict[str, Any], console: Console) -> None:
    """Print a prediction as a table and as sentences."""
    times, link = result["times_ms"], result["link"]
    where = f"{result['machine']}{f', emulated link of {link:g} Gbit/s' if link else ''}"
    hosts = f" on {result['hosts']} hosts" if result["hosts"] > 1 else ""
    case = f"{result['ranks']} ranks{hosts}, {_size(result['shape'])}, {result['dtype']}"
    _title(f"{result['predicted']} on {where}, PREDICTED: {case}", console)
    shown = table(("", "ms", "vs sequential", "rows per piece"))
    for name in ("compute", "communicate"):
        shown.add_row(name, ms(times[name]), "", "")
    for entry in result["ways"]:
        speedup = f"{times['sequential'] / entry['ms']:.2f}x"
        shown.add_row(str(variant(entry)), ms(entry["ms"]), speedup, str(entry["chunk_rows"]))
    if all(entry["algorithm"] != baseline(result) for entry in result["ways"]):
        shown.add_row("sequential", ms(times["sequential"]), "1.00x", "")
    console.print(shown)
    percent = result["overlap_percent"]
    overlap = "" if percent is None else f"overlap {percent:.0f} %, "
    line = f"speedup {result['speedup']:.2f}x, {overlap}limit ratio {result['limit_ratio']:.3f}"
    for text in (line, *words(result), ""):
        console.print(text, highlight=False, soft_wrap=True)


def show_collective(found: dict[str, Any], console: Console) -> None:
    """Print the predictions for a collective as a table."""
    _title(
        f"{found['predicted']} on {found['machine']}, PREDICTED: {found['ranks']} ranks", console
    )
    shown = table(
        ("bytes of each rank", "algorithm", "us", "notifies of a rank"), left=("algorithm",)
    )
    for row in found["rows"]:
        shown.add_row(str(row["bytes"]), row["way"], f"{row['us']:.2f}", str(row["notifies"]))
    console.print(shown)
    if found["notify_source"]:
        line = f"A signal takes {found['notify_us']:g} us: {found['notify_source']}."
        console.print(line, highlight=False, soft_wrap=True)


def show_copies(found: dict[str, Any], console: Console) -> None:
    """Print the predictions for one-sided copies as a table."""
    where = f"rank 0 and rank {found['ranks'] - 1}"
    _title(f"copy on {found['machine']}, PREDICTED: between {where}", console)
    with_cycles = any(row["cycles"] is not None for row in found["rows"])
    columns = ("bytes", "call", "us", "GB/s", *(["cycles"] if with_cycles else []))
    shown = table(columns, left=("call",))
    for row in found["rows"]:
        cells = [str(row["bytes"]), row["way"], f"{row['us']:.2f}", f"{row['gbps']:.2f}"]
        shown.add_row(*cells, *([f"{row['cycles']:.0f}"] if with_cycles else []))
    console.print(shown)
    lines = ["A put is predicted like a get: links have one bandwidth and latency for both ways."]
    if with_cycles:
        lines.append("cycles: of the device's counter, without the launch of the call.")
    if not found["starts"]:
        lines.append("The profile has no time that a copy takes to start: few bytes take longer.")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def show_overlap(found: dict[str, Any], console: Console) -> None:
    """Print the predictions for a product beside an all-gather as a table."""
    case = f"{found['ranks']} ranks, {_size(found['shape'])}, {found['dtype']}"
    _title(f"overlap on {found['machine']}, PREDICTED: {case}", console)
    columns = ("bytes", "", "ms", "speedup", "overlap", "limit ratio")
    shown = table(columns, left=("",))
    for row in found["rows"]:
        gains = [""] * 3
        if "speedup" in row:
            gains = [
                f"{row['speedup']:.2f}x",
                f"{row['overlap_percent']:.0f} %",
                f"{row['limit_ratio']:.3f}",
            ]
        shown.add_row(str(row["bytes"]), row["way"], ms(row["ms"]), *gains)
    console.print(shown)
    if not found["interference"]:
        console.print(
            f"Nothing is known of how products and transfers slow each other on "
            f"{found['machine']}: none is assumed.",
            soft_wrap=True,
        )


def show_sweep(
    swept: str, results: list[dict[str, Any]], values: Sequence[float], console: Console
) -> None:
    """Print the times of a sweep in one table."""
    times = ("compute ms", "communicate", "sequential", "pipelined")
    shown = table((swept, *times, "speedup", "by", "bottleneck"), left=("by", "bottleneck"))
    for value, result in zip(values, results, strict=True):
        cells = [ms(result["times_ms"][name]) for name in figures.VIEWS]
        cells += [f"{result['speedup']:.2f}x", str(variant(result))]
        shown.add_row(f"{value:g}", *cells, RESOURCES[next(iter(result["saved_percent"]))])
    console.print(shown)


def _title(text: str, console: Console) -> None:
    console.print(Text(text, "bold"), soft_wrap=True)


def _size(shape: dict[str, Any]) -> str:
    return "x".join(map(str, shape.values()))
