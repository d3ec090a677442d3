"""``weft calibrate`` and ``weft tune``: measure this machine for predictions, and the fastest
variants of operators on it.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console

import weft.predict as predict
from weft.bench import tables
from weft.bench.conditions import Unless
from weft.bench.settings import FUSED, Dtype, EmulatedGbps, EmulatedLatency, Json, Threads
from weft.bench.values import Shape, product
from weft.cli import options
from weft.cli.options import refuse
from weft.predict import machine, tuned


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
    """Measure this machine for predictions, and store the profile "this". Takes about a minute.

    If torchrun starts it on several calibrated machines, it measures the network between them.
    """
    options.check_files(json_file, None)
    options.check_cache()
    from weft.measure import calibrate as calibration
    from weft.world.launcher import launch

    if options.world_size(ranks)[0] is not None:
        _calibrate_network(threads, json_file)
        return
    count = ranks or max(2, len(os.sched_getaffinity(0)) // threads)
    with options.failing("weft calibrate", json_file):
        profile = launch(calibration.measure, count, threads, threads=threads)[0]
        machine.remember(profile)
    console = Console(stderr=json_file == "-")
    table = tables.table(("", " ", "spread"), left=("", " "))
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
        table.add_row(label, text, f"{statistics.median(spreads):.0f} %")
    table.add_row(
        "interference", f"products and copies {profile['compute_slowdown']:.2f}x slower", ""
    )
    console.print(table)
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
        from weft.ops import measured

        for kept, forget in (tuned.kept, tuned.forget), (measured.kept, measured.forget):
            file, count, _ = kept()
            forget()
            typer.echo(f"Forgot {count} choice(s) of {file}.")
        raise typer.Exit


def _stages_nothing(settings: Tune) -> str:
    if predict.OPERATORS[settings.operator.replace("-", "_")].exchanges == "a":
        return ""
    return f"{settings.operator} exchanges no inputs, so it stages none"


@dataclass(frozen=True)
class Tune:
    """Measure the candidates for shapes on this machine, and store the fastest, which auto uses."""

    operator: Annotated[str, typer.Argument(help="The operator to tune."), FUSED]
    shape: Annotated[list[Shape], product("A shape as for weft bench; repeat the option for more.")]
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=2, help="Number of ranks to start.")
    ] = 2
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the inputs.")] = "float32"
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the output: the inputs' (default) or float32.")
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="The weight is a plain tensor, not packed.")
    ] = False
    staged: Annotated[
        bool,
        typer.Option("--staged", help="Inputs that ranks exchange are not in symmetric memory."),
        Unless(_stages_nothing),
    ] = False
    link_gbps: EmulatedGbps = None
    link_latency_us: EmulatedLatency = 0.0
    iterations: Annotated[int, typer.Option(min=1, help="Rounds to measure.")] = 10
    threads: Threads = None
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


def tune(settings: Tune) -> None:
    options.check_files(settings.json_file, None)
    options.check_cache()
    from weft.measure import tune as tuning

    if options.world_size(None)[0] is not None:
        refuse("tune", "it starts its own ranks, on one host: run it without a launcher")
    on, link = (
        options.load_machine(""),
        (settings.link_gbps, settings.link_latency_us) if settings.link_gbps else None,
    )
    on = on.emulating(*link) if link else on
    questions = []
    for shape in settings.shape:
        case = predict.workload(
            settings.operator.replace("-", "_"),
            settings.ranks,
            (shape.m, shape.k, shape.n),
            settings.dtype,
        )
        case = case._replace(
            out_dtype=settings.out_dtype or settings.dtype,
            packed=not settings.plain,
            symmetric=not settings.staged,
        )
        questions.append(
            tuning.Question(case, [variant for variant, _ in predict.rank(case, on)], link)
        )
    with options.failing("weft tune", settings.json_file):
        answers = tuning.tune(
            questions, settings.iterations, options.threads_for(settings.threads, settings.ranks)
        )
    console, results = Console(stderr=settings.json_file == "-"), []
    for shape, (case, _, _), found in zip(settings.shape, questions, answers, strict=True):
        rows = [
            {
                **variant.to_json(),
                "chunk_rows": predict.OPERATORS[case.operator].chunk_rows(case.rows, variant),
                "predicted_ms": 1e3 * predict.time(case, variant, on),
                "measured_ms": median,
            }
            for variant, median, _ in found
        ]
        results.append({"operator": settings.operator, "shape": str(shape), "ways": rows})
        heading = f"{settings.operator} {shape}"
        table = tables.table(
            (heading, "rows per piece", "predicted ms", "measured ms"), left=(heading,)
        )
        for row, (variant, _, _) in zip(rows, found, strict=True):
            table.add_row(
                str(variant),
                str(row["chunk_rows"]),
                f"{row['predicted_ms']:.3f}",
                f"{row['measured_ms']:.3f}",
            )
        console.print(table)
        console.print(
            f"Stored: {found[0].variant}, at most {rows[0]['chunk_rows']} rows per transfer.",
            highlight=False,
        )
    options.write_json({"tuned": results}, settings.json_file)
