"""The product kernel alone, without any waits, and `torch.mm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.kernels.matmul import matmul
from weft.measure.timing import summarize
from weft.plan import Region
from weft_tools.bench.gpu import Shape, Timer, measured
from weft_tools.bench.torch_products import sums_in_float32
from weft_tools.bench.verification import Problem
from weft_tools.bench.views import View, Views
from weft_tools.events import milliseconds
from weft_tools.predict import figures

KERNEL, MM = "kernel", "torch.mm"


def product_rates(
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    warmup: int,
    iterations: int,
    device: torch.device,
    times: Timer = milliseconds,
) -> list[dict[str, Any]]:
    """For each shape (m, k, n) the rates of the persistent kernel and of `torch.mm` on `device`,
    verified, as JSON objects.

    `torch.mm` is verified with sums in float32, and also timed as torch sets it up by default;
    `ratio` compares with the faster of both.
    """
    return [rates(Product(*shape, dtype, device), warmup, iterations, times) for shape in shapes]


def rates(subject: Product, warmup: int, iterations: int, times: Timer) -> dict[str, Any]:
    """The rates of a product as a JSON object."""
    with sums_in_float32():
        found = measured(subject, warmup, iterations, times=times)
    with sums_in_float32(False):
        by_default = times(subject.views[MM].call, warmup, iterations)
    kernel, mm, default = (
        summarize([1e-3 * time for time in each])
        for each in (found[KERNEL].milliseconds, found[MM].milliseconds, by_default)
    )
    shape = subject.shape
    return {
        "shape": dict(zip("mkn", shape, strict=True)),
        "kernel_ms": kernel._asdict(),
        "torch_mm_ms": mm._asdict(),
        "torch_mm_default_ms": default._asdict(),
        "kernel_tflops": figures.tflops(*shape, kernel.median),
        "torch_mm_tflops": figures.tflops(*shape, mm.median),
        "torch_mm_default_tflops": figures.tflops(*shape, default.median),
        "ratio": min(mm.median, default.median) / kernel.median,
        "wrong": {name: each.check.wrong for name, each in found.items()},
    }


class Product(Views):
    """A product by the persistent kernel and by `torch.mm`."""

    def __init__(self, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = m, k, n
        self.problem = Problem(m, k, n, dtype, dtype, seed=0, rank=0, device=device)
        weight = self.problem.weight
        self.x, out = (torch.empty(m, c, dtype=dtype, device=device) for c in (k, n))
        on_gpu = device.type == "cuda"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        right = partial(self.problem.check_product, out)
        self.views = {
            KERNEL: View(launch(self.x, weight, out, sms), (out,), right),
            MM: View(partial(torch.mm, self.x, weight, out=out), (out,), right),
        }

    def renew(self, run: int) -> None:
        self.x.copy_(self.problem.rows(run))


def launch(x: Tensor, weight: Tensor, out: Tensor, sms: int) -> Callable[[], object]:
    """The launch of the persistent kernel for ``out = x @ weight`` on this number of SMs."""
    from weft.gpu.kernels import symmetric
    from weft.gpu.kernels.all_gather_matmul import ProductKernel

    m, device = len(x), x.device
    lane = [matmul(Region(0, "x", 0, m), Region(0, "out", 0, m))]
    product = ProductKernel(lane, out.shape[1], x.dtype, out.dtype, lambda _: 0, 0, sms, device)
    counters = torch.zeros(1, symmetric.COUNTER, dtype=torch.int64, device=device)
    bases = counters[:, 0].contiguous()
    tables = symmetric.CounterTables(counters, bases, bases, symmetric.timeout_record(device))
    return partial(product, x, x, weight, None, out, bases, tables, symmetric.time_limit(60))
