"""The picture of the benchmark of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from weft_tools.bench.pictures import COLOURS, DASHED, picture
from weft_tools.bench.vllm.tables import Figure, base, kind, of, title

_COLUMNS = 3
_GROUP = 0.8
"""Panels side by side; the part of the distance of two groups that bars take."""

Bars = Mapping[str, Sequence[float]]
"""The heights of the bars of each variant, one for each group."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw into a PNG or SVG file how many times as fast as on vLLM's shared memory each variant
    is, a group of bars for each model and mode; and the milliseconds beside busy processes.
    """
    options = result["options"]
    speeds = {f"prompt of {n} tokens": of("prefill_ms", n) for n in options["prefill"]}
    speeds |= {f"tokens of a batch of {n}": of("token_ms", n, "median") for n in options["batches"]}
    beside = ("median", "p99") if options["neighbours"] else ()
    lines = -(-(len(speeds) + len(beside)) // _COLUMNS)
    with picture(path, 14, 2.7 * lines + 0.7, title(result), verified=result["verified"]) as figure:
        panels = [*figure.subplots(lines, _COLUMNS, squeeze=False).flat]
        for axes, (name, times) in zip(panels, speeds.items(), strict=False):
            _speed(axes, result, times)
            axes.set_title(f"{name}: times as fast")
        for axes, key in zip(panels[len(speeds) :], beside, strict=False):
            _beside(axes, result, key)
            axes.set_title(f"milliseconds of a token beside busy processes: {key}")
        for axes in panels[len(speeds) + len(beside) :]:
            axes.set_visible(False)
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(options["variants"]))


def _speed(axes: Axes, result: dict[str, Any], times: Figure) -> None:
    """Draw the speed of every row, as a multiple of that of the row it is compared with."""
    rows = result["rows"]
    kinds = [*dict.fromkeys(map(kind, rows))]
    found = {
        variant: [
            times(base(result, row)) / times(row) for row in rows if row["variant"] == variant
        ]
        for variant in result["options"]["variants"]
    }
    _bars(axes, ["\n".join(each) for each in kinds], found)
    axes.axhline(1, color=COLOURS["text"], linewidth=1, linestyle=DASHED, zorder=1)


def _beside(axes: Axes, result: dict[str, Any], key: str) -> None:
    """Draw the milliseconds of a token over the number of busy processes, of the first mode that
    was measured so.
    """
    counts = result["options"]["neighbours"]
    rows = [row for row in result["rows"] if row["neighbours_ms"]]
    rows = [row for row in rows if kind(row) == kind(rows[0])]
    found = {
        row["variant"]: [of("neighbours_ms", count, key)(row) for count in counts] for row in rows
    }
    _bars(axes, [str(count) for count in counts], found)
    axes.set_xlabel(" ".join(("busy processes;", *kind(rows[0]))))


def _bars(axes: Axes, groups: Sequence[str], heights: Bars) -> None:
    """Draw groups of bars, one for each variant in its colour."""
    width = _GROUP / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        shift = (number - (len(heights) - 1) / 2) * width
        places = [place + shift for place in range(len(groups))]
        axes.bar(places, values, 0.9 * width, color=COLOURS[name], label=name, zorder=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
