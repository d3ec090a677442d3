"""``weft bench …``: options, what they cannot do together, and where results go. Loads torch only once a benchmark runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.options import Dtype, Gbps, Iterations, Json, Plot, Seed, Threads, Warmup

if TYPE_CHECKING:
    from weft.bench.fused import Link, Result

app = typer.Typer()


_MOVING = ("pull", "push", "ring")


@dataclass(frozen=True)
class _Common:
    """What every fused operator takes."""

    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Ranks to start; 2 unless a launcher did.")] = None
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = "float32"
    out_dtype: Annotated[Dtype | None, typer.Option(help="Of the output: the inputs' or float32.")] = None
    warmup: Warmup = 3
    iterations: Iterations = 20
    seed: Seed = 0
    baseline: Annotated[str | None, typer.Option(help="gloo, or none; by default gloo, and none on an emulated link.")] = None
    link_gbps: Gbps = None
    link_latency_us: Annotated[float | None, typer.Option(min=0, help="Latency of each transfer on the emulated link.")] = None
    json_file: Json = None
    plot: Plot = None
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for https://ui.perfetto.dev.")] = None
    timeline: Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw what ran when.")] = None
    save_outputs: Annotated[Path | None, typer.Option(metavar="DIR", help="Save each rank's output as rank<r>.pt.")] = None
    threads: Threads = None


_Gathering = Literal["auto", "direct", "pull", "push", "ring", "sequential"]
_Scattering = Literal["auto", "direct", "push", "put", "ring", "sequential"]
_Reducing = Literal["auto", "one_shot", "two_shot", "put", "ring", "sequential"]
_SumShape = Annotated[str, typer.Option(metavar="MxKxN", help="M rows, of any number, and K columns of each rank, times (K, N).")]
_AddedRows = Annotated[int | None, typer.Option(min=1, help="Rows that are added, or sent, together.")]


@app.command()
@options.taking(_Common)
def all_gather_matmul(
    common: _Common,
    shape: Annotated[str, typer.Option(metavar="MxKxN", help="M gathered rows, of any number, times (K, N).")] = "2048x2048x1024",
    algorithm: Annotated[_Gathering, typer.Option(help="How rows travel.")] = "auto",
    chunk_rows: Annotated[int | None, typer.Option(min=1, help="Rows per transfer of pull, push and ring.")] = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also measure each step from the cascade to the operator.")] = False,
    peers: Annotated[
        Literal["ranks", "host"], typer.Option(help="host: on one GPU, with the other ranks' rows in pinned host memory.")
    ] = "ranks",
) -> None:
    """All-gather + matmul: compute alone, communication alone, one after the other, and overlapped."""
    if peers == "host":
        _from_host(common, shape)
        return
    if chunk_rows and algorithm not in _MOVING:
        options.refuse("--chunk-rows", f"{algorithm} does not take a chunk size: use --algorithm pull, push or ring")
    if ablate:
        alone = options.world_size(common.ranks)[1] == 1
        if alone or algorithm not in (*_MOVING, "auto"):
            what = "one rank" if alone else algorithm
            options.refuse(
                "--ablate", f"{what} has no transfers to overlap: use 2 or more ranks and --algorithm pull, push or ring"
            )
    _measure("all-gather-matmul", common, shape, algorithm, chunk_rows, ablate)


def _from_host(common: _Common, shape: str) -> None:
    """One GPU, and peers behind the bus."""
    options.check_files(common.json_file, None, common.plot)
    m, k, n = options.parse_shape(shape)
    options.need_gpu()
    from weft.bench import plots
    from weft.bench.gpu import products

    settings = options.settings(products.Products, common, ranks=common.ranks or 2, m=m, k=k, n=n, threads=1)
    show = products.print_times
    options.hand_over(products.from_host, settings, 0, 1, show, plots.draw_times, common.json_file, common.plot)


@app.command()
@options.taking(_Common)
def matmul_reduce_scatter(
    common: _Common,
    shape: _SumShape = "2048x2048x1024",
    algorithm: Annotated[_Scattering, typer.Option(help="How products reach the rank that keeps their sum.")] = "auto",
    chunk_rows: _AddedRows = None,
) -> None:
    """Matmul + reduce-scatter: compute alone, communication alone, one after the other, and overlapped."""
    if chunk_rows and algorithm == "sequential":
        options.refuse("--chunk-rows", "sequential does not take a chunk size: use --algorithm direct, push or ring")
    _measure("matmul-reduce-scatter", common, shape, algorithm, chunk_rows)


@app.command()
@options.taking(_Common)
def matmul_all_reduce(
    common: _Common,
    shape: _SumShape = "2048x2048x1024",
    algorithm: Annotated[_Reducing, typer.Option(help="How the sums are shared out.")] = "auto",
    chunk_rows: _AddedRows = None,
) -> None:
    """Matmul + all-reduce: compute alone, communication alone, one after the other, and overlapped."""
    if chunk_rows and algorithm == "sequential":
        options.refuse("--chunk-rows", "sequential does not take a chunk size: use --algorithm one_shot, two_shot or ring")
    _measure("matmul-all-reduce", common, shape, algorithm, chunk_rows)


def _measure(benchmark: str, common: _Common, shape: str, algorithm: str, chunk_rows: int | None, ablate: bool = False) -> None:
    """Check what remains to be checked, measure, and hand over the result."""
    from weft.bench.all_gather_matmul import BASELINES, AllGatherMatmul
    from weft.bench.fused import Settings, Subject, measure
    from weft.bench.matmul_sums import MatmulAllReduce, MatmulReduceScatter

    cases: dict[str, Callable[..., Subject]] = {
        "all-gather-matmul": AllGatherMatmul,
        "matmul-reduce-scatter": MatmulReduceScatter,
        "matmul-all-reduce": MatmulAllReduce,
    }
    joined, ranks = options.world_size(common.ranks)
    m, k, n = options.parse_shape(shape)
    options.check_files(common.json_file, common.trace, common.plot, common.timeline)
    _check_directory(common.save_outputs)
    _check_out_dtype(common.dtype, common.out_dtype)
    slow = _link(common.link_gbps, common.link_latency_us, algorithm, ranks)
    settings = options.settings(
        Settings,
        common,
        benchmark=benchmark,
        m=m,
        k=k,
        n=n,
        out_dtype=common.out_dtype or common.dtype,
        algorithm=algorithm,
        chunk_rows=chunk_rows,
        baselines=_baselines(common.baseline, slow, BASELINES),
        link=slow,
        ablate=ablate,
        traced=bool(common.trace or common.timeline),
        threads=options.threads_for(common.threads, ranks),
    )
    result = options.run(measure, joined, ranks, cases[benchmark], settings, threads=settings.threads)
    if not joined:
        _hand_over(result, common)
    if not result.verified:
        raise typer.Exit(1)


def _hand_over(result: Result, common: _Common) -> None:
    """Print the result and write the files asked for."""
    from weft.bench import plots, report
    from weft.bench.timeline import draw
    from weft.plan.trace import to_perfetto

    report.print_tables(result, Console(stderr=common.json_file == "-"))
    as_json = report.to_json(result)
    options.write_json(as_json, common.json_file)
    if common.plot:
        plots.draw_times(as_json, common.plot)
    if common.trace:
        common.trace.write_text(json.dumps(to_perfetto(*result.traces)))
    if common.timeline:
        draw(result.traces, common.timeline, report.title(result))


def _check_directory(path: Path | None) -> None:
    try:
        if path:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.refuse("--save-outputs", f"cannot make the directory: {error}")


def _check_out_dtype(dtype: Dtype, out_dtype: Dtype | None) -> None:
    possible = {dtype, "float32"} if dtype != "float64" else {dtype}
    if out_dtype and out_dtype not in possible:
        names = " or ".join(sorted(possible))
        options.refuse("--out-dtype", f"a product of {dtype} comes as {names}; got {out_dtype}")


def _link(gbps: str | None, latency_us: float | None, algorithm: str, ranks: int) -> Link | None:
    from weft.bench.fused import Link

    if gbps is None:
        if latency_us is not None:
            options.refuse("--link-latency-us", "an emulated link needs a bandwidth too: add --link-gbps GBPS, or --link-gbps auto")
        return None
    if algorithm in ("direct", "put"):
        moving = "push or ring" if algorithm == "direct" else "push, or two_shot of an all-reduce"
        options.refuse("--link-gbps", f"{algorithm} moves no rows, so an emulated link cannot slow it: use --algorithm {moving}")
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
