"""Plots of results, drawn from their JSON objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter, NullLocator

from weft.cli.values import POWERS, Shape
from weft_tools.bench import report, tables
from weft_tools.bench.pictures import COLOURS, DASHED, picture


def over_sizes(axes: Axes, sizes: Sequence[int], label: str) -> None:
    """Let the horizontal axis be logarithmic in bytes, with ticks at `sizes`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := sorted(set(sizes)), [size_name(size) for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def draw_times(result: dict[str, Any], path: Path) -> None:
    """Draw the times of a fused operator and its baselines, median and range, and the limit, as a
    PNG or SVG file.
    """
    size = f"{Shape(**result['shape'])} {result['dtype']}"
    link = f", emulated link of {result['link']['gbps']:g} Gbit/s" if result["link"] else ""
    title = f"{result['benchmark']}: {result['ranks']} ranks, {size}, {result['algorithm']}{link}"
    draw_bars(result, path, title)


def draw_bars(result: dict[str, Any], path: Path, title: str) -> None:
    """Draw the times of a result that overlaps, as `draw_times`. Bars of scaled times are hatched,
    and end at the edge if they are longer.
    """
    steps = list(result.get("ablation_ms", {}).items())[1:]  # the first is sequential
    times = (
        result["times_ms"]
        | result.get("without_gathered_ms", {})
        | result.get("streamed_ms", {})
        | result["baselines_ms"]
        | result.get("slow_baselines_ms", {})
        | {f"step: {name}": time for name, time in steps}
    )
    scaled = {name for name in times if tables.is_scaled(result, name)}
    longest = max(time["max"] for name, time in times.items() if name not in scaled)
    height, about = 0.42 * len(times) + 1.8, tables.about(result)
    with picture(path, 9, height, title, verified=result["verified"], about=about) as figure:
        axes = figure.subplots()
        for row, (name, time) in enumerate(times.items()):
            if name in scaled:
                _draw_scaled(axes, row, time["median"])
                continue
            colour = COLOURS.get(name, COLOURS["other"])
            axes.barh(row, time["median"], 0.66, color=colour, zorder=2)
            spread = [[time["median"] - time["min"]], [time["max"] - time["median"]]]
            axes.errorbar(
                time["median"],
                row + 0.21,  # below the number
                xerr=spread,
                color=COLOURS["text"],
                linewidth=0.9,
                capsize=2.5,
                zorder=3,
            )
            fits = time["median"] > 0.1 * longest
            axes.annotate(
                f"{time['median']:.2f}",
                (0 if fits else time["max"], row - 0.08),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color="white" if fits and sum(to_rgb(colour)) < 1.6 else COLOURS["text"],
                zorder=4,
            )
        limit = max(result["times_ms"][name]["median"] for name in ("compute", "communicate"))
        axes.axvline(limit, color=COLOURS["text"], linewidth=1, linestyle=DASHED, zorder=1)
        muted = COLOURS["muted"]
        axes.annotate(
            "limit",
            (limit, -0.62),
            (3, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=muted,
            va="center",
        )
        axes.set_yticks(range(len(times)), [report.called(result, name) for name in times])
        axes.set_ylim(len(times) - 0.4, -0.9)
        axes.set_xlim(0, 1.1 * longest)
        axes.set_xlabel("milliseconds: median (number and bar), and range of all runs (line)")
        axes.grid(visible=False, axis="y")


def _draw_scaled(axes: Axes, row: int, median: float) -> None:
    """Draw a time that was measured on fewer rows, which may be much longer than all others."""
    axes.barh(row, median, 0.66, color="white", edgecolor=COLOURS["other"], hatch="///", zorder=2)
    axes.annotate(
        f"{median:.0f}, scaled",
        (0, row),
        (6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=COLOURS["text"],
        bbox={"color": "white", "pad": 1.5},
        zorder=4,
    )


def draw_sweep(result: dict[str, Any], path: Path) -> None:
    """Draw time and bus bandwidth over size, a line for each implementation, as a PNG or SVG file.

    Rows in place are drawn only if all rows are in place. Kernels are drawn over the SMs that they
    take, and NCCL over its channels, which take an SM each, a panel for each size, beside the
    others.
    """
    in_place = all(row["in_place"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["in_place"] == in_place]
    title = f"{result['benchmark']}: {result['ranks']} ranks, {result['dtype']}"
    title += ", in place" if in_place else ""
    if any("comm_sms" in row for row in rows) or len({row.get("channels") for row in rows}) > 2:
        _draw_over_sms(rows, title, result, path)
        return
    about = tables.about(result)
    with picture(path, 11, 4.6, title, verified=result["verified"], about=about) as figure:
        times, widths = figure.subplots(1, 2)
        for name in dict.fromkeys(row["implementation"] for row in rows):
            own, colour = [row for row in rows if row["implementation"] == name], COLOURS.get(name)
            sizes, medians = (
                [row["size_bytes"] for row in own],
                [row["time_us"]["median"] for row in own],
            )
            times.plot(sizes, medians, label=name, color=colour, marker="o")
            times.fill_between(
                sizes,
                [row["time_us"]["min"] for row in own],
                medians,
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
            widths.plot(sizes, [row["busbw_gbps"] for row in own], color=colour, marker="o")
        times.set_yscale("log")
        for axes, heading in (
            (times, "microseconds: median, shaded down to the minimum"),
            (widths, "bus bandwidth, GB/s"),
        ):
            over_sizes(axes, [row["size_bytes"] for row in rows], "bytes of each rank's input")
            axes.set_title(heading)
        times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        widths.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=5)


def _draw_over_sms(
    rows: Sequence[dict[str, Any]], title: str, result: dict[str, Any], path: Path
) -> None:
    """Draw bus bandwidth over SMs: a line for each compiler, tile and number of warps, and for
    NCCL with several limits of its channels.
    """
    sizes = sorted({row["size_bytes"] for row in rows})
    width, about = max(9, 3.6 * len(sizes)), tables.about(result)
    others = dict.fromkeys(_line(row) for row in rows if _line(row) not in COLOURS)
    colours = COLOURS | {name: f"C{number}" for number, name in enumerate(others)}
    with picture(path, width, 4.6, title, verified=result["verified"], about=about) as figure:
        panels = figure.subplots(1, len(sizes), squeeze=False)[0]
        for axes, size in zip(panels, sizes, strict=True):
            lines = dict[str, list[tuple[int, float]]]()
            for row in (row for row in rows if row["size_bytes"] == size):
                name, sms = _line(row), _sms(row)
                if sms is not None:
                    lines.setdefault(name, []).append((sms, row["busbw_gbps"]))
                    continue
                axes.axhline(
                    row["busbw_gbps"],
                    color=colours[name],
                    linestyle=DASHED,
                    linewidth=1.2,
                    label=name,
                )
            for name, points in lines.items():
                along = zip(*sorted(points), strict=True)
                axes.plot(*along, marker="o", label=name, color=colours[name])
            axes.set_title(f"{size_name(size)} of each rank")
            axes.set_xlabel("SMs")
            axes.set_ylim(bottom=0)
        panels[0].set_ylabel("bus bandwidth, GB/s")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _sms(row: dict[str, Any]) -> int | None:
    """The SMs of a kernel, or the channels to which NCCL is limited; None for other rows."""
    return row.get("comm_sms") or row.get("channels")


def _line(row: dict[str, Any]) -> str:
    """The implementation of a row without its SMs or channels."""
    return re.sub(rf"{_sms(row)} SMs?, |, {_sms(row)} channels?", "", row["implementation"])


def size_name(size: int) -> str:
    """A number of bytes in the largest binary unit that divides it: 4K, 64M, 12."""
    unit, power = next(
        (unit, power) for unit, power in reversed(POWERS.items()) if size % (1 << power) == 0
    )
    return f"{size >> power}{unit}"
