"""``weft calibrate`` and ``weft tune``: measure this machine for predictions, and what is fastest
on it.
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
from weft.bench.settings import FUSED, Dtype, Json, Shape, Threads, product
from weft.cli import options
from weft.cli.options import refuse
from weft.predict import machine


def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=2, help="That measure together; one per core."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    json_file: Json = None,
) -> None:
    """Measure this machine for predictions, and remember it as the profile this. Takes about a
    minute.

    Started by torchrun on several machines that know themselves already: measure what joins them.
    """
    options.check_files(json_file, None)
    options.check_remembered()
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
    lines = {
        kind: f"{1e3 * product['tflops']:.1f} GFLOP/s, weight {product['weight_gbs']:.1f} GB/s, {product['fixed_us']:.0f} us"
        for kind, product in profile["products"].items()
    }
    lines |= {
        "memory": f"{profile['memory_gbs']:.1f} GB/s",
        "link": f"{profile['links'][0]['gbs']:.1f} GB/s",
    }
    lines |= {
        "reduce": f"{profile['reduce_gbs']:.1f} GB/s",
        "64 signals": f"{profile['notify_us']:.1f} us each",
    }
    lines |= {
        "call": f"{profile['launch_us']:.1f} us",
        "two lanes": f"{profile['lane_us']:.1f} us more",
    }
    lines |= {
        "a slow copy": f"{profile['wake_us']:.1f} us late",
        "turn": f"{profile['turn_us']:.0f} us",
    }
    for what, text in lines.items():
        found = [
            percent
            for timed, percent in profile["spread"].items()
            if what in (timed, timed.rpartition(" ")[0])
        ]
        table.add_row(what, text, f"{statistics.median(found):.0f} %")
    table.add_row(
        "interference", f"products and copies {profile['compute_slowdown']:.2f}x slower", ""
    )
    console.print(table)
    console.print(
        "Rates are of large sizes, in the lower quartile of runs; spread: by how much the median "
        "took longer.",
        highlight=False,
    )
    options.write_json(profile, json_file)


def _calibrate_network(threads: int, json_file: str | None) -> None:
    """Measure the link between hosts, and let each remember it."""
    from weft.measure import calibrate as calibration

    mine = machine.calibrated()
    if mine is None:
        refuse(
            "calibrate",
            "measure each machine by itself first, and then what joins them: run weft calibrate "
            "without torchrun",
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


@dataclass(frozen=True)
class Tune:
    """Measure the candidates for given shapes on this machine, and remember the winners: from now
    on auto takes them.
    """

    operator: Annotated[str, typer.Argument(help="What to tune."), FUSED]
    shape: Annotated[list[Shape], product("A shape of weft bench; may be given several times.")]
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=2, help="How many to start.")] = 2
    dtype: Annotated[Dtype, typer.Option(help="Of the inputs.")] = "float32"
    out_dtype: Annotated[
        Dtype | None, typer.Option(help="Of the output: the inputs' or float32.")
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="The weight is a plain tensor, not packed.")
    ] = False
    staged: Annotated[
        bool,
        typer.Option("--staged", help="The input of all-gather-matmul is not in symmetric memory."),
    ] = False
    link_gbps: Annotated[float | None, typer.Option(help="Gbit/s of an emulated link.")] = None
    link_latency_us: Annotated[float, typer.Option(min=0, help="Latency of the emulated link.")] = (
        0.0
    )
    iterations: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 10
    threads: Threads = None
    json_file: Json = None


def tune(given: Tune) -> None:
    options.check_files(given.json_file, None)
    options.check_remembered()
    from weft.measure import tune as tuning

    if options.world_size(None)[0] is not None:
        refuse("tune", "it starts its own ranks, on one host: run it by itself")
    if given.staged and given.operator != "all-gather-matmul":
        refuse("--staged", "only the input of all-gather-matmul can lie in symmetric memory")
    on, link = (
        options.load_machine(""),
        (given.link_gbps, given.link_latency_us) if given.link_gbps else None,
    )
    on = on.emulating(*link) if link else on
    questions = []
    for shape in given.shape:
        case = predict.workload(
            given.operator.replace("-", "_"), given.ranks, (shape.m, shape.k, shape.n), given.dtype
        )
        case = case._replace(
            out_dtype=given.out_dtype or given.dtype,
            packed=not given.plain,
            symmetric=not given.staged,
        )
        questions.append(
            tuning.Question(case, [variant for variant, _ in predict.rank(case, on)], link)
        )
    with options.failing("weft tune", given.json_file):
        answers = tuning.tune(
            questions, given.iterations, options.threads_for(given.threads, given.ranks)
        )
    console, results = Console(stderr=given.json_file == "-"), []
    for shape, (case, _, _), found in zip(given.shape, questions, answers, strict=True):
        rows = [
            {
                **variant._asdict(),
                "chunk_rows": predict.OPERATORS[case.operator].chunk_rows(case.rows, variant),
                "predicted_ms": 1e3 * predict.time(case, variant, on),
                "measured_ms": median,
            }
            for variant, median, _ in found
        ]
        results.append({"operator": given.operator, "shape": str(shape), "ways": rows})
        heading = f"{given.operator} {shape}"
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
            f"Remembered: {found[0].variant}, at most {rows[0]['chunk_rows']} rows per transfer.",
            highlight=False,
        )
    options.write_json({"tuned": results}, given.json_file)
