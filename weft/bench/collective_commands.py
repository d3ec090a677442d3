"""``weft bench all-gather`` and the other collectives, and ``weft bench overlap``: their options and where results go."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.bench import options
from weft.bench.options import Device, Dtype, Gbps, Json, OnDevice, Plot, Seed, Threads

app = typer.Typer()


class ElementType(str, Enum):
    """Of what is moved or reduced."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"
    int8 = "int8"
    int32 = "int32"
    int64 = "int64"


class Op(str, Enum):
    """How ranks' elements are reduced to one."""

    sum = "sum"
    avg = "avg"
    max = "max"
    min = "min"


class Gathering(str, Enum):
    """How an all-gather's rows travel."""

    auto = "auto"
    pull = "pull"
    push = "push"
    ring = "ring"


class Reducing(str, Enum):
    """How an all-reduce shares out its work."""

    auto = "auto"
    one_shot = "one_shot"
    two_shot = "two_shot"
    ring = "ring"


_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=2, help="Ranks to start; 2 unless a launcher did.")]
_Sizes = Annotated[str, typer.Option(metavar="FIRST:LAST:FACTOR,…", help="Bytes of each rank's input; K, M, G are binary.")]
_Type = Annotated[ElementType, typer.Option("--dtype", help="Of the elements.")]
_Op = Annotated[Op, typer.Option(help="The reduction.")]
_Warmup = Annotated[int, typer.Option(min=0, help="Rounds of batches before the measured ones.")]
_Iterations = Annotated[int, typer.Option(min=1, help="Rounds of batches measured.")]
_Baseline = Annotated[
    str | None, typer.Option(help="Of gloo, openmpi, mpich, or none; by default gloo. `make baselines` installs the MPIs.")
]
_SIZES = "4K:64M:4"


@app.command()
def all_gather(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    algorithm: Annotated[Gathering, typer.Option(help="How rows travel.")] = Gathering.auto,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
    device: OnDevice = Device.cpu,
    comm_sms: Annotated[str, typer.Option(metavar="N,…", help="With --device cuda: SMs that the kernels may take.")] = "4,8,16,32",
) -> None:
    """All-gather over message size, out of place and in place."""
    if device is Device.cuda:
        _gathers_on_gpu(ranks or 2, sizes, comm_sms, warmup, iterations, json_file, plot)
        return
    more = {"algorithm": algorithm.value, "warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("all_gather", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


def _gathers_on_gpu(
    ranks: int, sizes: str, comm_sms: str, warmup: int, iterations: int, json_file: str | None, plot: Path | None
) -> None:
    """Measure the kernels over SMs; sizes are those of each rank's input, as on a CPU."""
    options.check_files(json_file, None, plot)
    sms, shards = options.parse_numbers(comm_sms, "--comm-sms"), options.parse_sizes(sizes, "--sizes")
    options.need_gpu()
    from weft.bench import gpu_gathers, plots

    settings = gpu_gathers.Gathers(ranks, tuple(ranks * shard for shard in shards), sms, iterations, warmup)
    options.hand_over(gpu_gathers.all_gathers, settings, 0, 1, gpu_gathers.print_table, plots.draw_over_sms, json_file, plot)


@app.command()
def reduce_scatter(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    op: _Op = Op.sum,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """Reduce-scatter over message size, out of place and in place."""
    more = {"op": op.value, "warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("reduce_scatter", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


@app.command()
def all_reduce(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    op: _Op = Op.sum,
    algorithm: Annotated[Reducing, typer.Option(help="How the work is shared out.")] = Reducing.auto,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """All-reduce over message size, out of place and in place."""
    more = {"op": op.value, "algorithm": algorithm.value, "warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("all_reduce", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


@app.command()
def broadcast(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """Broadcast from rank 0 over message size, in place."""
    more = {"warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("broadcast", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


@app.command()
def all_to_all(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """All-to-all of equal parts over message size, out of place."""
    more = {"warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("all_to_all", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


@app.command()
def overlap(
    ranks: _Ranks = None,
    shape: Annotated[
        str, typer.Option(metavar="MxKxN", help="Each rank's product, which needs nothing of others.")
    ] = "1024x1024x1024",
    size: Annotated[
        str, typer.Option(metavar="BYTES", help="That each rank puts into the all-gather; K, M, G are binary.")
    ] = "16M",
    dtype: Annotated[Dtype, typer.Option(help="Of the matrices and of what is gathered.")] = Dtype.float32,
    warmup: options.Warmup = 3,
    iterations: options.Iterations = 20,
    seed: Seed = 0,
    baseline: Annotated[str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")] = None,
    link_gbps: Gbps = None,
    json_file: Json = None,
    plot: Plot = None,
    threads: Threads = None,
) -> None:
    """A product and an all-gather that need nothing of each other: each alone, one after the other, and side by side."""
    from weft.bench import overlap as bench
    from weft.bench.plots import draw_times
    from weft.launcher import threads_per_rank

    joined, ranks = options.world_size(ranks)
    options.check_files(json_file, None, plot)
    gathered = options.parse_sizes(size, "--size")
    if len(gathered) > 1:
        options.refuse("--size", f"expected one size; got {size!r}")
    if baseline not in (None, "none", "gloo") or (link_gbps and baseline == "gloo"):
        options.refuse("--baseline", "use gloo or none; on an emulated link only none, since a baseline does not pass it")
    settings = bench.Settings(
        *options.parse_shape(shape),
        gathered[0],
        dtype.value,
        warmup,
        iterations,
        seed,
        gloo=baseline != "none" and link_gbps is None,
        link_gbps=options.parse_gbps(link_gbps),
        threads=threads or threads_per_rank(ranks),
    )
    options.hand_over(bench.measure, settings, joined, ranks, bench.print_tables, draw_times, json_file, plot)


def _sweep(
    operation: str,
    ranks: int | None,
    sizes: str,
    dtype: ElementType,
    baseline: str | None,
    json_file: str | None,
    plot: Path | None,
    threads: int | None,
    **more: Any,
) -> None:
    from weft.bench import collectives
    from weft.bench.plots import draw_sweep
    from weft.launcher import threads_per_rank

    joined, ranks = options.world_size(ranks)
    if ranks < 2:
        options.refuse("--ranks", "a single rank has nobody to exchange anything with: use 2 or more")
    options.check_files(json_file, None, plot)
    reduced = operation in ("all_reduce", "reduce_scatter")
    settings = collectives.Settings(
        operation,
        tuple(options.parse_sizes(sizes, "--sizes")),
        dtype.value,
        baselines=_baselines(baseline, dtype, more.get("op") if reduced else None),
        threads=threads or threads_per_rank(ranks),
        **more,
    )
    if reduced and more["op"] == "avg" and not dtype.value.startswith(("float", "bfloat")):
        options.refuse("--op", f"averages are of floating dtypes; got {dtype.value}")
    options.hand_over(collectives.measure, settings, joined, ranks, collectives.print_tables, draw_sweep, json_file, plot)


def _baselines(text: str | None, dtype: ElementType, op: str | None) -> tuple[str, ...]:
    from weft.bench.mpi_ranks import MPIS, environment

    if text == "none" or (text is None and op == "avg"):
        return ()
    asked = tuple((text or "gloo").split(","))
    for name in asked:
        if name not in ("gloo", *MPIS):
            options.refuse("--baseline", f"there is no baseline {name!r}: use none, gloo, {', '.join(MPIS)}")
        if op == "avg":
            options.refuse("--baseline", f"{name} has no averages: use --baseline none")
        if name in MPIS and op and dtype in (ElementType.float16, ElementType.bfloat16):
            options.refuse("--baseline", f"{name} does not reduce {dtype.value} tensors: use --baseline gloo, or another --dtype")
        if name in MPIS and not (environment(name) / "bin" / "mpiexec").exists():
            options.refuse("--baseline", f"there is no {environment(name)} here: run `make baselines` and start in its directory")
    return asked
