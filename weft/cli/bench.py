"""``weft bench …``: what options cannot do together, who measures, and where results go. Loads
torch only once one runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from weft.bench import settings
from weft.bench.settings import (
    CopySettings,
    FusedSettings,
    OverlapSettings,
    ServingSettings,
    SweepSettings,
    parse_sizes,
)
from weft.cli import options
from weft.cli.options import refuse
from weft.schedules.operators import OPERATORS

if TYPE_CHECKING:
    from weft.bench.fused import Result

app = typer.Typer(
    help="Measure operators against their limits and what one would write without weft.",
    no_args_is_help=True,
)

_ALONE = "a single rank has nobody to exchange anything with: use 2 or more"


def _fused(given: FusedSettings) -> None:
    from weft.bench import fused, plots, report
    from weft.bench.subjects import AllGatherMatmul, MatmulSum

    if given.peers == "host":
        options.need_gpu()
        from weft.bench.gpu import products

        options.hand_over(
            given, products.from_host, products.print_times, plots.draw_times, here=True
        )
        return
    _check_fused(given)
    subject = AllGatherMatmul if given.operator == "all_gather_matmul" else MatmulSum
    options.hand_over(
        given, partial(fused.measure, subject), _tell, plots.draw_times, report.to_json
    )


def _check_fused(given: FusedSettings) -> None:
    """End with exit status 2 for what cannot be measured."""
    algorithm, operator, (_, ranks) = (
        given.algorithm,
        OPERATORS[given.operator],
        options.world_size(given.ranks),
    )
    takers = [name for name in operator.algorithms if name not in operator.uncut]
    if (
        given.chunk_rows
        and algorithm not in takers
        and (algorithm != "auto" or given.operator == "all_gather_matmul")
    ):
        names = f"{', '.join(takers[:-1])} or {takers[-1]}"
        refuse("--chunk-rows", f"{algorithm} does not take a chunk size: use --algorithm {names}")
    if given.ablate and (ranks == 1 or algorithm not in (*takers, "auto")):
        what = "one rank" if ranks == 1 else algorithm
        refuse(
            "--ablate",
            f"{what} has no transfers to overlap: use 2 or more ranks and --algorithm pull, push "
            "or ring",
        )
    possible = {given.dtype, "float32"} if given.dtype != "float64" else {given.dtype}
    if given.out_dtype and given.out_dtype not in possible:
        names = " or ".join(sorted(possible))
        refuse("--out-dtype", f"a product of {given.dtype} comes as {names}; got {given.out_dtype}")
    if given.link_gbps is None and given.link_latency_us is not None:
        refuse(
            "--link-latency-us",
            "an emulated link needs a bandwidth too: add --link-gbps GBPS, or --link-gbps auto",
        )
    if given.link_gbps and algorithm in ("direct", "put"):
        moving = "push or ring" if algorithm == "direct" else "push, or two_shot of an all-reduce"
        refuse(
            "--link-gbps",
            f"{algorithm} moves no rows, so an emulated link cannot slow it: use --algorithm "
            f"{moving}",
        )
    if given.link_gbps and ranks == 1:
        refuse("--link-gbps", "a single rank sends nothing over a link: use --ranks 2 or more")
    _check_baseline(given)
    try:
        if given.save_outputs:
            given.save_outputs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse("--save-outputs", f"cannot make the directory: {error}")


def _check_baseline(given: FusedSettings | OverlapSettings) -> None:
    if given.baseline not in (None, "none", "gloo"):
        refuse("--baseline", f"there is no baseline {given.baseline!r}: use none or gloo")
    if given.baseline == "gloo" and given.link_gbps:
        refuse(
            "--baseline",
            "a baseline does not pass the emulated link, so they cannot be compared: use "
            "--baseline none",
        )


def _tell(result: Result, console: Console) -> None:
    """Print the result, and write what is to be seen of single instructions."""
    from weft.bench import report

    report.print_tables(result, console)
    options.write_traces(result.settings, result.traces, report.title(result))


def _sweep(given: SweepSettings) -> None:
    from weft.bench import collectives, plots

    if given.device == "cuda":
        options.need_gpu()
        from weft.bench.gpu import gathers

        options.hand_over(given, gathers.all_gathers, gathers.print_table, gathers.draw, here=True)
        return
    if given.op == "avg" and not given.dtype.startswith(("float", "bfloat")):
        refuse("--op", f"averages are of floating dtypes; got {given.dtype}")
    _check_baselines(given)
    options.hand_over(
        given, collectives.measure, collectives.print_tables, plots.draw_sweep, alone=_ALONE
    )


def _check_baselines(given: SweepSettings) -> None:
    from weft.bench import deepspeed
    from weft.bench.mpi import MPIS, environment

    for name in given.baselines:
        if name not in ("gloo", *MPIS, deepspeed.NAME):
            refuse(
                "--baseline",
                f"there is no baseline {name!r}: use none, gloo, {', '.join(MPIS)}, "
                f"{deepspeed.NAME}",
            )
        if given.op == "avg":
            refuse("--baseline", f"{name} has no averages: use --baseline none")
        if (
            name in MPIS
            and given.operation in ("reduce_scatter", "all_reduce")
            and given.dtype in ("float16", "bfloat16")
        ):
            refuse(
                "--baseline",
                f"{name} does not reduce {given.dtype} tensors: use --baseline gloo, or another "
                "--dtype",
            )
        if name in MPIS and not (environment(name) / "bin" / "mpiexec").exists():
            refuse(
                "--baseline",
                f"there is no {environment(name)} here: run `make baselines` and start in its "
                "directory",
            )
        if name == deepspeed.NAME and (
            given.operation != "all_reduce"
            or given.op != "sum"
            or given.dtype not in deepspeed.DTYPES
        ):
            refuse(
                "--baseline",
                f"{name} only sums, by an all-reduce, and of {', '.join(deepspeed.DTYPES)}: use "
                "--baseline gloo",
            )
        if name == deepspeed.NAME and (why := deepspeed.missing()):
            refuse("--baseline", why)


def _overlap(given: OverlapSettings) -> None:
    from weft.bench import overlap, plots

    if len(parse_sizes(given.size)) > 1:
        refuse("--size", f"expected one size; got {given.size!r}")
    _check_baseline(given)
    options.hand_over(given, overlap.measure, overlap.print_tables, plots.draw_times)


def _copies(given: CopySettings) -> None:
    from weft.bench import p2p

    options.hand_over(given, p2p.measure, p2p.print_tables, p2p.draw, alone=_ALONE)


def _serving(given: ServingSettings) -> None:
    from weft.bench import serving

    _, ranks = options.world_size(given.ranks)
    for name in ("hidden", "intermediate"):
        if getattr(given, name) % ranks:
            refuse(
                f"--{name}",
                f"{ranks} ranks cannot share {getattr(given, name)} evenly: use a multiple of "
                f"{ranks}",
            )
    if (most := given.decode + given.prefill - 1) < given.warmup + given.steps:
        refuse(
            "--steps",
            f"there are {most} numbers of tokens, and each step has its own: fewer steps, or more "
            "--prefill",
        )
    options.hand_over(given, serving.measure, serving.print_tables, serving.draw, alone=_ALONE)


_COMMANDS: dict[str, tuple[type[Any], Any]] = {
    "all-gather-matmul": (settings.AllGatherMatmul, _fused),
    "matmul-reduce-scatter": (settings.MatmulReduceScatter, _fused),
    "matmul-all-reduce": (settings.MatmulAllReduce, _fused),
    "all-gather": (settings.AllGather, _sweep),
    "reduce-scatter": (settings.ReduceScatter, _sweep),
    "all-reduce": (settings.AllReduce, _sweep),
    "broadcast": (settings.Broadcast, _sweep),
    "all-to-all": (settings.AllToAll, _sweep),
    "overlap": (settings.OverlapSettings, _overlap),
    "p2p": (settings.CopySettings, _copies),
    "serving": (settings.ServingSettings, _serving),
}
for name, (kind, command) in _COMMANDS.items():
    app.command(name)(options.taking(kind, command))
