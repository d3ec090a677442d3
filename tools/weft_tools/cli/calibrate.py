"""``weft calibrate``: measure this machine for predictions."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from weft.cli import options
from weft.cli.common import Json
from weft.cli.options import reject
from weft.cli.tables import table
from weft_tools.predict import machine

app = typer.Typer(add_completion=False)


@app.command()
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
    from weft.measure.launched import on_ranks
    from weft_tools import calibrate as calibration

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
    from weft_tools import calibrate as calibration

    mine = machine.calibrated()
    if mine is None:
        reject(
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
