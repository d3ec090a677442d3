"""Fused operators of ranks that are threads and share one GPU, and the product kernel alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.measure.timing import summarize
from weft.ops.all_gather import all_gather
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.barrier import barrier
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.ops.reduce_scatter import reduce_scatter
from weft.predict import figures
from weft.world import World, init
from weft.world.local import local_world
from weft_bench.gpu import Measured, measured, milliseconds, slowest
from weft_bench.verification import Check, Problem, compare, error_bound
from weft_bench.views import View, Views, one_by_one, product_on

Shape = tuple[int, int, int]
Timer = Callable[[Callable[[], object], int, int], list[float]]
GATHERS, SCATTERS = ("pull", "direct", "push"), ("push", "direct", "put")


class Fused(Views):
    """One rank's views: an all-gather + matmul of M x K rows in all by K x N / ranks columns, and a
    matmul + reduce-scatter of M rows by K / ranks x N, by several algorithms.

    With `parts` also the product alone, and communication and product one after the other.
    """

    def __init__(self, world: World, shape: Shape, dtype: torch.dtype, parts: bool) -> None:
        m, k, n = shape
        self.world = world
        self.own = m // world.ranks
        where: dict[str, Any] = {"rank": world.rank, "device": world.device}
        self.gather = Problem(m, k, n // world.ranks, dtype, dtype, seed=0, **where)
        columns = k // world.ranks
        self.terms = [
            Problem(m, columns, n, dtype, dtype, seed=1000 * rank, rank=rank, device=world.device)
            for rank in range(world.ranks)
        ]
        self.sum = torch.stack([each.exact for each in self.terms]).sum(0)
        size = torch.stack([each.magnitude for each in self.terms]).sum(0)
        self.bound = error_bound(size, self.sum, k, dtype, dtype)
        self.bound += torch.finfo(dtype).eps * size  # each term may be rounded to the dtype first
        empty = partial(torch.empty, dtype=dtype, device=world.device)
        a = empty(self.own, k)
        self.gathered = empty(m, k)
        out = empty(m, n // world.ranks)
        x = empty(m, columns)
        product = empty(m, n)
        total = empty(self.own, n)
        b = self.gather.weight
        weight = self.terms[world.rank].weight
        self.a = a
        self.x = x
        right = partial(self.gather.check_product, out)
        summed = partial(self._check_sum, total)
        one = partial(all_gather_matmul, a, b, out=out, world=world)
        other = partial(matmul_reduce_scatter, x, weight, out=total, world=world)
        self.views = {
            f"gather {name}": View(partial(one, algorithm=name), (out,), right) for name in GATHERS
        } | {
            f"scatter {name}": View(partial(other, algorithm=name), (total,), summed)
            for name in SCATTERS
        }
        if parts:
            mm = product_on(world.device)
            multiplied = partial(mm, self.gathered, b, out)
            added = partial(mm, x, weight, product)
            gather = partial(all_gather, a, out=self.gathered, world=world)
            scatter = partial(reduce_scatter, product, out=total, world=world)
            term = self.terms[world.rank]
            self.views |= {
                "product of the gather": View(multiplied, (out,), right),
                "gather, then product": View(
                    partial(one_by_one, gather, multiplied), (self.gathered, out), right
                ),
                "product of the scatter": View(
                    added, (product,), partial(term.check_product, product)
                ),
                "product, then scatter": View(
                    partial(one_by_one, added, scatter), (product, total), summed
                ),
            }

    def renew(self, run: int) -> None:
        rank = self.world.rank
        rows = self.gather.rows(run)
        self.gathered.copy_(rows)
        self.a.copy_(rows[rank * self.own : (rank + 1) * self.own])
        self.x.copy_(self.terms[rank].rows(run))

    def _check_sum(self, total: Tensor, run: int) -> Check:
        start = run + self.world.rank * self.own
        rows = slice(start, start + self.own)
        return compare(total, self.sum[rows], self.bound[rows])


def fused(
    ranks: int,
    products: str,
    shape: Shape,
    dtype: torch.dtype,
    device: str = "cuda",
    times: Timer = milliseconds,
) -> dict[str, Any]:
    """The views of `Fused` in a local world, milliseconds of the slowest rank: medians."""

    def measure() -> dict[str, Measured]:
        world = init()
        subject = Fused(world, shape, dtype, parts=products == "torch")
        return measured(subject, 2, 8, partial(barrier, world), times)

    streams = device == "cpu"
    with local_world(ranks, device, products=products, streams=streams) as local:
        found, checks = slowest(local.run(measure))
    return {
        "ranks": ranks,
        "products": products,
        "times_ms": {name: 1e-3 * summarize(own).median for name, own in found.items()},
        "wrong": {name: check.wrong for name, check in checks.items()},
    }


def product_rates(
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    warmup: int,
    iterations: int,
    device: torch.device,
    times: Timer = milliseconds,
) -> list[dict[str, Any]]:
    """The persistent kernel, without any waits, and `torch.mm`."""
    found = []
    for m, k, n in shapes:
        subject = Product(m, k, n, dtype, device)
        ours, theirs = measured(subject, warmup, iterations, times=times).values()
        kernel, mm = (summarize([1e-3 * t for t in each.milliseconds]) for each in (ours, theirs))
        found.append(
            {
                "shape": {"m": m, "k": k, "n": n},
                "kernel_ms": kernel._asdict(),
                "torch_mm_ms": mm._asdict(),
                "kernel_tflops": figures.tflops(m, k, n, kernel.median),
                "torch_mm_tflops": figures.tflops(m, k, n, mm.median),
                "ratio": mm.median / kernel.median,
                "wrong": ours.check.wrong + theirs.check.wrong,
            }
        )
    return found


class Product(Views):
    """A product by the persistent kernel and by `torch.mm`."""

    def __init__(self, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        from weft.gpu.kernels import all_gather_matmul as kernels
        from weft.gpu.kernels import symmetric
        from weft.kernels.matmul import matmul
        from weft.plan import Region

        on_gpu = device.type == "cuda"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        self.problem = Problem(m, k, n, dtype, dtype, seed=0, rank=0, device=device)
        weight = self.problem.weight
        self.x, out = (torch.empty(m, c, dtype=dtype, device=device) for c in (k, n))
        lane = [matmul(Region(0, "x", 0, m), Region(0, "out", 0, m))]
        product = kernels.ProductKernel(lane, n, dtype, dtype, lambda _: 0, 0, sms, device)
        counters = torch.zeros(1, symmetric.COUNTER, dtype=torch.int64, device=device)
        bases = counters[:, 0].contiguous()
        record = symmetric.timeout_record(device)
        tables = symmetric.CounterTables(counters, bases, bases, record)
        arguments = self.x, self.x, weight, None, out, bases, tables, symmetric.time_limit(60)
        right = partial(self.problem.check_product, out)
        self.views = {
            "kernel": View(partial(product, *arguments), (out,), right),
            "torch.mm": View(partial(torch.mm, self.x, weight, out=out), (out,), right),
        }

    def renew(self, run: int) -> None:
        self.x.copy_(self.problem.rows(run))
