"""The command ``weft bench``: refusals of options that do not go together, and where results go.

Loads torch only once a benchmark runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from weft.bench import repository, settings
from weft.bench.settings import FusedSettings, SweepSettings
from weft.cli import options
from weft.cli.options import refuse
from weft.schedules.operators import OPERATORS

if TYPE_CHECKING:
    from weft.bench.fused import Result

app = typer.Typer(
    help="Measure operators against their limits and against other systems.",
    no_args_is_help=True,
)


def _fused(given: FusedSettings) -> None:
    from weft.bench import fused, plots, report
    from weft.bench.subjects import subject

    given = FusedSettings(**vars(given))
    if given.peers == "host":
        options.need_gpu()
        products = options.from_repository("--peers host", "gpu.products")
        options.hand_over(
            given, products.from_host, products.print_times, plots.draw_times, here=True
        )
        return
    _check_fused(given)
    measure = partial(fused.measure, subject(given.operator))
    options.hand_over(given, measure, _print, plots.draw_times, report.to_json)


def _check_fused(given: FusedSettings) -> None:
    """End with exit status 2 if this cannot be measured."""
    algorithm, operator = given.algorithm, OPERATORS[given.operator]
    _, ranks = options.world_size(given.ranks)
    takers = [name for name in operator.algorithms if name not in operator.uncut]
    chooses = algorithm == "auto" and not {*operator.auto_candidates} <= {*operator.uncut}
    if given.chunk_rows and algorithm not in takers and not chooses:
        why = f"{algorithm} does not take a chunk size: use --algorithm {_either(takers)}"
        refuse("--chunk-rows", why)
    if given.ablate and (ranks == 1 or algorithm not in (*takers, "auto")):
        what = "one rank" if ranks == 1 else algorithm
        needed = f"use 2 or more ranks and --algorithm {_either(takers)}"
        refuse("--ablate", f"{what} has no transfers to overlap: {needed}")
    possible = {given.dtype, "float32"} if given.dtype != "float64" else {given.dtype}
    if given.out_dtype and given.out_dtype not in possible:
        names = " or ".join(sorted(possible))
        refuse("--out-dtype", f"a product of {given.dtype} is {names}; got {given.out_dtype}")
    if given.link_gbps is None and given.link_latency_us is not None:
        missing = (
            "an emulated link needs a bandwidth too: add --link-gbps GBPS, or --link-gbps auto"
        )
        refuse("--link-latency-us", missing)
    if given.link_gbps and algorithm in operator.moves_nothing:
        moving = [name for name in takers if name not in operator.moves_nothing]
        still = f"{algorithm} moves no rows, so an emulated link cannot slow it"
        refuse("--link-gbps", f"{still}: use --algorithm {_either(moving)}")
    if given.link_gbps and ranks == 1:
        refuse("--link-gbps", "a single rank sends nothing over a link: use --ranks 2 or more")
    options.check_gloo(given)
    try:
        if given.save_outputs:
            given.save_outputs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("--save-outputs", f"cannot make the directory: {error}")


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def _print(result: Result, console: Console) -> None:
    """Print the result, and write the traces of single instructions."""
    from weft.bench import report

    report.print_tables(result, console)
    options.write_traces(result.settings, result.traces, report.title(result))


def _sweep(given: SweepSettings) -> None:
    from weft.bench import plots, sweep

    if given.device == "cuda":
        options.need_gpu()
        gathers = options.from_repository("--device cuda", "gpu.gathers")
        options.hand_over(given, gathers.all_gathers, gathers.print_table, gathers.draw, here=True)
        return
    if given.op == "avg" and not given.dtype.startswith(("float", "bfloat")):
        refuse("--op", f"averages are of floating dtypes; got {given.dtype}")
    for name in given.baselines:
        if given.op == "avg":
            refuse("--baseline", f"{name} has no averages: use --baseline none")
        if name not in settings.BASELINES:
            known = ", ".join(("none", *settings.BASELINES))
            refuse("--baseline", f"there is no baseline {name!r}: use {known}")
        if name != "gloo":
            baselines = options.from_repository("--baseline", "baselines")
            if why := baselines.refusal(name, given):
                refuse("--baseline", why)
    options.hand_over(
        given, sweep.measure, sweep.print_tables, plots.draw_sweep, alone=options.ALONE
    )


def _elsewhere(name: str) -> Callable[[list[str]], None]:
    """The command in place of one that comes with the repository, where that is not there."""

    def refused(arguments: list[str] = typer.Argument(None, hidden=True)) -> None:  # noqa: B008
        refuse(name, f"this benchmark {repository.MISSING}")

    return refused


_COMMANDS: dict[str, tuple[type[Any], Any]] = {
    **{
        name.replace("_", "-"): (settings.fused(operator), _fused)
        for name, operator in OPERATORS.items()
    },
    "all-gather": (settings.AllGather, _sweep),
    "reduce-scatter": (settings.ReduceScatter, _sweep),
    "all-reduce": (settings.AllReduce, _sweep),
    "broadcast": (settings.Broadcast, _sweep),
    "all-to-all": (settings.AllToAll, _sweep),
}
if repository.there():
    _COMMANDS |= repository.module("commands").COMMANDS
else:
    any_options = {"ignore_unknown_options": True, "help_option_names": []}
    for name in repository.COMMANDS:
        app.command(name, help="Comes with the repository.", context_settings=any_options)(
            _elsewhere(name)
        )
for name, (kind, command) in _COMMANDS.items():
    app.command(name)(options.taking(kind, command))
