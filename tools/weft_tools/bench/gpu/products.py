"""Products on one GPU with peers' rows in the host's memory: ``weft bench all-gather-matmul --peers
host``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console

from weft.engines import engine
from weft.measure.timing import summarize
from weft.measure.versions import versions
from weft.world import World, init
from weft.world.local import local_world
from weft_tools.bench import tables
from weft_tools.bench.gpu import Measured, Timer, hardware, measured, slowest
from weft_tools.bench.gpu.matmul_from_host import matmul_from_host
from weft_tools.bench.harness import options_of, times_ms, utc
from weft_tools.bench.settings.fused import AllGatherMatmul
from weft_tools.bench.torch_products import sums_in_float32
from weft_tools.bench.verification import Check, Problem
from weft_tools.bench.views import View, Views, one_by_one, product_on
from weft_tools.events import milliseconds
from weft_tools.predict import figures

_PIECES = 16  # transfers of the rows in the host's memory


class RowsFromHost(Views):
    """A product alone, the transfers alone, one after the other, and overlapped."""

    def __init__(self, settings: AllGatherMatmul, world: World) -> None:
        dtype = getattr(torch, settings.dtype)
        m, k, n = settings.shape
        own = m // (settings.ranks or 2)
        device = world.device
        self.problem = Problem(m, k, n, dtype, dtype, seed=settings.seed, rank=0, device=device)
        self.a, self.whole = (torch.empty(r, k, dtype=dtype, device=device) for r in (own, m))
        self.away = torch.empty(m - own, k, dtype=dtype, pin_memory=device.type == "cuda")
        self.out = torch.empty(m, n, dtype=dtype, device=device)
        weight = self.problem.weight
        compute = partial(product_on(device), self.whole, weight, self.out)
        communicate = partial(self.whole[own:].copy_, self.away, non_blocking=True)
        tensors = {"a": self.a, "away": self.away, "out": self.out}
        shards = own, m - own
        program = engine(world).program(matmul_from_host(_PIECES), tensors, shards)
        product = partial(self.problem.check_product, self.out)

        sequential = partial(one_by_one, communicate, compute)
        self.views = {
            "compute": View(compute, (self.out,), product),
            "communicate": View(communicate, (self.whole[own:],), self._check_moved),
            "sequential": View(sequential, (self.whole[own:], self.out), product),
            "pipelined": View(
                partial(program.run, tensors, shards, {"out": weight}), (self.out,), product
            ),
        }

    def renew(self, run: int) -> None:
        rows = self.problem.rows(run)
        self.whole.copy_(rows)
        self.a.copy_(rows[: len(self.a)])
        self.away.copy_(rows[len(self.a) :])

    def _check_moved(self, run: int) -> Check:
        return self.problem.check_rows(self.whole, run)


def from_host(settings: AllGatherMatmul) -> dict[str, Any]:
    """The views of `RowsFromHost`, with peers' rows in pinned host memory.

    ``pipelined`` multiplies by torch, one product for each transfer; ``pipelined triton`` by one
    persistent kernel.
    """
    found = {}
    for products in ("torch", "triton"):
        with sums_in_float32(), local_world(1, "cuda", products=products) as local:
            found[products] = slowest(local.run(_measured, settings))
    (times, checks), (by_kernel, checks_of_kernel) = found["torch"], found["triton"]
    every = times | {"pipelined triton": by_kernel["pipelined"]}
    return result_of(settings, every, [*checks.values(), *checks_of_kernel.values()])


def _measured(
    settings: AllGatherMatmul,
    times: Timer = milliseconds,
) -> dict[str, Measured]:
    subject = RowsFromHost(settings, init())
    return measured(subject, settings.warmup, settings.iterations, times=times)


def result_of(
    settings: AllGatherMatmul, times: dict[str, list[float]], checks: Sequence[Check]
) -> dict[str, Any]:
    """The result as a JSON object."""
    ranks = settings.ranks or 2
    m, k, n = settings.shape
    statistics = {name: summarize([1e-3 * time for time in own]) for name, own in times.items()}
    medians = [statistics[name].median for name in figures.VIEWS]
    worst = checks[0]
    for check in checks[1:]:
        worst = worst.worse(check)
    return {
        "benchmark": "all-gather-matmul",
        "device": "cuda",
        "peers": "host",
        "ranks": ranks,
        "shape": asdict(settings.shape),
        "dtype": settings.dtype,
        "algorithm": "pull",
        "chunk_rows": -(-(m - m // ranks) // _PIECES),
        "link": None,
        "times_ms": times_ms(statistics),
        "baselines_ms": {},
        **figures.of_overlap(*medians),
        "limit_ratio_triton": figures.limit_ratio(
            medians[0], medians[1], statistics["pipelined triton"].median
        ),
        "tflops": figures.tflops(m, k, n, medians[-1]),
        "verified": not worst.wrong,
        "max_error": worst.max_error,
        "error_bound": worst.bound,
        "options": options_of(settings),
        "date": utc(),
        "machine": hardware(),
        "versions": versions("cuda"),
    }


def print_times(result: dict[str, Any], console: Console) -> None:
    """Print the times and figures of a product with rows in the host's memory."""
    shape = "x".join(map(str, result["shape"].values()))
    console.print(f"all-gather-matmul, peers in host memory: {shape}, {result['dtype']}")
    table = tables.table(("", *tables.TIMES.values()))
    for name, times in result["times_ms"].items():
        table.add_row(name, *tables.milliseconds(times))
    tables.print_wide(console, table)
    ratios = (
        f"speedup {result['speedup']:.2f}, limit ratio {result['limit_ratio']:.3f} (by triton "
        f"{result['limit_ratio_triton']:.3f}), overlap {result['overlap_percent']:.0f} %, "
        f"{result['tflops']:.1f} TFLOP/s"
    )
    tables.print_notes(
        console,
        ratios,
        tables.verdict(result, "before and after timing, on new inputs and poisoned outputs."),
    )
