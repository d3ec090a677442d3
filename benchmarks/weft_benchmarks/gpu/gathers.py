"""All-gathers of ranks that share one GPU, over the number of SMs that they may use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from weft.bench import sweep, tables
from weft.bench.collectives import bandwidths
from weft.bench.settings import AllGather
from weft.bench.values import parse_sizes
from weft.measure.timing import per_call
from weft.ops.all_gather import all_gather
from weft.ops.barrier import barrier
from weft.pictures import COLOURS, DASHED, picture
from weft.world import init
from weft.world.launcher import launch
from weft.world.local import local_world
from weft_benchmarks.gpu import hardware, milliseconds, processes, versions


def all_gathers(settings: AllGather) -> dict[str, Any]:
    """The kernels over SMs, the copy engine, torch's own, and a plain copy of as many bytes, of
    ranks that share this GPU.
    """
    ranks = settings.ranks or 2
    sizes = [ranks * shard for shard in parse_sizes(settings.sizes)]

    def measure(size: int, kind: str, sms: int | None) -> tuple[list[float], int]:
        world = init()
        words = size // world.ranks // 4
        generator = torch.Generator(device=world.device)
        shards = [
            torch.randint(
                -(2**31),
                2**31 - 1,
                (words,),
                dtype=torch.int32,
                device=world.device,
                generator=generator.manual_seed(r),
            )
            for r in range(world.ranks)
        ]
        gathered = world.empty(world.ranks * words, dtype=torch.int32).fill_(-1)
        own, whole = shards[world.rank], torch.cat(shards)
        barrier()
        if sms is not None:
            options: dict[str, Any] = {
                "algorithm": "kernel",
                "comm_sms": sms,
                "gluon": kind == "gluon",
            }
            times = milliseconds(
                lambda: all_gather(own, out=gathered, **options),
                settings.warmup,
                settings.iterations,
            )
        elif kind == "copy engine":
            times = milliseconds(
                lambda: all_gather(own, out=gathered), settings.warmup, settings.iterations
            )
        else:
            times = milliseconds(
                lambda: gathered.copy_(whole), settings.warmup, settings.iterations
            )
        return times, int((gathered != whole).sum())

    kinds = [(kind, sms) for kind in ("triton", "gluon") for sms in settings.sms] + [
        ("copy engine", None),
        ("plain copy", None),
    ]
    of_processes = launch(
        processes.gathers, ranks, sizes, settings.warmup, settings.iterations, threads=1
    )
    rows = []
    for size in sizes:
        for kind, sms in kinds:
            with local_world(ranks, "cuda") as local:
                rows.append(_row(size, kind, sms, local.run(measure, size, kind, sms)))
        rows += [
            _row(size, kind, None, [found[size][kind] for found in of_processes])
            for kind in of_processes[0][size]
        ]
    return {
        "benchmark": "all-gather",
        "device": "cuda",
        "ranks": ranks,
        "rows": rows,
        "verified": not any(row["wrong"] for row in rows),
        "machine": hardware(),
        "versions": versions(),
    }


def _row(
    size: int, kind: str, sms: int | None, found: Sequence[tuple[list[float], int]]
) -> dict[str, Any]:
    """The row of a result: the milliseconds and wrong elements of all ranks."""
    time = per_call(
        [1e-3 * max(times) for times in zip(*(times for times, _ in found), strict=True)]
    )
    widths = bandwidths("all_gather", size // len(found), len(found), time.median)
    labels = {
        "size_bytes": size,
        "operation": "all-gather",
        "implementation": kind,
        "comm_sms": sms,
    }
    return sweep.row(labels, time, *widths, wrong=sum(wrong for _, wrong in found))


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print all-gathers as rows."""
    console.print(
        f"all-gather of {result['ranks']} ranks that share one {result['machine']['gpu']}"
    )
    made = tables.table(
        ("bytes gathered", "implementation", "SMs", "us", "GB/s", "#wrong"),
        left=("implementation",),
    )
    for row in result["rows"]:
        numbers = f"{row['time_us']['median']:.1f}", f"{row['algbw_gbps']:.1f}", str(row["wrong"])
        made.add_row(
            f"{row['size_bytes']:,}", row["implementation"], str(row["comm_sms"] or "-"), *numbers
        )
    console.print(made)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the bandwidth of all-gathers over the SMs they may use, a panel for each size, into a
    PNG or SVG file.
    """
    sizes = sorted({row["size_bytes"] for row in result["rows"]})
    with picture(path, 3.6 * len(sizes), 3.4) as figure:
        for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            rows = [row for row in result["rows"] if row["size_bytes"] == size]
            for kind in dict.fromkeys(row["implementation"] for row in rows):
                points = [
                    (row["comm_sms"], row["algbw_gbps"])
                    for row in rows
                    if row["implementation"] == kind
                ]
                if points[0][0] is None:
                    axes.axhline(
                        points[0][1],
                        color=COLOURS[kind],
                        linestyle=DASHED,
                        linewidth=1.2,
                        label=kind,
                    )
                else:
                    axes.plot(
                        *zip(*points, strict=True), color=COLOURS[kind], marker="o", label=kind
                    )
            axes.set_title(f"{size / 1e6:g} MB gathered")
            axes.set_xlabel("SMs")
            axes.set_ylim(0)
        figure.axes[0].set_ylabel("GB/s")
        figure.axes[0].legend(fontsize=8)
