"""All-gathers of ranks that share one GPU, over the SMs that they may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from weft.bench import sweep
from weft.bench.gpu import hardware, milliseconds, processes, versions
from weft.bench.harness import per_call
from weft.ops.barrier import barrier
from weft.ops.collectives import all_gather
from weft.world import init
from weft.world.launcher import launch
from weft.world.local import local_world


class Gathers(NamedTuple):
    """All-gathers of `sizes` bytes gathered, over numbers of SMs that a kernel may take."""

    ranks: int
    sizes: tuple[int, ...]
    sms: tuple[int, ...]
    iterations: int
    warmup: int
    threads: int = 1


def all_gathers(settings: Gathers) -> dict[str, Any]:
    """The kernels over SMs, the copy engine, torch's own, and a plain copy of as many bytes, of ranks that share this GPU."""
    from weft.engines.device.kernels.all_gather import AllGather, Traffic

    lanes = 64 if torch.version.hip else 32

    def measure(size: int, kind: str, sms: int | None) -> tuple[list[float], int]:
        world = init()
        words = size // world.ranks // 4
        generator = torch.Generator(device=world.device)
        shards = [
            torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=world.device, generator=generator.manual_seed(r))
            for r in range(world.ranks)
        ]
        gathered = world.empty(world.ranks * words, dtype=torch.int32).fill_(-1)
        own, whole = shards[world.rank], torch.cat(shards)
        barrier()
        if sms is not None:
            gather = AllGather(world, gathered, Traffic(sms=sms, threads_per_warp=lanes), gluon=kind == "gluon")
            times = milliseconds(lambda: gather(own), settings.warmup, settings.iterations)
            gather.check()
        elif kind == "copy engine":
            times = milliseconds(lambda: all_gather(own, out=gathered), settings.warmup, settings.iterations)
        else:
            times = milliseconds(lambda: gathered.copy_(whole), settings.warmup, settings.iterations)
        return times, int((gathered != whole).sum())

    kinds = [(kind, sms) for kind in ("triton", "gluon") for sms in settings.sms] + [("copy engine", None), ("plain copy", None)]
    of_processes = launch(processes.gathers, settings.ranks, settings.sizes, settings.warmup, settings.iterations, threads=1)
    rows = []
    for size in settings.sizes:
        for kind, sms in kinds:
            with local_world(settings.ranks, "cuda") as local:
                rows.append(_row(size, kind, sms, local.run(measure, size, kind, sms)))
        rows += [_row(size, kind, None, [found[size][kind] for found in of_processes]) for kind in of_processes[0][size]]
    verified = all(row["wrong"] == 0 for row in rows)
    return {
        "benchmark": "all-gather",
        "device": "cuda",
        "ranks": settings.ranks,
        "rows": rows,
        "verified": verified,
        "machine": hardware(),
        "versions": versions(),
    }


def _row(size: int, kind: str, sms: int | None, found: Sequence[tuple[list[float], int]]) -> dict[str, Any]:
    """What all ranks found: their milliseconds and wrong elements."""
    time = per_call([1e-3 * max(times) for times in zip(*(times for times, _ in found), strict=True)])
    algbw, busbw = sweep.bandwidths("all_gather", size // len(found), len(found), time.median)
    return {
        "size_bytes": size,
        "operation": "all-gather",
        "implementation": kind,
        "comm_sms": sms,
        "time_us": time._asdict(),
        "algbw_gbps": algbw,
        "busbw_gbps": busbw,
        "wrong": sum(wrong for _, wrong in found),
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print all-gathers as rows."""
    made = Table(title=f"all-gather of {result['ranks']} ranks that share one {result['machine']['gpu']}")
    for column in ("bytes gathered", "implementation", "SMs", "us", "GB/s", "#wrong"):
        made.add_column(column, justify="left" if column == "implementation" else "right")
    for row in result["rows"]:
        numbers = f"{row['time_us']['median']:.1f}", f"{row['algbw_gbps']:.1f}", str(row["wrong"])
        made.add_row(f"{row['size_bytes']:,}", row["implementation"], str(row["comm_sms"] or "-"), *numbers)
    console.print(made)
