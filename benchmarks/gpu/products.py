"""Products on this GPU: weft's persistent kernel compared with `torch.mm`, and fused operators of
ranks that share the GPU. Writes JSON.
"""

import json
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft_benchmarks.gpu import hardware, milliseconds, versions
from weft_benchmarks.gpu.processes import group_name, random, sharing, timed
from weft_benchmarks.gpu.products import summary

import weft
from weft.ops.all_gather import all_gather
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.predict import figures
from weft.world.launcher import launch

SHAPES = [(8192, 8192, 8192), (4096, 10240, 5120), (2048, 2048, 1024)]
M = N = K = 8192


def medians(every: list[dict[str, list[float]]]) -> dict[str, float]:
    """For each view, the median over iterations of the slowest rank's time."""
    return {
        view: statistics.median(map(max, zip(*(one[view] for one in every), strict=True)))
        for view in every[0]
    }


def fused(ranks: int, products: str) -> dict[str, Any]:
    """Fused operators of 8192 x 8192 x 8192 bfloat16 in a local world, compared with gather and
    product one after the other, and the product alone.
    """

    def measure() -> dict[str, list[float]]:
        world = weft.init()
        rows, columns, device = M // world.ranks, N // world.ranks, world.device
        a, b = (
            torch.randn(rows, K, device=device).bfloat16(),
            (torch.randn(K, columns, device=device) / K**0.5).bfloat16(),
        )
        out, gathered = a.new_empty(M, columns), a.new_empty(M, K)
        x, w = (
            torch.randn(M, columns, device=device).bfloat16(),
            (torch.randn(columns, N, device=device) / K**0.5).bfloat16(),
        )
        scattered, product = x.new_empty(rows, N), x.new_empty(M, N)

        def gather(algorithm: str) -> Any:
            return partial(weft.all_gather_matmul, a, b, out=out, algorithm=algorithm)

        def scatter(algorithm: str) -> Any:
            return partial(weft.matmul_reduce_scatter, x, w, out=scattered, algorithm=algorithm)

        views = {
            f"gather {algorithm}": gather(algorithm) for algorithm in ("pull", "direct", "push")
        }
        views |= {
            f"scatter {algorithm}": scatter(algorithm) for algorithm in ("push", "direct", "put")
        }
        if products == "torch":
            views["gather, then product"] = lambda: torch.mm(
                weft.all_gather(a, out=gathered), b, out=out
            )
            views["product of the gather"] = lambda: torch.mm(gathered, b, out=out)
            views["product, then scatter"] = lambda: weft.reduce_scatter(
                torch.mm(x, w, out=product), out=scattered
            )
            views["product of the scatter"] = lambda: torch.mm(x, w, out=product)
        found = {name: times for name, (times, _) in timed(views, 2, 8).items()}
        right = weft.all_gather(a).float() @ b.float()
        torch.testing.assert_close(
            weft.all_gather_matmul(a, b, algorithm="push").float(), right, rtol=2e-2, atol=2e-2
        )
        right = weft.reduce_scatter(x.float() @ w.float())
        torch.testing.assert_close(
            weft.matmul_reduce_scatter(x, w, algorithm="put").float(), right, rtol=2e-2, atol=4e-2
        )
        return found

    with weft.local_world(ranks, "cuda", products=products) as local:
        return {"ranks": ranks, "products": products, "times_ms": medians(local.run(measure))}


def product_rates(
    shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, warmup: int, iterations: int
) -> list[dict[str, Any]]:
    """The persistent kernel, without any waits, and `torch.mm`."""
    from weft.engines.device.kernels import symmetric
    from weft.engines.device.kernels.all_gather_matmul import Product
    from weft.kernels.matmul import matmul
    from weft.plan import Region

    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for m, k, n in shapes:
        x, weight = (
            torch.randn(m, k, device=device).to(dtype),
            (torch.randn(k, n, device=device) / k**0.5).to(dtype),
        )
        right, out = (
            torch.mm(x, weight),
            torch.full((m, n), float("nan"), device=device, dtype=dtype),
        )
        lane = [matmul(Region(0, "x", 0, m), Region(0, "out", 0, m))]
        product = Product(lane, n, dtype, dtype, lambda _: 0, 0, sms, device)
        counters = torch.zeros(1, symmetric.COUNTER, dtype=torch.int64, device=device)
        bases = counters[:, 0].contiguous()
        counter_tables = symmetric.CounterTables(
            counters, bases, bases, symmetric.timeout_record(device)
        )
        arguments = x, x, weight, None, out, bases, counter_tables, symmetric.MAX_POLLS
        ours = summary(milliseconds(lambda p=product, a=arguments: p(*a), warmup, iterations))  # type: ignore[misc]
        theirs = summary(
            milliseconds(lambda x=x, w=weight, o=right: torch.mm(x, w, out=o), warmup, iterations)
        )  # type: ignore[misc]
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


def of_processes(
    m: int, k: int, n: int, dtype: torch.dtype, warmup: int, iterations: int
) -> dict[str, float]:
    """torch's own fused operator and weft's, on ranks that are processes and share this GPU's time.

    Median milliseconds of the slowest rank for (m, k) gathered @ (k, n / ranks). A wrong result is
    an `AssertionError`.
    """
    with sharing() as world:
        a = world.empty(m // world.ranks, k, dtype=dtype).copy_(
            random(world, world.rank, m // world.ranks, k)
        )
        b = (random(world, world.ranks + world.rank, k, n // world.ranks) / k**0.5).to(dtype)
        out = torch.empty(m, n // world.ranks, dtype=dtype, device=world.device)

        def weft(algorithm: str) -> Tensor:
            all_gather_matmul(a, b, out=out, algorithm=algorithm)
            return out

        by_torch = torch.ops.symm_mem.fused_all_gather_matmul
        views: dict[str, Callable[[], Tensor]] = {
            "torch fused_all_gather_matmul": lambda: by_torch(
                a, [b], 0, group_name(world), return_A=False
            )[1][0],
            "weft pull": lambda: weft("pull"),
            "weft direct": lambda: weft("direct"),
            "sequential": lambda: torch.mm(all_gather(a), b, out=out),
        }
        found = timed(views, warmup, iterations)
        right = all_gather(a).float() @ b.float()
        every: list[dict[str, list[float]]] = [{}] * world.ranks
        for _, result in found.values():
            torch.testing.assert_close(result().float(), right, rtol=2e-2, atol=2e-2)
        dist.all_gather_object(every, {name: times for name, (times, _) in found.items()})
    dist.destroy_process_group()
    return medians(every)


def outcome(step: Callable[[], Any]) -> Any:
    """The result of a step, or its error as a text: the other steps are still to be measured."""
    try:
        return step()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main(file: Path) -> bool:
    steps: dict[str, Callable[[], Any]] = {
        "products": lambda: product_rates(SHAPES, torch.bfloat16, 3, 20),
        **{
            f"{ranks} ranks, {how}": partial(fused, ranks, how)
            for ranks in (2, 4, 8)
            for how in ("torch", "triton")
        },
        "processes": lambda: launch(of_processes, 2, M, K, N, torch.bfloat16, 2, 10, threads=1)[0],
    }
    result: dict[str, Any] = {"machine": hardware(), "versions": versions()}
    for name, step in steps.items():
        result[name] = outcome(step)
        file.write_text(json.dumps(result, indent=1))  # earlier results survive a later crash
    wrong = (
        any(row["wrong"] for row in result["products"])
        if isinstance(result["products"], list)
        else True
    )
    return wrong or any("error" in found for found in result.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) / "products.json"))
