"""The benchmarks by the names of their commands: a record of each.

Imports neither torch nor ranks; the functions that show a result are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from weft.schedules.operators import OPERATORS
from weft_tools.bench.settings.copies import CopySettings
from weft_tools.bench.settings.fused import fused
from weft_tools.bench.settings.moe import MoeSettings
from weft_tools.bench.settings.overlap import OverlapSettings
from weft_tools.bench.settings.sweeps import sweeps

Result = dict[str, Any]
"""A result as a JSON object."""


class Shown(NamedTuple):
    """The functions that print a kind of results, and draw it into a file."""

    print: Callable[[Result, Console], None]
    draw: Callable[[Result, Path], None]


class Benchmark(NamedTuple):
    """A benchmark: the class of its settings, and the function that finds how its results are
    shown.
    """

    settings: type[Any]
    shown: Callable[[], Shown]


def _fused() -> Shown:
    from weft_tools.bench import plots, report

    return Shown(report.print_tables, plots.draw_times)


def _sweep() -> Shown:
    from weft_tools.bench import plots, sweep

    return Shown(sweep.print_tables, plots.draw_sweep)


def _overlap() -> Shown:
    from weft_tools.bench import overlap, plots

    return Shown(overlap.print_tables, plots.draw_times)


def _p2p() -> Shown:
    from weft_tools.bench import p2p

    return Shown(p2p.print_tables, p2p.draw)


def _moe() -> Shown:
    from weft_tools.bench import moe

    return Shown(moe.print_tables, moe.draw)


def _from_host() -> Shown:
    from weft_tools.bench import plots
    from weft_tools.bench.gpu import products

    return Shown(products.print_times, plots.draw_times)


BENCHMARKS = {
    **{
        name.replace("_", "-"): Benchmark(fused(operator), _fused)
        for name, operator in OPERATORS.items()
    },
    **{name.replace("_", "-"): Benchmark(kind, _sweep) for name, kind in sweeps().items()},
    "moe": Benchmark(MoeSettings, _moe),
    "overlap": Benchmark(OverlapSettings, _overlap),
    "p2p": Benchmark(CopySettings, _p2p),
}


def shown(result: Result) -> Shown:
    """The functions for a result. Raises `ValueError` for a benchmark that this version lacks."""
    name = result["benchmark"]
    if result.get("device") == "cuda" and "shape" in result:
        return _from_host()
    if name not in BENCHMARKS:
        raise ValueError(f"this version of weft has no benchmark {name!r}")
    return BENCHMARKS[name].shown()
