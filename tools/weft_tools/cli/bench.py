"""The commands ``weft bench …``: checks of their options, and the runs.

Imports torch only when a benchmark runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from weft.cli import options
from weft.cli.options import reject
from weft.cli.values import parse_sizes
from weft_tools.bench import systems
from weft_tools.bench.benchmarks import BENCHMARKS
from weft_tools.bench.settings.copies import CopySettings
from weft_tools.bench.settings.fused import FusedSettings
from weft_tools.bench.settings.moe import MoeSettings
from weft_tools.bench.settings.overlap import GATHERS, OverlapSettings
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.cli import running, shared

if TYPE_CHECKING:
    from weft_tools.bench.moe import Measured
    from weft_tools.bench.result import Result

app = typer.Typer(
    help="Measure operators, their limits, and the same work by other systems.\n\n"
    "For example: weft bench all-gather-matmul --link-gbps auto --timeline timeline.png\n\n"
    "Save a result for weft show and weft report: weft bench all-reduce --json result.json",
    no_args_is_help=True,
    add_completion=False,
)


def _fused(settings: FusedSettings) -> None:
    from weft_tools.bench import fused, report
    from weft_tools.bench.gpu import products
    from weft_tools.bench.subjects import subject

    settings = FusedSettings(**vars(settings))
    if settings.peers == "host":
        options.need_gpu("--peers host")
        running.run_benchmark(settings, products.from_host, in_process=True)
        return
    _check_fused(settings)
    settings = running.placed(settings)
    kind = subject(settings.operator)
    name = settings.operator.replace("_", "-")
    if settings.baseline not in (None, "none") and not kind.compared:
        reject("--baseline", f"{name} has no baseline to compare with: use --baseline none")
    if settings.bias and not kind.biased:
        reject("--bias", f"{name} is not known to add a bias: omit it")
    running.announce(f"{name}: about {settings.seconds:g} s at most, as --seconds says")
    running.run_benchmark(
        settings,
        partial(fused.measure, kind),
        report.to_json,
        more=_write_traces,
        together=running.sharing_one_gpu(settings),
    )


def _check_fused(settings: FusedSettings) -> None:
    """End with exit status 2 if these settings cannot be measured."""
    from weft_tools.bench import fused_baselines

    _, ranks = options.world_size(settings.ranks)
    possible = {settings.dtype, "float32"} if settings.dtype != "float64" else {settings.dtype}
    if settings.out_dtype and settings.out_dtype not in possible:
        names = " or ".join(sorted(possible))
        reject("--out-dtype", f"a product of {settings.dtype} is {names}; got {settings.out_dtype}")
    running.check_baselines(settings, systems.of_fused(settings.device))
    for name in settings.baselines:
        if why := fused_baselines.rejection(name, settings.operator, settings.shape.m, ranks):
            reject("--baseline", f"{why}: use --baseline none")
    try:
        for directory in filter(None, (settings.save_outputs, settings.save_data)):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reject("--save-outputs / --save-data", f"cannot make the directory: {error}")


def _write_traces(result: Result) -> None:
    from weft_tools.bench import report, tables

    found = report.to_json(result)
    shared.write_traces(result.settings, result.traces, report.title(found), tables.about(found))


def _sweep(settings: SweepSettings) -> None:
    from weft_tools.bench import collective_baselines, sweep

    if settings.op == "avg" and not settings.dtype.startswith(("float", "bfloat")):
        reject("--op", f"avg needs a floating dtype; got {settings.dtype}: use --dtype float32")
    running.check_baselines(settings, systems.of_collectives(settings.device))
    for name in settings.baselines:
        if why := collective_baselines.rejection(name, settings):
            reject("--baseline", why)
    settings = running.placed(settings)
    running.run_benchmark(
        settings,
        sweep.measure,
        alone=options.SINGLE_RANK,
        together=running.sharing_one_gpu(settings),
    )


def _overlap(settings: OverlapSettings) -> None:
    from weft_tools.bench import overlap

    if len(parse_sizes(settings.size)) > 1:
        reject("--size", f"expected one size; got {settings.size!r}")
    _check_elements("--size", settings.size, settings.dtype)
    running.check_baselines(settings, systems.LIBRARIES)
    _check_gathers(settings)
    settings = running.placed(settings)
    together = running.sharing_one_gpu(settings)
    for gather in settings.gathers:
        if together and gather in ("multicast", "nccl-zero-cta"):
            reject("--gather", f"{gather} needs a GPU for each rank: leave it out")
    running.run_benchmark(settings, overlap.measure, together=together)


def _check_gathers(settings: OverlapSettings) -> None:
    """End with exit status 2 if this device does not support such a gather."""
    on_gpu = settings.device == "cuda"
    for gather in settings.gathers:
        if gather not in GATHERS:
            reject("--gather", f"there is no gather {gather!r}: use {', '.join(GATHERS)}")
        if gather == "kernel" and not on_gpu and settings.engine != "interpreter":
            instead = "use --device cuda, or --engine interpreter"
            reject("--gather", f"a kernel runs on a GPU, or in an interpreter: {instead}")
        if gather in ("multicast", "nccl-zero-cta"):
            if not on_gpu:
                reject("--gather", f"{gather} needs NVIDIA's GPUs: use --device cuda")
            if settings.plain_out:
                reject("--plain-out", f"{gather} gathers into its own memory: omit one of them")


def _moe(settings: MoeSettings) -> None:
    from weft_tools.bench import moe

    _, ranks = options.world_size(settings.ranks)
    chosen = -(-ranks * settings.experts // (2 if settings.routing == "empty" else 1))
    if settings.top > chosen:
        few = f"tokens choose among {chosen} experts, all of them different ones"
        reject("--top", f"{few}: use at most {chosen}, or more --experts")
    running.check_baselines(settings, (moe.GLOO,))
    running.run_benchmark(
        settings,
        moe.measure,
        lambda measured: measured.result,
        more=partial(_write_layer_traces, settings),
        alone=options.SINGLE_RANK,
    )


def _write_layer_traces(settings: MoeSettings, measured: Measured) -> None:
    from weft_tools.bench import moe, tables

    result = measured.result
    shared.write_traces(settings, measured.traces, moe.title(result), tables.about(result))


def _p2p(settings: CopySettings) -> None:
    from weft_tools.bench import p2p

    _check_copies(settings)
    settings = running.placed(settings)
    running.run_benchmark(
        settings,
        p2p.measure,
        alone=options.SINGLE_RANK,
        together=running.sharing_one_gpu(settings),
    )


def _check_copies(settings: CopySettings) -> None:
    """End with exit status 2 if these settings cannot be measured."""
    if settings.engine in ("reference", "triton"):
        why = f"one-sided calls have no plan and no product for the engine {settings.engine}"
        reject("--engine", f"{why}: use streams, or on a CPU host or interpreter")
    if settings.tile and len(parse_sizes(settings.tile)) > 1:
        reject("--tile", f"expected one size; got {settings.tile!r}")
    for option, text in (("--sizes", settings.sizes), ("--tile", settings.tile)):
        if text:
            _check_elements(option, text, settings.dtype)


def _check_elements(option: str, sizes: str, dtype: str) -> None:
    """Refuse sizes that are no whole numbers of elements."""
    itemsize = int("".join(filter(str.isdecimal, dtype))) // 8
    for size in parse_sizes(sizes):
        if size % itemsize:
            why = f"{size} bytes are no whole number of elements of {dtype}"
            reject(option, f"{why}: use multiples of {itemsize}, or another --dtype")


_COMMANDS: dict[type[Any], Any] = {
    FusedSettings: _fused,
    SweepSettings: _sweep,
    MoeSettings: _moe,
    OverlapSettings: _overlap,
    CopySettings: _p2p,
}
"""The commands by the classes of their settings."""
for name, benchmark in BENCHMARKS.items():
    [command] = [run for kind, run in _COMMANDS.items() if issubclass(benchmark.settings, kind)]
    app.command(name)(options.command_from(benchmark.settings, command))
