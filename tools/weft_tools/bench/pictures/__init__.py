"""Pictures in weft's style: PNG and SVG files drawn by matplotlib, and in `page` HTML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

COLOURS = {
    name: colour
    for colour, names in {
        "#3566a8": ("matmul", "compute", "weft", "weft.nn", "kernel"),
        "#8fb0da": ("weft (plain)", "weft (staged)", "weft-communicator", "compute in chunks"),
        "#e8963c": ("copy", "communicate", "weft (async)", "one process", "one-process", "openmpi"),
        "#f0b77e": ("copy engine (async)",),
        "#5a9e6f": ("reduce", "pipelined", "overlapped", "intel-mpi", "copy engine"),
        "#b0574a": ("mpich", "torch", "shared-memory"),
        "#9aa3b0": ("other", "sequential", "gloo", "nccl", "torch on gloo"),
        "#c3c8d0": ("wait",),
        "#22262e": ("text", "notify", "memcpy"),
        "#6b7280": ("muted", "torch.copy_"),
    }.items()
    for name in names
}
"""Colours of kinds of work, of implementations and of text, the same in all pictures."""

DASHED = (0, (4, 3))
"""The style of lines that show a limit."""

_LINE = 0.21
"""Inches from the top of the title to that of the line below it."""


@contextmanager
def picture(
    path: Path,
    width: float,
    height: float,
    title: str = "",
    *,
    verified: bool = True,
    about: str = "",
) -> Iterator[Figure]:
    """A figure in weft's style, of `width` by `height` inches, saved as PNG or SVG by the suffix of
    `path`. The title has a mark unless the result is `verified`; `about` is a line below it: the
    date, the machine, versions.
    """
    with style.context(Path(__file__).with_name("weft.mplstyle")):
        figure = Figure(figsize=(width, height))
        yield figure
        if title:
            shown = title if verified else f"{title}  NOT VERIFIED"
            # an empty second line, in which `about` is written in a smaller font
            first = figure.suptitle(f"{shown}\n" if about else shown, x=0.012, ha="left")
            figure.draw_without_rendering()  # the layout places the title
            second = first.get_position()[1] - _LINE / height
            figure.text(0.012, second, about, va="top", fontsize=7.5, color=COLOURS["muted"])
        figure.savefig(path)
