"""``weft bench all-gather`` and the other collectives, and ``weft bench overlap``: their options and where results go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from weft.cli import options
from weft.cli.options import Dtype, Gbps, Json, OnDevice, Plot, Seed, Threads

app = typer.Typer()


_ElementType = Literal["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64"]
_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Ranks to start; 2 unless a launcher did.")]


@dataclass(frozen=True)
class _Common:
    """What every collective takes."""

    ranks: _Ranks = None
    sizes: Annotated[str, typer.Option(metavar="FIRST:LAST:FACTOR,…", help="Bytes of each rank's input; K, M, G are binary.")] = (
        "4K:64M:4"
    )
    dtype: Annotated[_ElementType, typer.Option(help="Of the elements.")] = "float32"
    warmup: Annotated[int, typer.Option(min=0, help="Rounds of batches before the measured ones.")] = 2
    iterations: Annotated[int, typer.Option(min=1, help="Rounds of batches measured.")] = 20
    seed: Seed = 0
    baseline: Annotated[
        str | None, typer.Option(help="Of gloo, openmpi, mpich, or none; by default gloo. `make baselines` installs the MPIs.")
    ] = None
    json_file: Json = None
    plot: Plot = None
    threads: Threads = None


_Op = Annotated[Literal["sum", "avg", "max", "min"], typer.Option(help="The reduction.")]


@app.command()
@options.taking(_Common)
def all_gather(
    common: _Common,
    algorithm: Annotated[Literal["auto", "pull", "push", "ring"], typer.Option(help="How rows travel.")] = "auto",
    device: OnDevice = "cpu",
    comm_sms: Annotated[str, typer.Option(metavar="N,…", help="With --device cuda: SMs that the kernels may take.")] = "4,8,16,32",
) -> None:
    """All-gather over message size, out of place and in place."""
    if device == "cuda":
        _gathers_on_gpu(common, comm_sms)
    else:
        _sweep("all_gather", common, algorithm=algorithm)


def _gathers_on_gpu(common: _Common, comm_sms: str) -> None:
    """Measure the kernels over SMs; sizes are those of each rank's input, as on a CPU."""
    options.check_files(common.json_file, None, common.plot)
    sms, shards = options.parse_numbers(comm_sms, "--comm-sms"), options.parse_sizes(common.sizes, "--sizes")
    options.need_gpu()
    from weft.bench.gpu import gathers

    ranks, show, draw = common.ranks or 2, gathers.print_table, gathers.draw
    sizes = tuple(ranks * shard for shard in shards)
    settings = options.settings(gathers.Gathers, common, ranks=ranks, sizes=sizes, sms=sms, threads=1)
    options.hand_over(gathers.all_gathers, settings, 0, 1, show, draw, common.json_file, common.plot)


@app.command()
@options.taking(_Common)
def reduce_scatter(common: _Common, op: _Op = "sum") -> None:
    """Reduce-scatter over message size, out of place and in place."""
    _sweep("reduce_scatter", common, op=op)


@app.command()
@options.taking(_Common)
def all_reduce(
    common: _Common,
    op: _Op = "sum",
    algorithm: Annotated[
        Literal["auto", "one_shot", "two_shot", "ring"], typer.Option(help="How the work is shared out.")
    ] = "auto",
) -> None:
    """All-reduce over message size, out of place and in place."""
    _sweep("all_reduce", common, op=op, algorithm=algorithm)


@app.command()
@options.taking(_Common)
def broadcast(common: _Common) -> None:
    """Broadcast from rank 0 over message size, in place."""
    _sweep("broadcast", common)


@app.command()
@options.taking(_Common)
def all_to_all(common: _Common) -> None:
    """All-to-all of equal parts over message size, out of place."""
    _sweep("all_to_all", common)


@dataclass(frozen=True)
class _Overlap:
    """What the benchmark of overlap takes."""

    ranks: _Ranks = None
    shape: Annotated[str, typer.Option(metavar="MxKxN", help="Each rank's product, which needs nothing of others.")] = (
        "1024x1024x1024"
    )
    size: Annotated[str, typer.Option(metavar="BYTES", help="That each rank puts into the all-gather; K, M, G are binary.")] = "16M"
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices and of what is gathered.")] = "float32"
    warmup: options.Warmup = 3
    iterations: options.Iterations = 20
    seed: Seed = 0
    baseline: Annotated[str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")] = None
    link_gbps: Gbps = None
    json_file: Json = None
    plot: Plot = None
    threads: Threads = None


@app.command()
@options.taking(_Overlap)
def overlap(given: _Overlap) -> None:
    """A product and an all-gather that need nothing of each other: each alone, one after the other, and side by side."""
    from weft.bench import overlap as bench
    from weft.bench.plots import draw_times

    joined, ranks = options.world_size(given.ranks)
    options.check_files(given.json_file, None, given.plot)
    gathered = options.parse_sizes(given.size, "--size")
    if len(gathered) > 1:
        options.refuse("--size", f"expected one size; got {given.size!r}")
    if given.baseline not in (None, "none", "gloo") or (given.link_gbps and given.baseline == "gloo"):
        options.refuse("--baseline", "use gloo or none; on an emulated link only none, since a baseline does not pass it")
    m, k, n = options.parse_shape(given.shape)
    settings = options.settings(
        bench.Settings,
        given,
        m=m,
        k=k,
        n=n,
        gather_bytes=gathered[0],
        gloo=given.baseline != "none" and given.link_gbps is None,
        link_gbps=options.parse_gbps(given.link_gbps),
        threads=options.threads_for(given.threads, ranks),
    )
    options.hand_over(bench.measure, settings, joined, ranks, bench.print_tables, draw_times, given.json_file, given.plot)


def _sweep(operation: str, common: _Common, **more: str) -> None:
    """Check what remains to be checked, measure, and hand over the result; `more`: the reduction, or the algorithm."""
    from weft.bench import collectives
    from weft.bench.plots import draw_sweep

    joined, ranks = options.world_size(common.ranks)
    if ranks < 2:
        options.refuse("--ranks", "a single rank has nobody to exchange anything with: use 2 or more")
    options.check_files(common.json_file, None, common.plot)
    settings = options.settings(
        collectives.Settings,
        common,
        operation=operation,
        sizes=tuple(options.parse_sizes(common.sizes, "--sizes")),
        baselines=_baselines(common.baseline, common.dtype, more.get("op")),
        threads=options.threads_for(common.threads, ranks),
        **more,
    )
    if more.get("op") == "avg" and not common.dtype.startswith(("float", "bfloat")):
        options.refuse("--op", f"averages are of floating dtypes; got {common.dtype}")
    show, draw = collectives.print_tables, draw_sweep
    options.hand_over(collectives.measure, settings, joined, ranks, show, draw, common.json_file, common.plot)


def _baselines(text: str | None, dtype: str, op: str | None) -> tuple[str, ...]:
    from weft.bench.mpi import MPIS, environment

    if text == "none" or (text is None and op == "avg"):
        return ()
    asked = tuple((text or "gloo").split(","))
    for name in asked:
        if name not in ("gloo", *MPIS):
            options.refuse("--baseline", f"there is no baseline {name!r}: use none, gloo, {', '.join(MPIS)}")
        if op == "avg":
            options.refuse("--baseline", f"{name} has no averages: use --baseline none")
        if name in MPIS and op and dtype in ("float16", "bfloat16"):
            options.refuse("--baseline", f"{name} does not reduce {dtype} tensors: use --baseline gloo, or another --dtype")
        if name in MPIS and not (environment(name) / "bin" / "mpiexec").exists():
            options.refuse("--baseline", f"there is no {environment(name)} here: run `make baselines` and start in its directory")
    return asked
