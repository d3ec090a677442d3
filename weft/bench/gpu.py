"""Benchmarks on one GPU: ranks share it, or peers' rows lie in the host's memory. Times are those of the device's own events."""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from weft import __version__
from weft.bench import figures
from weft.engines import engine
from weft.local import local_world
from weft.onesided import barrier
from weft.ops.collectives import all_gather
from weft.schedules.matmul_from_host import matmul_from_host
from weft.world import init

if TYPE_CHECKING:
    from rich.table import Table

_PIECES = 16  # transfers of what lies in the host's memory


class Gathers(NamedTuple):
    """All-gathers of `sizes` bytes gathered, over numbers of SMs that a kernel may take."""

    ranks: int
    sizes: tuple[int, ...]
    sms: tuple[int, ...]
    iterations: int
    warmup: int


class Products(NamedTuple):
    """``(m, k) @ (k, n)`` with the rows of all but one of `ranks` ranks in the host's memory."""

    ranks: int
    m: int
    k: int
    n: int
    dtype: str
    iterations: int
    warmup: int
    seed: int


def hardware() -> dict[str, Any]:
    """The GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory = round(properties.total_memory / 2**30, 1)
    return {"gpu": properties.name, "sms": properties.multi_processor_count, "gpu_memory_gib": memory}


def versions() -> dict[str, str]:
    """Of what takes part in a measurement."""
    import triton

    found = {
        "weft": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    return found | {"cuda": torch.version.cuda or str(torch.version.hip)}


def milliseconds(call: Callable[[], object], warmup: int, iterations: int) -> list[float]:
    """What each of `iterations` calls takes on the current stream."""
    for _ in range(max(1, warmup)):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(marks)]


def all_gathers(settings: Gathers) -> dict[str, Any]:
    """The kernels over SMs, the copy engine, and a plain copy of as many bytes, of ranks that share this GPU."""
    from weft.kernels.all_gather import AllGather, Traffic

    rows: list[dict[str, Any]] = []
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
    for size in settings.sizes:
        for kind, sms in kinds:
            with local_world(settings.ranks, "cuda") as local:
                found = local.run(measure, size, kind, sms)
            slowest = sorted(map(max, zip(*(times for times, _ in found), strict=True)))
            median = statistics.median(slowest)
            bandwidth = size / (median * 1e-3) / 1e9
            rows.append(
                {
                    "size_bytes": size,
                    "operation": "all-gather",
                    "implementation": kind,
                    "comm_sms": sms,
                    "time_us": {
                        "median": 1e3 * median,
                        "min": 1e3 * slowest[0],
                        "p99": 1e3 * slowest[int(0.99 * (len(slowest) - 1))],
                    },
                    "algbw_gbps": bandwidth,
                    "busbw_gbps": bandwidth * (settings.ranks - 1) / settings.ranks,
                    "wrong": sum(wrong for _, wrong in found),
                }
            )
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


def from_host(settings: Products) -> dict[str, Any]:
    """A product alone, the transfers alone, one after the other, and overlapped; peers' rows come from pinned host memory."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    m, k, n = settings.m, settings.k, settings.n
    own = m // settings.ranks
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    b = (torch.randn(k, n, generator=generator) / k**0.5).to(dtype)
    with local_world(1, "cuda") as local:
        found: dict[str, Any] = local.run(_from_host, settings, rows, b, own)[0]
    times = found["times_ms"]
    compute, communicate, sequential, pipelined = (
        times[name]["median"] for name in ("compute", "communicate", "sequential", "pipelined")
    )
    return {
        "benchmark": "all-gather-matmul",
        "device": "cuda",
        "peers": "host",
        "ranks": settings.ranks,
        "shape": {"m": m, "k": k, "n": n},
        "dtype": settings.dtype,
        "algorithm": "pull",
        "chunk_rows": found["chunk_rows"],
        "link": None,
        "times_ms": times,
        "baselines_ms": {},
        "speedup": figures.speedup(sequential, pipelined),
        "overlap_percent": figures.overlap_percent(compute, communicate, pipelined),
        "limit_ratio": figures.limit_ratio(compute, communicate, pipelined),
        "tflops": figures.tflops(m, k, n, pipelined),
        "verified": found["verified"],
        "max_error": found["max_error"],
        "error_bound": found["error_bound"],
        "machine": hardware(),
        "versions": versions(),
    }


def _from_host(settings: Products, rows: Tensor, b: Tensor, own: int) -> dict[str, Any]:
    world = init()
    device, m = world.device, len(rows)
    chunk = max(1, -(-(m - own) // _PIECES))
    plan = matmul_from_host(own, m - own, chunk_rows=chunk)
    a, away, weight = rows[:own].to(device), rows[own:].pin_memory(), b.to(device)
    whole, out = rows.to(device), torch.empty(m, b.shape[1], dtype=rows.dtype, device=device)
    tensors = {"a": a, "away": away, "out": out}
    program = engine(world).program("from host", plan, tensors)

    def communicate() -> None:
        whole[own:].copy_(away, non_blocking=True)

    def compute() -> None:
        torch.mm(whole, weight, out=out)

    def sequential() -> None:
        communicate()
        compute()

    def pipelined() -> None:
        program.run(tensors, {"out": weight})

    views: dict[str, Callable[[], None]] = {
        "compute": compute,
        "communicate": communicate,
        "sequential": sequential,
        "pipelined": pipelined,
    }
    times = {name: summary(milliseconds(call, settings.warmup, settings.iterations)) for name, call in views.items()}
    out.fill_(float("nan"))
    pipelined()
    exact, size = whole.double() @ weight.double(), whole.double().abs() @ weight.double().abs()
    bound = torch.finfo(torch.float32).eps * (rows.shape[1] + 8) * size + torch.finfo(out.dtype).eps * exact.abs()
    error = (out.double() - exact).abs()
    return {
        "times_ms": times,
        "chunk_rows": chunk,
        "verified": bool((error <= bound).all()),
        "max_error": float(error.max()),
        "error_bound": float(bound.max()),
    }


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def product_rates(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, warmup: int, iterations: int) -> list[dict[str, Any]]:
    """The persistent kernel, which here waits for nothing, beside `torch.mm`."""
    from weft.kernels import symmetric
    from weft.kernels.all_gather_matmul import Product
    from weft.plan import Matmul, Region

    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for m, k, n in shapes:
        x, weight = torch.randn(m, k, device=device).to(dtype), (torch.randn(k, n, device=device) / k**0.5).to(dtype)
        right, out = torch.mm(x, weight), torch.full((m, n), float("nan"), device=device, dtype=dtype)
        product = Product([Matmul(Region(0, "x", 0, m), Region(0, "out", 0, m))], x, weight, out, lambda _: 0, sms)
        counters = torch.zeros(1, symmetric.COUNTER, dtype=torch.int64, device=device)
        arguments = None, counters, counters[:, 0].contiguous(), symmetric.ledger(device)
        ours = summary(milliseconds(lambda p=product, a=arguments: p(*a), warmup, iterations))  # type: ignore[misc]
        theirs = summary(milliseconds(lambda x=x, w=weight, o=right: torch.mm(x, w, out=o), warmup, iterations))  # type: ignore[misc]
        wrong = int((~torch.isclose(out.float(), right.float(), rtol=2e-2, atol=2e-2)).sum())
        found.append(
            {
                "shape": {"m": m, "k": k, "n": n},
                "kernel_ms": ours,
                "torch_mm_ms": theirs,
                "kernel_tflops": figures.tflops(m, k, n, ours["median"]),
                "torch_mm_tflops": figures.tflops(m, k, n, theirs["median"]),
                "ratio": theirs["median"] / ours["median"],
                "wrong": wrong,
            }
        )
    return found


def table(result: dict[str, Any]) -> Table:
    """All-gathers as rows."""
    from rich.table import Table

    made = Table(title=f"all-gather of {result['ranks']} ranks that share one {result['machine']['gpu']}")
    for column in ("bytes gathered", "implementation", "SMs", "us", "GB/s", "#wrong"):
        made.add_column(column, justify="left" if column == "implementation" else "right")
    for row in result["rows"]:
        numbers = f"{row['time_us']['median']:.1f}", f"{row['algbw_gbps']:.1f}", str(row["wrong"])
        made.add_row(f"{row['size_bytes']:,}", row["implementation"], str(row["comm_sms"] or "-"), *numbers)
    return made


def summary_of(result: dict[str, Any]) -> str:
    """What a fused operator took, in lines."""
    times = [f"{name:<12} {time['median']:9.3f} ms" for name, time in result["times_ms"].items()]
    ratios = f"speedup {result['speedup']:.2f}, limit_ratio {result['limit_ratio']:.3f}, overlap {result['overlap_percent']:.0f} %"
    wrong = "" if result["verified"] else ", WRONG"
    return "\n".join([*times, f"{ratios}, {result['tflops']:.1f} TFLOP/s{wrong}"])
