"""The command ``weft bench``: checks of its options, and the output of results.

Imports torch only when a benchmark runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from weft.cli import options
from weft.cli.options import refuse
from weft.schedules.operators import OPERATORS
from weft_bench import settings as kinds
from weft_bench.cli import commands, running
from weft_bench.settings import BASELINES, FusedSettings, SweepSettings

if TYPE_CHECKING:
    from weft_bench.fused import Result

app = typer.Typer(
    help="Measure operators, their limits, and the same work by other systems.\n\n"
    "For example: weft bench all-gather-matmul --link-gbps auto --timeline timeline.png\n\n"
    "Save a result for weft show and weft report: weft bench all-reduce --json result.json",
    no_args_is_help=True,
    add_completion=False,
)


def _fused(settings: FusedSettings) -> None:
    from weft_bench import fused, plots, report
    from weft_bench.gpu import products
    from weft_bench.subjects import subject

    settings = FusedSettings(**vars(settings))
    if settings.peers == "host":
        options.need_gpu("--peers host")
        running.run_benchmark(
            settings, products.from_host, products.print_times, plots.draw_times, in_process=True
        )
        return
    _check_fused(settings)
    settings = running.placed(settings)
    kind = subject(settings.operator)
    name = settings.operator.replace("_", "-")
    if settings.baseline not in (None, "none") and not kind.compared:
        refuse("--baseline", f"{name} has no baseline to compare with: use --baseline none")
    if settings.bias and not kind.biased:
        refuse("--bias", f"{name} is not known to add a bias: omit it")
    measure = partial(fused.measure, kind)
    running.run_benchmark(
        settings,
        measure,
        report.print_tables,
        plots.draw_times,
        report.to_json,
        more=_write_traces,
    )


def _check_fused(settings: FusedSettings) -> None:
    """End with exit status 2 if these settings cannot be measured."""
    from weft_bench import fused_baselines

    _, ranks = options.world_size(settings.ranks)
    possible = {settings.dtype, "float32"} if settings.dtype != "float64" else {settings.dtype}
    if settings.out_dtype and settings.out_dtype not in possible:
        names = " or ".join(sorted(possible))
        refuse("--out-dtype", f"a product of {settings.dtype} is {names}; got {settings.out_dtype}")
    running.check_baselines(settings, kinds.FUSED_BASELINES[settings.device])
    for name in settings.baselines:
        if why := fused_baselines.refusal(name, settings.operator, settings.shape.m, ranks):
            refuse("--baseline", f"{why}: use --baseline none")
    try:
        for directory in filter(None, (settings.save_outputs, settings.save_data)):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("--save-outputs / --save-data", f"cannot make the directory: {error}")


def _write_traces(result: Result) -> None:
    from weft_bench import report, tables

    found = report.to_json(result)
    options.write_traces(result.settings, result.traces, report.title(found), tables.about(found))


def _sweep(settings: SweepSettings) -> None:
    from weft_bench import collective_baselines, plots, sweep

    if settings.op == "avg" and not settings.dtype.startswith(("float", "bfloat")):
        refuse("--op", f"avg needs a floating dtype; got {settings.dtype}: use --dtype float32")
    running.check_baselines(settings, BASELINES[settings.device])
    for name in settings.baselines:
        if why := collective_baselines.refusal(name, settings):
            refuse("--baseline", why)
    settings = running.placed(settings)
    together = settings.device == "cuda" and running.sharing_one_gpu(settings)
    if together:
        for option, given in (
            ("--neighbours", settings.neighbours is not None),
            ("--baseline", settings.baselines),
        ):
            if given:
                refuse(option, "ranks that share a GPU are threads of one process: omit it")
    running.run_benchmark(
        settings,
        sweep.measure_in_threads if together else sweep.measure,
        sweep.print_tables,
        plots.draw_sweep,
        alone=options.SINGLE_RANK,
        in_process=together,
    )


_COMMANDS: dict[str, tuple[type[Any], Any]] = {
    **{
        name.replace("_", "-"): (kinds.fused(operator), _fused)
        for name, operator in OPERATORS.items()
    },
    **{name.replace("_", "-"): (kind, _sweep) for name, kind in kinds.sweeps().items()},
}
_COMMANDS |= commands.COMMANDS
for name, (kind, command) in _COMMANDS.items():
    app.command(name)(options.command_from(kind, command))
