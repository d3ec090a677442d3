"""The timeline picture: the instructions of every lane of every rank over time, one panel per trace
over one time axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from weft.plan.trace import KINDS, Span, Trace
from weft_tools.bench.pictures import COLOURS, DASHED, picture

_BAR = 0.72  # of the height of a lane


def draw(traces: Sequence[Trace], path: Path, title: str, about: str = "") -> None:
    """Draw `traces` one below the other, each from its own start, as PNG or SVG by the suffix of
    `path`, with the speedup of each over the first if that is sequential, and `about`, a line on
    the run.
    """
    traces = [trace.without_programs() for trace in traces]
    lanes = [len(trace.lanes) for trace in traces]
    height = 0.36 * sum(lanes) + 0.75 * len(traces) + 1.1 + (0.2 if about else 0)
    with picture(path, 11, height, title, about=about) as figure:
        panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False, height_ratios=lanes)[
            :, 0
        ]
        longest = max(trace.seconds for trace in traces)
        for panel, trace in zip(panels, traces, strict=True):
            _draw_panel(panel, trace, longest, traces[0])
        panels[0].set_xlim(0, 1e3 * longest * 1.01)
        panels[-1].set_xlabel("milliseconds")
        found = dict.fromkeys(span.kind for trace in traces for span in trace.spans)
        kinds = sorted(found, key=lambda kind: (kind in KINDS, kind))
        figure.legend(
            handles=[_key(kind) for kind in kinds], loc="outside lower center", ncols=len(kinds)
        )


def _draw_panel(panel: Axes, trace: Trace, longest: float, first: Trace) -> None:
    rows = {lane: row for row, lane in enumerate(trace.lanes)}
    for (rank, _), row in rows.items():
        panel.axhspan(
            row - 0.5,
            row + 0.5,
            color="#f6f7f9" if rank % 2 == 0 else "white",
            linewidth=0,
            zorder=0,
        )
    for kind in sorted({span.kind for span in trace.spans} - {"notify"}, key="wait".__ne__):
        height, edge = (_BAR / 3, 0.0) if kind == "wait" else (_BAR, 0.4)
        look: dict[str, Any] = {
            "facecolor": COLOURS.get(kind, COLOURS["compute"]),
            "edgecolor": "white",
            "linewidth": edge,
            "zorder": 2,
        }
        for lane, row in rows.items():
            spans = [
                _milliseconds(span, trace)
                for span in trace.spans
                if (span.rank, span.lane) == lane and span.kind == kind
            ]
            panel.broken_barh(
                [(start, stop - start) for start, stop in spans], (row - height / 2, height), **look
            )
    for span in trace.spans:
        start, stop = _milliseconds(span, trace)
        row = rows[span.rank, span.lane]
        if span.kind == "notify":
            panel.plot(
                [stop, stop],
                [row - 0.5, row - _BAR / 2],
                color=COLOURS["notify"],
                linewidth=0.9,
                zorder=3,
            )
        elif span.rows and span.kind not in KINDS and stop - start > 50 * longest:  # the label fits
            panel.text(
                (start + stop) / 2,
                row,
                f"{span.rows} rows",
                ha="center",
                va="center",
                color="white",
                fontsize=7.5,
                zorder=4,
            )
    for notify, wait in (map(trace.spans.__getitem__, pair) for pair in trace.arrows()):
        if notify.stop < wait.start:  # nothing was waited for
            continue
        panel.annotate(
            "",
            (_milliseconds(wait, trace)[1], rows[wait.rank, wait.lane]),
            (_milliseconds(notify, trace)[0], rows[notify.rank, notify.lane]),
            arrowprops={
                "arrowstyle": "->",
                "color": COLOURS["notify"],
                "linewidth": 0.5,
                "alpha": 0.5,
                "shrinkA": 0,
                "shrinkB": 0,
                "mutation_scale": 7,
            },
            zorder=3,
        )
    end = 1e3 * trace.seconds
    panel.axvline(end, color=COLOURS["text"], linewidth=1, linestyle=DASHED, zorder=1)
    compared = trace is not first and first.title == "sequential"
    faster = f", {first.seconds / trace.seconds:.2f}x in this run" if compared else ""
    panel.set_title(
        f"{trace.title}  {end:.2f} ms{faster}",
        loc="left",
        fontsize=10.5,
        fontweight="bold",
        color=COLOURS["text"],
    )
    part = trace.hidden_copies()
    hidden = (
        "nothing is copied"
        if part is None
        else f"{100 * part:.0f} % of copying hidden behind products"
    )
    panel.set_title(hidden, loc="right")
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_yticks(list(rows.values()), [f"rank {rank}  {lane}" for rank, lane in rows])
    panel.tick_params(labelbottom=True)
    panel.grid(visible=False, axis="y")


def _milliseconds(span: Span, trace: Trace) -> tuple[float, float]:
    return (span.start - trace.start) / 1e6, (span.stop - trace.start) / 1e6


def _key(kind: str) -> Patch | Line2D:
    if kind == "notify":
        return Line2D(
            [],
            [],
            color=COLOURS["notify"],
            marker="|",
            markersize=8,
            markeredgewidth=1.2,
            linestyle="none",
            label=kind,
        )
    return Patch(facecolor=COLOURS.get(kind, COLOURS["compute"]), label=kind)
