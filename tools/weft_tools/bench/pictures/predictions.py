"""The picture of ``weft predict --sweep``: predicted times as curves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from weft.version import __version__
from weft_tools.bench.pictures import COLOURS, DASHED, picture
from weft_tools.predict import figures


def draw_sweep(
    swept: str, results: list[dict[str, Any]], values: Sequence[float], path: Path
) -> None:
    """Draw the times of a sweep, and the gain of overlap, into a PNG or SVG file."""
    first = results[0]
    shape = {**first["shape"], **({swept: swept.upper()} if swept in first["shape"] else {})}
    ranks = "" if swept == "ranks" else f"{first['ranks']} ranks, "
    size = "x".join(map(str, shape.values()))
    title = f"{first['predicted']} on {first['machine']}: {ranks}{size} {first['dtype']}"
    about = f"simulated by weft {__version__} on {date.today()}"
    with picture(path, 11, 4.4, title, about=about) as figure:
        times, gains = figure.subplots(1, 2)
        for name in figures.VIEWS:
            limit = name in ("compute", "communicate")
            look: dict[str, Any] = {"linestyle": DASHED} if limit else {"marker": "o"}
            found = [result["times_ms"][name] for result in results]
            times.plot(values, found, color=COLOURS[name], label=name, **look)
        speedups = [result["speedup"] for result in results]
        gains.plot(values, speedups, color=COLOURS["pipelined"], marker="o")
        gains.axhline(1, color=COLOURS["text"], linewidth=1, linestyle=DASHED)
        times.set_yscale("log", base=2)
        times.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        times.set_title("milliseconds, predicted")
        gains.set_title("speedup: sequential / pipelined, predicted")
        for axes in (times, gains):
            axes.set_xscale("log", base=2)
            rotation = 30 if len(values) > 8 else 0
            axes.set_xticks(values, [f"{value:g}" for value in values], rotation=rotation)
            axes.minorticks_off()
            axes.set_xlabel("GB/s of the link" if swept == "link" else swept)
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4)
