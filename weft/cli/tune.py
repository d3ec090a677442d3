"""``weft tune``: measure the fastest variants of operators on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import (
    FUSED,
    Device,
    Dtype,
    EmulatedGbps,
    EmulatedLatency,
    Engine,
    Json,
    Placed,
    Threads,
    not_emulated,
)
from weft.cli.conditions import Unless
from weft.cli.options import reject
from weft.cli.tables import table
from weft.cli.values import Shape, of_sizes, parse_sizes, product
from weft.plan.binding import split
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.schedules.workload import Workload

if TYPE_CHECKING:
    from weft.measure.tune import CaseTimes

_BUSY = " Ranks had to wait for cores meanwhile, so calls will measure again."


def _clear(wanted: bool) -> None:
    if wanted:
        from weft.ops import stored

        file, count, _ = stored.kept()
        stored.forget()
        typer.echo(f"Forgot {count} choice(s) of {file}.")
        raise typer.Exit


_COLLECTIVES = tuple(name.replace("_", "-") for name in COLLECTIVES if name != "barrier")


def _has_sizes(settings: Tune) -> str:
    if settings.collective:
        return f"{settings.operator} has no product: give --sizes"
    return ""


def _has_shapes(settings: Tune) -> str:
    return "" if settings.collective else f"{settings.operator} has a product: give --shape"


def _stages_nothing(settings: Tune) -> str:
    if settings.collective:
        return "it is of fused operators: omit it"
    if OPERATORS[settings.operator.replace("-", "_")].exchanges == "a":
        return ""
    return f"{settings.operator} exchanges no inputs, so it stages none"


def _measures_nothing(settings: Tune) -> str:
    if settings.engine == "reference":
        return "it has no speed to measure: omit it"
    return ""


def _one_thread(settings: Tune) -> str:
    if settings.on_host:
        return ""
    return f"the engine {settings.place['engine']} has its own threads: omit one of them"


def _one_engine(settings: Tune) -> str:
    return "" if settings.on_host else not_emulated(settings)


@dataclass(frozen=True)
class Tune(Placed):
    """Measure the candidates for shapes on this machine, and store the fastest, which auto uses."""

    operator: Annotated[str, typer.Argument(help="The operator to tune."), (*FUSED, *_COLLECTIVES)]
    shape: Annotated[
        list[Shape] | None,
        product("A shape as for weft bench, of a fused operator; repeat the option for more."),
        Unless(_has_sizes),
    ] = None
    sizes: Annotated[
        str | None,
        of_sizes("Bytes of a rank, of a collective."),
        Unless(_has_shapes),
    ] = None
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=2, help="Number of ranks to start.")
    ] = 2
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the inputs.")] = "float32"
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the output: the inputs' (default) or float32.")
    ] = None
    plain: Annotated[
        bool,
        typer.Option("--plain", help="The weight is a plain tensor, as on GPUs, not packed."),
    ] = False
    staged: Annotated[
        bool,
        typer.Option("--staged", help="Inputs that ranks exchange are not in symmetric memory."),
        Unless(_stages_nothing),
    ] = False
    link_gbps: Annotated[EmulatedGbps, Unless(_one_engine)] = None
    link_latency_us: EmulatedLatency = 0.0
    device: Device = "cpu"
    engine: Annotated[Engine, Unless(_measures_nothing)] = None
    iterations: Annotated[int, typer.Option(min=1, help="Rounds to measure.")] = 10
    threads: Annotated[Threads, Unless(_one_thread)] = None
    json_file: Json = None
    clear: Annotated[
        bool,
        typer.Option(
            "--clear",
            callback=_clear,
            is_eager=True,
            help="Forget what this command and auto have measured on this machine, and exit.",
        ),
    ] = False

    @property
    def collective(self) -> bool:
        return self.operator in _COLLECTIVES

    @property
    def on_host(self) -> bool:
        """Whether the host engine is measured, and not one whose lanes are streams."""
        return bool(self.place["engine"] == "host")

    @property
    def place(self) -> dict[str, Any]:
        """The device, and the engine: by default, on a GPU, that of weft's product kernel."""
        return {**super().place, **({"engine": "triton"} if self._by_kernel else {})}

    @property
    def _by_kernel(self) -> bool:
        return self.device == "cuda" and self.engine is None


def tune(settings: Tune) -> None:
    options.check_files(settings.json_file, None)
    options.check_cache()
    if options.world_size(None)[0] is not None:
        reject("tune", "it starts its own ranks, on one host: run it without a launcher")
    options.check_place(settings)
    if settings.collective:
        if not settings.sizes or not settings.on_host:
            reject("tune", f"{settings.operator} needs --sizes, and ranks on a CPU")
        _tune_collective(settings)
    elif not settings.shape:
        reject("tune", f"{settings.operator} needs --shape")
    elif settings.on_host:
        _tune_host(settings)
    else:
        _tune_streams(settings)


def _workloads(settings: Tune) -> list[Workload]:
    return [
        Workload(
            settings.operator.replace("-", "_"),
            tuple(split(shape.m, settings.ranks)),
            shape.k,
            shape.n,
            settings.dtype,
            settings.out_dtype or settings.dtype,
            packed=settings.on_host and not settings.plain,
            symmetric=not settings.staged,
        )
        for shape in settings.shape or ()
    ]


def _tune_host(settings: Tune) -> None:
    from weft.measure import tune as tuning

    link = (settings.link_gbps, settings.link_latency_us) if settings.link_gbps else None
    workloads = _workloads(settings)
    cases = [tuning.TuningCase(each, [], link) for each in workloads]
    with options.failing("weft tune", settings.json_file):
        tuned = tuning.tune(
            cases, settings.iterations, options.threads_for(settings.threads, settings.ranks)
        )
    _show(settings, workloads, tuned)


def _tune_collective(settings: Tune) -> None:
    from weft.measure import tune as tuning

    operator, ranks = settings.operator.replace("-", "_"), settings.ranks
    sizes = parse_sizes(settings.sizes or "")
    cases = [
        tuning.TuningCase(
            Workload(operator, (size,) * ranks, 1, 1, "uint8", "uint8", symmetric=False), []
        )
        for size in sizes
    ]
    with options.failing("weft tune", settings.json_file):
        tuned = tuning.tune(
            cases, settings.iterations, options.threads_for(settings.threads, ranks)
        )
    console = Console(stderr=settings.json_file == "-")
    shown = table((settings.operator, "path", "measured ms"), left=(settings.operator, "path"))
    results = []
    for size, found in zip(sizes, tuned, strict=True):
        rows = [{**variant.to_json(), "measured_ms": median} for variant, median, _ in found.times]
        results.append({"operator": settings.operator, "bytes": size, "ways": rows})
        for variant, median, _ in found.times:
            shown.add_row(f"{size} bytes", str(variant), f"{median:.4f}")
    console.print(shown)
    again = _BUSY if any(found.busy for found in tuned) else ""
    console.print(f"Stored: the first path of each size.{again}", highlight=False)
    options.write_json({"tuned": results}, settings.json_file)


def _tune_streams(settings: Tune) -> None:
    from weft.measure import tune as tuning

    workloads = _workloads(settings)
    with options.failing("weft tune", settings.json_file):
        tuned = tuning.tune_streams(workloads, settings.iterations, settings.place)
    _show(settings, workloads, tuned)


def _show(settings: Tune, workloads: list[Workload], tuned: list[CaseTimes]) -> None:
    """Print a table for each workload, and write the JSON."""
    console = Console(stderr=settings.json_file == "-")
    results = []
    for shape, workload, found in zip(settings.shape or (), workloads, tuned, strict=True):
        heading = f"{settings.operator} {shape}"
        shown = table((heading, "rows per piece", "measured ms"), left=(heading,))
        rows = []
        for variant, median, _ in found.times:
            chunk_rows = OPERATORS[workload.operator].chunk_rows(workload.rows, variant)
            rows.append({**variant.to_json(), "chunk_rows": chunk_rows, "measured_ms": median})
            shown.add_row(str(variant), str(chunk_rows), f"{median:.3f}")
        results.append({"operator": settings.operator, "shape": str(shape), "ways": rows})
        console.print(shown)
        console.print(
            f"Stored: {found.times[0].variant}, at most {rows[0]['chunk_rows']} rows per transfer."
            f"{_BUSY if found.busy else ''}",
            highlight=False,
        )
    options.write_json({"tuned": results}, settings.json_file)
