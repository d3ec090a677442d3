"""``weft bench all-gather`` and the other collectives, and ``weft bench overlap``: their options and where results go."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.bench.commands import Dtype, _check_files, _refuse, _shape, _world_size

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
_Seed = Annotated[int, typer.Option(min=0, help="Of the random data.")]
_Baseline = Annotated[
    str | None, typer.Option(help="Of gloo, openmpi, mpich, or none; by default gloo. `make baselines` installs the MPIs.")
]
_Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; -: stdout.")]
_Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw the result.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads per rank; by default the cores are shared out.")]
_SIZES = "4K:64M:4"


@app.command()
def all_gather(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    algorithm: Annotated[Gathering, typer.Option(help="How rows travel.")] = Gathering.auto,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: _Seed = 0,
    baseline: _Baseline = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
) -> None:
    """All-gather over message size, out of place and in place."""
    more = {"algorithm": algorithm.value, "warmup": warmup, "iterations": iterations, "seed": seed}
    _sweep("all_gather", ranks, sizes, dtype, baseline, json_file, plot, threads, **more)


@app.command()
def reduce_scatter(
    ranks: _Ranks = None,
    sizes: _Sizes = _SIZES,
    dtype: _Type = ElementType.float32,
    op: _Op = Op.sum,
    warmup: _Warmup = 2,
    iterations: _Iterations = 20,
    seed: _Seed = 0,
    baseline: _Baseline = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
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
    seed: _Seed = 0,
    baseline: _Baseline = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
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
    seed: _Seed = 0,
    baseline: _Baseline = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
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
    seed: _Seed = 0,
    baseline: _Baseline = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
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
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 20,
    seed: _Seed = 0,
    baseline: Annotated[str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")] = None,
    link_gbps: Annotated[
        str | None, typer.Option(metavar="GBPS|auto", help="Emulate a slower link; auto: communicate takes as long as compute.")
    ] = None,
    json_file: _Json = None,
    plot: _Plot = None,
    threads: _Threads = None,
) -> None:
    """A product and an all-gather that need nothing of each other: each alone, one after the other, and side by side."""
    from weft.bench import overlap as bench
    from weft.bench.plots import draw_times
    from weft.launcher import threads_per_rank

    joined, ranks = _world_size(ranks)
    _check_files(json_file, None, plot)
    [gathered] = _parse_sizes(size, "--size", most=1)
    if baseline not in (None, "none", "gloo") or (link_gbps and baseline == "gloo"):
        _refuse("--baseline", "use gloo or none; on an emulated link only none, since a baseline does not pass it")
    settings = bench.Settings(
        *_shape(shape),
        gathered,
        dtype.value,
        warmup,
        iterations,
        seed,
        gloo=baseline != "none" and link_gbps is None,
        link_gbps=_gbps(link_gbps),
        threads=threads or threads_per_rank(ranks),
    )
    _measure(bench.measure, settings, joined, ranks, bench.print_tables, draw_times, json_file, plot)


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

    joined, ranks = _world_size(ranks)
    if ranks < 2:
        _refuse("--ranks", "a single rank has nobody to exchange anything with: use 2 or more")
    _check_files(json_file, None, plot)
    reduced = operation in ("all_reduce", "reduce_scatter")
    settings = collectives.Settings(
        operation,
        tuple(_parse_sizes(sizes, "--sizes")),
        dtype.value,
        baselines=_baselines(baseline, dtype, more.get("op") if reduced else None),
        threads=threads or threads_per_rank(ranks),
        **more,
    )
    if reduced and more["op"] == "avg" and not dtype.value.startswith(("float", "bfloat")):
        _refuse("--op", f"averages are of floating dtypes; got {dtype.value}")
    _measure(collectives.measure, settings, joined, ranks, collectives.print_tables, draw_sweep, json_file, plot)


def _measure(
    measure: Callable[[Any], dict[str, Any]],
    settings: Any,
    joined: int | None,
    ranks: int,
    show: Callable[[dict[str, Any], Console], None],
    draw: Callable[[dict[str, Any], Path], None],
    json_file: str | None,
    plot: Path | None,
) -> None:
    """Measure on ranks of one's own, or as the rank that a launcher made this; show and write what rank 0 found."""
    from weft.launcher import launch

    try:
        result = measure(settings) if joined is not None else launch(measure, ranks, settings, threads=settings.threads)[0]
    except RuntimeError as error:
        typer.echo(f"weft bench: {error}", err=True)
        raise typer.Exit(1) from None
    if not joined:
        show(result, Console(stderr=json_file == "-"))
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        elif json_file:
            Path(json_file).write_text(text)
        if plot:
            draw(result, plot)
    if not result["verified"]:
        raise typer.Exit(1)


def _parse_sizes(text: str, option: str, most: int | None = None) -> list[int]:
    from weft.bench.sweep import parse_sizes

    try:
        sizes = parse_sizes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if most is not None and len(sizes) > most:
        _refuse(option, f"expected one size; got {text!r}")
    return sizes


def _baselines(text: str | None, dtype: ElementType, op: str | None) -> tuple[str, ...]:
    from weft.bench.mpi_ranks import MPIS, environment

    if text == "none" or (text is None and op == "avg"):
        return ()
    asked = tuple((text or "gloo").split(","))
    for name in asked:
        if name not in ("gloo", *MPIS):
            _refuse("--baseline", f"there is no baseline {name!r}: use none, gloo, {', '.join(MPIS)}")
        if op == "avg":
            _refuse("--baseline", f"{name} has no averages: use --baseline none")
        if name in MPIS and op and dtype in (ElementType.float16, ElementType.bfloat16):
            _refuse("--baseline", f"{name} does not reduce {dtype.value} tensors: use --baseline gloo, or another --dtype")
        if name in MPIS and not (environment(name) / "bin" / "mpiexec").exists():
            _refuse("--baseline", f"there is no {environment(name)} here: run `make baselines` and start in its directory")
    return asked


def _gbps(text: str | None) -> float | str | None:
    if text in (None, "auto"):
        return text
    try:
        gbps = float(text)
    except ValueError:
        gbps = 0.0
    if not 0 < gbps < float("inf"):
        _refuse("--link-gbps", f"expected a positive number of Gbit/s, or auto; got {text!r}")
    return gbps
