"""``weft bench …``: options, what they cannot do together, and where results go. Loads torch only once a benchmark runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from weft.bench import options
from weft.bench.options import Dtype, Gbps, Iterations, Json, Plot, Seed, Threads, Warmup

if TYPE_CHECKING:
    from weft.bench.fused import Link, Result

app = typer.Typer(help="Measure operators against their limits and what one would write without weft.", no_args_is_help=True)


class Algorithm(str, Enum):
    """How rows travel."""

    auto = "auto"
    direct = "direct"
    pull = "pull"
    push = "push"
    ring = "ring"
    sequential = "sequential"


class Scattering(str, Enum):
    """How products reach the rank that keeps their sum."""

    auto = "auto"
    direct = "direct"
    push = "push"
    ring = "ring"
    sequential = "sequential"


class Reducing(str, Enum):
    """How an all-reduce of products shares out its work."""

    auto = "auto"
    one_shot = "one_shot"
    two_shot = "two_shot"
    sequential = "sequential"


class Peers(str, Enum):
    """Where the other ranks' rows are."""

    ranks = "ranks"
    host = "host"


_MOVING = (Algorithm.pull, Algorithm.push, Algorithm.ring)

_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Ranks to start; 2 unless a launcher did.")]
_Type = Annotated[Dtype, typer.Option(help="Of the inputs.")]
_OutType = Annotated[Dtype | None, typer.Option(help="Of the output: the inputs' or float32.")]
_Baseline = Annotated[str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")]
_Latency = Annotated[float | None, typer.Option(min=0, help="Latency of each transfer on the emulated link.")]
_Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")]
_Timeline = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw what ran when.")]
_Outputs = Annotated[Path | None, typer.Option(metavar="DIR", help="Save each rank's output as rank<r>.pt.")]
_SumShape = Annotated[str, typer.Option(metavar="MxKxN", help="M rows, of any number, and K columns of each rank, times (K, N).")]
_AddedRows = Annotated[int | None, typer.Option(min=1, help="Rows that are added, or sent, together.")]


@app.command()
def all_gather_matmul(
    ranks: _Ranks = None,
    shape: Annotated[str, typer.Option(metavar="MxKxN", help="M gathered rows, of any number, times (K, N).")] = "2048x2048x1024",
    dtype: _Type = Dtype.float32,
    out_dtype: _OutType = None,
    algorithm: Annotated[Algorithm, typer.Option(help="How rows travel.")] = Algorithm.auto,
    chunk_rows: Annotated[int | None, typer.Option(min=1, help="Rows per transfer of pull, push and ring.")] = None,
    warmup: Warmup = 3,
    iterations: Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    link_gbps: Gbps = None,
    link_latency_us: _Latency = None,
    json_file: Json = None,
    plot: Plot = None,
    trace: _Trace = None,
    timeline: _Timeline = None,
    save_outputs: _Outputs = None,
    threads: Threads = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also measure each step from the cascade to the operator.")] = False,
    peers: Annotated[Peers, typer.Option(help="host: on one GPU, with the other ranks' rows in pinned host memory.")] = Peers.ranks,
) -> None:
    """All-gather + matmul: compute alone, communication alone, one after the other, and overlapped."""
    if peers is Peers.host:
        _from_host(ranks or 2, shape, dtype, warmup, iterations, seed, json_file, plot)
        return
    if chunk_rows and algorithm not in _MOVING:
        options.refuse("--chunk-rows", f"{algorithm.value} does not take a chunk size: use --algorithm pull, push or ring")
    size = options.world_size(ranks)
    if ablate and (size[1] == 1 or algorithm not in (*_MOVING, Algorithm.auto)):
        what = "a single rank" if size[1] == 1 else algorithm.value
        options.refuse("--ablate", f"{what} has no transfers to overlap: use 2 or more ranks and --algorithm pull, push or ring")
    more = {"warmup": warmup, "iterations": iterations, "seed": seed, "ablate": ablate, "chunk_rows": chunk_rows}
    link = link_gbps, link_latency_us
    files = _Files(json_file, plot, trace, timeline, save_outputs)
    _measure("all-gather-matmul", size, shape, dtype, out_dtype, algorithm.value, baseline, link, files, threads, **more)


def _from_host(
    ranks: int, shape: str, dtype: Dtype, warmup: int, iterations: int, seed: int, json_file: str | None, plot: Path | None
) -> None:
    """One GPU, and peers behind the bus."""
    options.check_files(json_file, None, plot)
    m, k, n = options.parse_shape(shape)
    options.need_gpu()
    from weft.bench import gpu_products, plots

    settings = gpu_products.Products(ranks, m, k, n, dtype.value, iterations, warmup, seed)
    options.hand_over(gpu_products.from_host, settings, 0, 1, gpu_products.print_times, plots.draw_times, json_file, plot)


@app.command()
def matmul_reduce_scatter(
    ranks: _Ranks = None,
    shape: _SumShape = "2048x2048x1024",
    dtype: _Type = Dtype.float32,
    out_dtype: _OutType = None,
    algorithm: Annotated[Scattering, typer.Option(help="How products reach the rank that keeps their sum.")] = Scattering.auto,
    chunk_rows: _AddedRows = None,
    warmup: Warmup = 3,
    iterations: Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    link_gbps: Gbps = None,
    link_latency_us: _Latency = None,
    json_file: Json = None,
    plot: Plot = None,
    trace: _Trace = None,
    timeline: _Timeline = None,
    save_outputs: _Outputs = None,
    threads: Threads = None,
) -> None:
    """Matmul + reduce-scatter: compute alone, communication alone, one after the other, and overlapped."""
    if chunk_rows and algorithm == Scattering.sequential:
        options.refuse("--chunk-rows", "sequential does not take a chunk size: use --algorithm direct, push or ring")
    more = {"warmup": warmup, "iterations": iterations, "seed": seed, "chunk_rows": chunk_rows}
    link = link_gbps, link_latency_us
    files = _Files(json_file, plot, trace, timeline, save_outputs)
    size = options.world_size(ranks)
    _measure("matmul-reduce-scatter", size, shape, dtype, out_dtype, algorithm.value, baseline, link, files, threads, **more)


@app.command()
def matmul_all_reduce(
    ranks: _Ranks = None,
    shape: _SumShape = "2048x2048x1024",
    dtype: _Type = Dtype.float32,
    out_dtype: _OutType = None,
    algorithm: Annotated[Reducing, typer.Option(help="How the sums are shared out.")] = Reducing.auto,
    chunk_rows: _AddedRows = None,
    warmup: Warmup = 3,
    iterations: Iterations = 20,
    seed: Seed = 0,
    baseline: _Baseline = None,
    link_gbps: Gbps = None,
    link_latency_us: _Latency = None,
    json_file: Json = None,
    plot: Plot = None,
    trace: _Trace = None,
    timeline: _Timeline = None,
    save_outputs: _Outputs = None,
    threads: Threads = None,
) -> None:
    """Matmul + all-reduce: compute alone, communication alone, one after the other, and overlapped."""
    if chunk_rows and algorithm == Reducing.sequential:
        options.refuse("--chunk-rows", "sequential does not take a chunk size: use --algorithm one_shot or two_shot")
    more = {"warmup": warmup, "iterations": iterations, "seed": seed, "chunk_rows": chunk_rows}
    link = link_gbps, link_latency_us
    files = _Files(json_file, plot, trace, timeline, save_outputs)
    size = options.world_size(ranks)
    _measure("matmul-all-reduce", size, shape, dtype, out_dtype, algorithm.value, baseline, link, files, threads, **more)


class _Files(NamedTuple):
    """Where results go."""

    json_file: str | None
    plot: Path | None
    trace: Path | None
    timeline: Path | None
    outputs: Path | None


def _measure(
    benchmark: str,
    size: tuple[int | None, int],
    shape: str,
    dtype: Dtype,
    out_dtype: Dtype | None,
    algorithm: str,
    baseline: str | None,
    link: tuple[str | None, float | None],
    files: _Files,
    threads: int | None,
    **more: Any,
) -> None:
    """Check what remains to be checked, measure on `size` (rank, ranks), and hand over the result."""
    from weft.bench.all_gather_matmul import BASELINES, AllGatherMatmul
    from weft.bench.fused import Case, Settings, measure
    from weft.bench.matmul_sums import MatmulAllReduce, MatmulReduceScatter
    from weft.launcher import threads_per_rank

    cases: dict[str, Callable[..., Case]] = {
        "all-gather-matmul": AllGatherMatmul,
        "matmul-reduce-scatter": MatmulReduceScatter,
        "matmul-all-reduce": MatmulAllReduce,
    }
    joined, ranks = size
    m, k, n = options.parse_shape(shape)
    options.check_files(files.json_file, files.trace, files.plot, files.timeline)
    _check_directory(files.outputs)
    _check_out_dtype(dtype, out_dtype)
    slow = _link(*link, algorithm, ranks)
    settings = Settings(
        benchmark,
        m,
        k,
        n,
        dtype=dtype.value,
        out_dtype=(out_dtype or dtype).value,
        algorithm=algorithm,
        baselines=_baselines(baseline, slow, BASELINES),
        link=slow,
        traced=bool(files.trace or files.timeline),
        save_outputs=files.outputs,
        threads=threads or threads_per_rank(ranks),
        **more,
    )
    result = options.run(measure, joined, ranks, cases[benchmark], settings, threads=settings.threads)
    if not joined:
        _hand_over(result, files)
    if not result.verified:
        raise typer.Exit(1)


def _hand_over(result: Result, files: _Files) -> None:
    """Print the result and write the files asked for."""
    from weft.bench import plots, report
    from weft.bench.timeline import draw
    from weft.trace import to_perfetto

    json_file, plot, trace, timeline, _ = files
    report.print_tables(result, Console(stderr=json_file == "-"))
    as_json = report.to_json(result)
    options.write_json(as_json, json_file)
    if plot:
        plots.draw_times(as_json, plot)
    if trace:
        trace.write_text(json.dumps(to_perfetto(*result.traces)))
    if timeline:
        draw(result.traces, timeline, report.title(result))


def _check_directory(path: Path | None) -> None:
    try:
        if path:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.refuse("--save-outputs", f"cannot make the directory: {error}")


def _check_out_dtype(dtype: Dtype, out_dtype: Dtype | None) -> None:
    possible = {dtype, Dtype.float32} if dtype != Dtype.float64 else {dtype}
    if out_dtype and out_dtype not in possible:
        names = " or ".join(sorted(choice.value for choice in possible))
        options.refuse("--out-dtype", f"a product of {dtype.value} comes as {names}; got {out_dtype.value}")


def _link(gbps: str | None, latency_us: float | None, algorithm: str, ranks: int) -> Link | None:
    from weft.bench.fused import Link

    if gbps is None:
        if latency_us is not None:
            options.refuse("--link-latency-us", "an emulated link needs a bandwidth too: add --link-gbps GBPS, or --link-gbps auto")
        return None
    if algorithm == "direct":
        options.refuse("--link-gbps", "direct moves no rows, so an emulated link cannot slow it: use --algorithm push or ring")
    if ranks == 1:
        options.refuse("--link-gbps", "a single rank sends nothing over a link: use --ranks 2 or more")
    bandwidth = options.parse_gbps(gbps)
    return Link(None if isinstance(bandwidth, str) else bandwidth, latency_us or 0.0)


def _baselines(text: str | None, link: Link | None, known: Collection[str]) -> tuple[str, ...]:
    if text == "none" or (text is None and link):
        return ()
    short = {name.partition("+")[0]: name for name in known}
    asked = (text or "gloo").split(",")
    if unknown := [name for name in asked if name not in short]:
        options.refuse("--baseline", f"there is no baseline {unknown[0]!r}: use none or {', '.join(short)}")
    if link:
        options.refuse("--baseline", "a baseline does not pass the emulated link, so they cannot be compared: use --baseline none")
    return tuple(short[name] for name in asked)
