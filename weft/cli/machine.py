"""``weft calibrate`` and ``weft tune``: measure this machine for predictions, and the fastest
variants of operators on it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import weft.predict as predict
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
from weft.cli.options import refuse
from weft.cli.tables import table
from weft.cli.values import Shape, of_sizes, parse_sizes, product
from weft.predict import machine
from weft.schedules.operators import COLLECTIVES
from weft.schedules.workload import Variant, Workload

if TYPE_CHECKING:
    from weft.measure.tune import CaseTimes

_BUSY = " Ranks had to wait for cores meanwhile, so calls will measure again."


def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "-n", min=2, help="Number of ranks that measure; default: one per core."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    json_file: Json = None,
) -> None:
    """Measure this machine for weft predict, in about a minute.

    It stores the profile "this". If torchrun starts it on several calibrated machines, it measures
    the network between them.
    """
    options.check_files(json_file, None)
    options.check_cache()
    from weft.measure import calibrate as calibration
    from weft.measure.launched import on_ranks

    if options.world_size(ranks)[0] is not None:
        _calibrate_network(threads, json_file)
        return
    count = ranks or max(2, len(os.sched_getaffinity(0)) // threads)
    with options.failing("weft calibrate", json_file):
        profile = on_ranks(calibration.measure, count, threads, threads=threads)
        machine.remember(profile)
    console = Console(stderr=json_file == "-")
    shown = table(("", " ", "spread"), left=("", " "))
    rows = [
        (
            kind,
            kind,
            f"{1e3 * rates['tflops']:.1f} GFLOP/s, weight {rates['weight_gbs']:.1f} GB/s, "
            f"{rates['fixed_us']:.0f} us",
        )
        for kind, rates in profile["products"].items()
    ]
    rows += [
        ("memory", "memory", f"{profile['memory_gbs']:.1f} GB/s"),
        ("link", "link", f"{profile['links'][0]['gbs']:.1f} GB/s"),
        ("reduce", "reduce", f"{profile['reduce_gbs']:.1f} GB/s"),
        ("64 signals", "signal latency", f"{profile['notify_us']:.1f} us"),
        ("call", "call", f"{profile['launch_us']:.1f} us"),
        ("two lanes", "second lane", f"{profile['lane_us']:.1f} us more"),
        ("a slow copy", "wake-up delay", f"{profile['wake_us']:.1f} us"),
        ("turn", "scheduling delay", f"{profile['turn_us']:.0f} us"),
    ]
    for key, label, text in rows:
        spreads = [
            percent
            for name, percent in profile["spread"].items()
            if key in (name, name.rpartition(" ")[0])
        ]
        shown.add_row(label, text, f"{statistics.median(spreads):.0f} %")
    shown.add_row(
        "interference", f"products and copies {profile['compute_slowdown']:.2f}x slower", ""
    )
    console.print(shown)
    console.print(
        "Rates are of large sizes, by the lower quartile of times; spread: how much longer the "
        "median is.",
        highlight=False,
    )
    options.write_json(profile, json_file)


def _calibrate_network(threads: int, json_file: str | None) -> None:
    """Measure the link between hosts, and store it on each host."""
    from weft.measure import calibrate as calibration

    mine = machine.calibrated()
    if mine is None:
        refuse(
            "calibrate",
            "this machine has no profile yet, which the network is added to: run weft calibrate "
            "without torchrun on each machine first",
        )
    with options.failing("weft calibrate", json_file):
        network = asdict(calibration.measure_network(threads))
        if os.environ.get("LOCAL_RANK", "0") == "0":
            machine.remember(mine | {"network": network})
    if options.world_size(None)[0] == 0:
        console = Console(stderr=json_file == "-")
        console.print(
            f"between hosts: {8 * network['gbs']:.2f} Gbit/s each way, a signal takes "
            f"{network['latency_us']:.0f} us, a core moves "
            f"{8 * network['core_gbs']:.1f} Gbit/s",
            highlight=False,
            soft_wrap=True,
        )
        options.write_json(network, json_file)


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
    if predict.OPERATORS[settings.operator.replace("-", "_")].exchanges == "a":
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
        refuse("tune", "it starts its own ranks, on one host: run it without a launcher")
    options.check_place(settings)
    if settings.collective:
        if not settings.sizes or not settings.on_host:
            refuse("tune", f"{settings.operator} needs --sizes, and ranks on a CPU")
        _tune_collective(settings)
    elif not settings.shape:
        refuse("tune", f"{settings.operator} needs --shape")
    elif settings.on_host:
        _tune_host(settings)
    else:
        _tune_streams(settings)


def _workloads(settings: Tune) -> list[Workload]:
    found = []
    for shape in settings.shape or ():
        workload = predict.workload(
            settings.operator.replace("-", "_"),
            settings.ranks,
            (shape.m, shape.k, shape.n),
            settings.dtype,
        )
        found.append(
            workload._replace(
                out_dtype=settings.out_dtype or settings.dtype,
                packed=settings.on_host and not settings.plain,
                symmetric=not settings.staged,
            )
        )
    return found


def _tune_host(settings: Tune) -> None:
    from weft.measure import tune as tuning

    link = (settings.link_gbps, settings.link_latency_us) if settings.link_gbps else None
    on = options.load_machine("")
    on = on.emulating(*link) if link else on
    workloads = _workloads(settings)
    cases = [
        tuning.TuningCase(each, [variant for variant, _ in predict.rank(each, on)], link)
        for each in workloads
    ]
    with options.failing("weft tune", settings.json_file):
        tuned = tuning.tune(
            cases, settings.iterations, options.threads_for(settings.threads, settings.ranks)
        )
    _show(settings, workloads, tuned, lambda each, variant: 1e3 * predict.time(each, variant, on))


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


def _show(
    settings: Tune,
    workloads: list[Workload],
    tuned: list[CaseTimes],
    predicted: Callable[[Workload, Variant], float] | None = None,
) -> None:
    """Print a table for each workload, and write the JSON; `predicted` gives milliseconds."""
    console = Console(stderr=settings.json_file == "-")
    results = []
    for shape, workload, found in zip(settings.shape or (), workloads, tuned, strict=True):
        heading = f"{settings.operator} {shape}"
        columns = "rows per piece", *(["predicted ms"] if predicted else []), "measured ms"
        shown = table((heading, *columns), left=(heading,))
        rows = []
        for variant, median, _ in found.times:
            chunk_rows = predict.OPERATORS[workload.operator].chunk_rows(workload.rows, variant)
            both = {"predicted_ms": predicted(workload, variant)} if predicted else {}
            both["measured_ms"] = median
            rows.append({**variant.to_json(), "chunk_rows": chunk_rows, **both})
            shown.add_row(str(variant), str(chunk_rows), *(f"{ms:.3f}" for ms in both.values()))
        results.append({"operator": settings.operator, "shape": str(shape), "ways": rows})
        console.print(shown)
        console.print(
            f"Stored: {found.times[0].variant}, at most {rows[0]['chunk_rows']} rows per transfer."
            f"{_BUSY if found.busy else ''}",
            highlight=False,
        )
    options.write_json({"tuned": results}, settings.json_file)
