"""Pictures of results; they are drawn from the JSON object of a result and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

COLOURS = {
    "matmul": "#3566a8",
    "copy": "#e8963c",
    "reduce": "#5a9e6f",
    "wait": "#c3c8d0",
    "notify": "#22262e",
    "text": "#22262e",
    "muted": "#6b7280",
}
"""Of kinds of work and of text, the same in all pictures."""

_BARS = {
    "compute": COLOURS["matmul"],
    "communicate": COLOURS["copy"],
    "pipelined": COLOURS["reduce"],
    "overlapped": COLOURS["reduce"],
}
_LINES = {"weft": COLOURS["matmul"], "weft (plain)": "#8fb0da", "gloo": "#9aa3b0", "openmpi": COLOURS["copy"], "mpich": "#b0574a"}


def draw_times(result: dict[str, Any], path: Path) -> None:
    """Draw what a fused operator and its baselines take, median and range, beside the limit, into a PNG or SVG file."""
    steps = list(result.get("ablation_ms", {}).items())[1:]  # the first is sequential
    times = result["times_ms"] | result["baselines_ms"] | {f"step: {name}": time for name, time in steps}
    figure = Figure(figsize=(9, 0.42 * len(times) + 1.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    for row, (name, time) in enumerate(times.items()):
        axes.barh(row, time["median"], 0.66, color=_BARS.get(name, "#9aa3b0"), zorder=2)
        spread = [[time["median"] - time["min"]], [time["max"] - time["median"]]]
        axes.errorbar(time["median"], row, xerr=spread, color=COLOURS["text"], linewidth=0.9, capsize=2.5, zorder=3)
        axes.annotate(f"{time['median']:.2f}", (time["max"], row), (6, 0), textcoords="offset points", va="center", fontsize=9)
    limit = max(result["times_ms"][name]["median"] for name in ("compute", "communicate"))
    axes.axvline(limit, color=COLOURS["text"], linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate("limit", (limit, -0.62), (3, 0), textcoords="offset points", fontsize=8.5, color=COLOURS["muted"], va="center")
    axes.set_yticks(range(len(times)), list(times))
    axes.set_ylim(len(times) - 0.4, -0.9)
    axes.set_xlim(0, 1.1 * max(time["max"] for time in times.values()))
    axes.set_xlabel("milliseconds: median, and range of all runs", color=COLOURS["muted"])
    axes.tick_params(length=0, labelcolor=COLOURS["text"])
    axes.grid(axis="x", color="#e3e6ea", linewidth=0.6, zorder=0)
    axes.spines[:].set_visible(False)
    shape, link = result["shape"], result["link"]
    where = f", emulated link of {link['gbps']:g} Gbit/s" if link else ""
    size = f"{shape['m']}x{shape['k']}x{shape['n']} {result['dtype']}"
    title = f"{result['benchmark']}: {result['ranks']} ranks, {size}, {result['algorithm']}{where}"
    unverified = "" if result["verified"] else "  NOT VERIFIED"
    axes.set_title(title + unverified, loc="left", fontsize=11, color=COLOURS["text"])
    figure.savefig(path)


def draw_sweep(result: dict[str, Any], path: Path) -> None:
    """Draw time and bus bandwidth over size, a line for each implementation, into a PNG or SVG file.

    Rows in place are drawn only where there are no others.
    """
    in_place = all(row["in_place"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["in_place"] == in_place]
    figure = Figure(figsize=(11, 4.4), dpi=160, layout="constrained")
    times, widths = figure.subplots(1, 2)
    for name in dict.fromkeys(row["implementation"] for row in rows):
        own = [row for row in rows if row["implementation"] == name]
        sizes, style = (
            [row["size_bytes"] for row in own],
            {"color": _LINES.get(name), "linewidth": 1.8, "marker": "o", "markersize": 4},
        )
        medians = [row["time_us"]["median"] for row in own]
        times.plot(sizes, medians, label=name, **style)
        times.fill_between(sizes, [row["time_us"]["min"] for row in own], medians, color=_LINES.get(name), alpha=0.12, linewidth=0)
        widths.plot(sizes, [row["busbw_gbps"] for row in own], **style)
    times.set_yscale("log")
    for axes, what in ((times, "microseconds: median, shaded down to the minimum"), (widths, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := sorted({row["size_bytes"] for row in rows}), [size_name(size) for size in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("bytes of each rank's input", color=COLOURS["muted"])
        axes.set_title(what, loc="left", fontsize=9.5, color=COLOURS["muted"])
        axes.tick_params(length=0, labelcolor=COLOURS["text"], labelsize=9)
        axes.grid(color="#e3e6ea", linewidth=0.6, zorder=0)
        axes.spines[:].set_visible(False)
    times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    widths.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    unverified = "" if result["verified"] else "  NOT VERIFIED"
    title = f"{result['benchmark']}: {result['ranks']} ranks, {result['dtype']}{', in place' if in_place else ''}{unverified}"
    figure.suptitle(title, fontsize=11, color=COLOURS["text"], x=0.012, ha="left")
    figure.savefig(path)


def size_name(size: int) -> str:
    """A number of bytes in binary units where it is round: 4K, 64M, 12."""
    for unit, power in (("G", 30), ("M", 20), ("K", 10)):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)


def draw_over_sms(result: dict[str, Any], path: Path) -> None:
    """Draw the bandwidth of all-gathers on a GPU over the SMs they may take, a panel for each size, into a PNG or SVG file."""
    sizes = sorted({row["size_bytes"] for row in result["rows"]})
    figure = Figure(figsize=(3.6 * len(sizes), 3.4), dpi=160, layout="constrained")
    colours = {
        "triton": COLOURS["matmul"],
        "gluon": COLOURS["copy"],
        "copy engine": COLOURS["reduce"],
        "copy engine, processes": "#a8cdb3",
        "torch, processes": "#b0574a",
        "plain copy": COLOURS["muted"],
    }
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        rows = [row for row in result["rows"] if row["size_bytes"] == size]
        for kind, colour in colours.items():
            points = [(row["comm_sms"], row["algbw_gbps"]) for row in rows if row["implementation"] == kind]
            if points and points[0][0] is None:
                axes.axhline(points[0][1], color=colour, linestyle=(0, (4, 3)), linewidth=1.2, label=kind)
            elif points:
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, linewidth=1.5, label=kind)
        axes.set_title(f"{size / 1e6:g} MB gathered", fontsize=10, loc="left", color=COLOURS["text"])
        axes.set_xlabel("SMs", color=COLOURS["muted"])
        axes.set_ylim(0)
        axes.grid(color="#e3e6ea", linewidth=0.6)
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("GB/s", color=COLOURS["muted"])
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)
