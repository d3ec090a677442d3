"""Products on one GPU: with peers' rows in the host's memory, and weft's kernel compared with
`torch.mm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from weft.bench.settings import AllGatherMatmul
from weft.engines import engine
from weft.measure.timing import summarize
from weft.measure.verification import Check, compare, error_bound
from weft.predict import figures
from weft.world import init
from weft.world.local import local_world
from weft_benchmarks.gpu import hardware, milliseconds, versions
from weft_benchmarks.gpu.matmul_from_host import matmul_from_host

_PIECES = 16  # transfers of the rows in the host's memory


def from_host(settings: AllGatherMatmul) -> dict[str, Any]:
    """A product alone, the transfers alone, one after the other, and overlapped; peers' rows come
    from pinned host memory.

    ``pipelined`` multiplies by torch, one product for each transfer; ``pipelined triton`` by one
    persistent kernel.
    """
    dtype: torch.dtype = getattr(torch, settings.dtype)
    ranks, (m, k, n) = settings.ranks or 2, settings.shape
    own = m // ranks
    generator = torch.Generator().manual_seed(settings.seed)
    rows = torch.randn(m, k, generator=generator).to(dtype)
    b = (torch.randn(k, n, generator=generator) / k**0.5).to(dtype)
    found = []
    for products in ("torch", "triton"):
        with local_world(1, "cuda", products=products) as local:
            found += local.run(_from_host, settings, rows, b, own)
    (times, check), (kernel_times, kernel_check) = found
    times |= {"pipelined triton": kernel_times["pipelined"]}
    worst = check.worse(kernel_check)
    medians = [times[name]["median"] for name in figures.VIEWS]
    return {
        "benchmark": "all-gather-matmul",
        "device": "cuda",
        "peers": "host",
        "ranks": ranks,
        "shape": asdict(settings.shape),
        "dtype": settings.dtype,
        "algorithm": "pull",
        "chunk_rows": -(-(m - own) // _PIECES),
        "link": None,
        "times_ms": times,
        "baselines_ms": {},
        **figures.of_overlap(*medians),
        "limit_ratio_triton": figures.limit_ratio(
            medians[0], medians[1], times["pipelined triton"]["median"]
        ),
        "tflops": figures.tflops(m, k, n, medians[-1]),
        "verified": not worst.wrong,
        "max_error": worst.max_error,
        "error_bound": worst.bound,
        "machine": hardware(),
        "versions": versions(),
    }


def _from_host(
    settings: AllGatherMatmul, rows: Tensor, b: Tensor, own: int
) -> tuple[dict[str, dict[str, float]], Check]:
    world = init()
    device, m = world.device, len(rows)
    plan, shards = matmul_from_host(_PIECES), (own, m - own)
    a, away, weight = rows[:own].to(device), rows[own:].pin_memory(), b.to(device)
    whole, out = rows.to(device), torch.empty(m, b.shape[1], dtype=rows.dtype, device=device)
    tensors = {"a": a, "away": away, "out": out}
    program = engine(world).program(plan, tensors, shards)

    compute = partial(torch.mm, whole, weight, out=out)
    communicate = partial(whole[own:].copy_, away, non_blocking=True)
    pipelined = partial(program.run, tensors, shards, {"out": weight})
    views: dict[str, Callable[[], object]] = {
        "compute": compute,
        "communicate": communicate,
        "sequential": lambda: (communicate(), compute()),
        "pipelined": pipelined,
    }
    times = {
        name: summary(milliseconds(call, settings.warmup, settings.iterations))
        for name, call in views.items()
    }
    out.fill_(float("nan"))
    pipelined()
    exact, size = whole.double() @ weight.double(), whole.double().abs() @ weight.double().abs()
    return times, compare(
        out, exact, error_bound(size, exact, rows.shape[1], rows.dtype, out.dtype)
    )


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return summarize([1e-3 * time for time in milliseconds])._asdict()


def print_times(result: dict[str, Any], console: Console) -> None:
    """Print the times of a fused operator."""
    times = [f"{name:<16} {time['median']:9.3f} ms" for name, time in result["times_ms"].items()]
    ratios = (
        f"speedup {result['speedup']:.2f}, limit_ratio {result['limit_ratio']:.3f}, "
        f"overlap {result['overlap_percent']:.0f} %"
    )
    more = (
        f"limit_ratio by triton {result['limit_ratio_triton']:.3f}, {result['tflops']:.1f} TFLOP/s"
    )
    console.print("\n".join([*times, f"{ratios}, {more}{'' if result['verified'] else ', WRONG'}"]))
