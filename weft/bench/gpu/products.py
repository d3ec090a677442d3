"""Products on one GPU: with peers' rows in the host's memory, and weft's kernel beside `torch.mm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from weft.bench import figures, harness
from weft.bench.gpu import hardware, milliseconds, versions
from weft.bench.settings import AllGatherMatmul
from weft.engines import engine
from weft.schedules.matmul_from_host import matmul_from_host
from weft.world import init
from weft.world.local import local_world

_PIECES = 16  # transfers of what lies in the host's memory


def from_host(settings: AllGatherMatmul) -> dict[str, Any]:
    """A product alone, the transfers alone, one after the other, and overlapped; peers' rows come from pinned host memory.

    ``pipelined`` multiplies by torch, one product for each transfer; ``pipelined triton`` by one persistent kernel.
    """
    dtype: torch.dtype = getattr(torch, settings.dtype)
    ranks, (m, k, n) = settings.ranks or 2, settings.shape
    own = m // ranks
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    b = (torch.randn(k, n, generator=generator) / k**0.5).to(dtype)
    by: dict[str, dict[str, Any]] = {}
    for products in ("torch", "triton"):
        with local_world(1, "cuda", products=products) as local:
            by[products] = local.run(_from_host, settings, rows, b, own)[0]
    found, kernel = by["torch"], by["triton"]
    times = found["times_ms"] | {"pipelined triton": kernel["times_ms"]["pipelined"]}
    medians = [times[name]["median"] for name in ("compute", "communicate", "sequential", "pipelined")]
    return {
        "benchmark": "all-gather-matmul",
        "device": "cuda",
        "peers": "host",
        "ranks": ranks,
        "shape": asdict(settings.shape),
        "dtype": settings.dtype,
        "algorithm": "pull",
        "chunk_rows": found["chunk_rows"],
        "link": None,
        "times_ms": times,
        "baselines_ms": {},
        **figures.of_overlap(*medians),
        "limit_ratio_triton": figures.limit_ratio(medians[0], medians[1], times["pipelined triton"]["median"]),
        "tflops": figures.tflops(m, k, n, medians[-1]),
        "verified": found["verified"] and kernel["verified"],
        "max_error": max(found["max_error"], kernel["max_error"]),
        "error_bound": found["error_bound"],
        "machine": hardware(),
        "versions": versions(),
    }


def _from_host(settings: AllGatherMatmul, rows: Tensor, b: Tensor, own: int) -> dict[str, Any]:
    world = init()
    device, m = world.device, len(rows)
    chunk = max(1, -(-(m - own) // _PIECES))
    plan = matmul_from_host(own, m - own, chunk_rows=chunk)
    a, away, weight = rows[:own].to(device), rows[own:].pin_memory(), b.to(device)
    whole, out = rows.to(device), torch.empty(m, b.shape[1], dtype=rows.dtype, device=device)
    tensors = {"a": a, "away": away, "out": out}
    program = engine(world).program(plan, tensors, plan.pieces)

    def communicate() -> None:
        whole[own:].copy_(away, non_blocking=True)

    def compute() -> None:
        torch.mm(whole, weight, out=out)

    def sequential() -> None:
        communicate()
        compute()

    def pipelined() -> None:
        program.run(tensors, plan.pieces, {"out": weight})

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


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return harness.summarize([1e-3 * time for time in milliseconds])._asdict()


def product_rates(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, warmup: int, iterations: int) -> list[dict[str, Any]]:
    """The persistent kernel, which here waits for nothing, beside `torch.mm`."""
    from weft.engines.device.kernels import symmetric
    from weft.engines.device.kernels.all_gather_matmul import Product
    from weft.plan import Matmul, Region

    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for m, k, n in shapes:
        x, weight = torch.randn(m, k, device=device).to(dtype), (torch.randn(k, n, device=device) / k**0.5).to(dtype)
        right, out = torch.mm(x, weight), torch.full((m, n), float("nan"), device=device, dtype=dtype)
        lane = [Matmul(Region(0, "x", 0, m), Region(0, "out", 0, m))]
        product = Product(lane, n, dtype, dtype, lambda _: 0, 0, sms, device)
        counters = torch.zeros(1, symmetric.COUNTER, dtype=torch.int64, device=device)
        bases = counters[:, 0].contiguous()
        counter_tables = symmetric.CounterTables(counters, bases, bases, symmetric.timeout_record(device))
        arguments = x, x, weight, None, out, bases, counter_tables, symmetric.MAX_POLLS
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


def print_times(result: dict[str, Any], console: Console) -> None:
    """Print what a fused operator took, in lines."""
    times = [f"{name:<16} {time['median']:9.3f} ms" for name, time in result["times_ms"].items()]
    ratios = f"speedup {result['speedup']:.2f}, limit_ratio {result['limit_ratio']:.3f}, overlap {result['overlap_percent']:.0f} %"
    ratios += f", limit_ratio by triton {result['limit_ratio_triton']:.3f}"
    wrong = "" if result["verified"] else ", WRONG"
    console.print("\n".join([*times, f"{ratios}, {result['tflops']:.1f} TFLOP/s{wrong}"]))
