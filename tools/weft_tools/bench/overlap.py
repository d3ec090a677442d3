"""The benchmark of overlap: a product and an all-gather that are independent of each other.

They are measured alone, one after the other, and concurrently: `weft.all_gather_async` during the
local product. The baseline is the same with gloo and ``torch.mm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from weft.cli.values import Shape, parse_sizes
from weft.kernels.packed import pack
from weft.kernels.weights import Weight
from weft.measure.timing import Statistics, Stopwatch, stopwatch_of
from weft.world import World
from weft_tools.bench import collectives, nccl, tables
from weft_tools.bench.baselines import collective, group_of
from weft_tools.bench.between_ranks import session
from weft_tools.bench.gathers import Gather, gathers_of
from weft_tools.bench.harness import environment, link_of, times_ms
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.plots import size_name
from weft_tools.bench.settings.overlap import OverlapSettings
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.torch_products import sums_in_float32
from weft_tools.bench.verification import Check, Problem
from weft_tools.bench.views import View, Views, one_by_one, product_on, timed
from weft_tools.predict import figures

_VIEWS = "compute", "communicate", "sequential", "overlapped"


class Overlap(Views):
    """One rank's tensors, and the views on them by name.

    On a CPU the weight is packed. Of several gathers the first has the plain names.
    """

    def __init__(self, settings: OverlapSettings, world: World) -> None:
        dtype = getattr(torch, settings.dtype)
        m, k, n = settings.shape
        device = world.device
        on_gpu = world.device.type == "cuda"
        self.world = world
        self.problem = Problem(
            m, k, n, dtype, dtype, seed=settings.seed, rank=world.rank, device=device
        )
        self.x, self.out = (torch.empty(m, c, dtype=dtype, device=device) for c in (k, n))
        weight = self.problem.weight
        self.weight: Weight = weight if on_gpu else pack(weight)
        sweep = SweepSettings("all_gather", dtype=settings.dtype, seed=settings.seed)
        count = collectives.count_of(parse_sizes(settings.size)[0], sweep, world.ranks)
        self.data = collectives.Data(world, sweep, count)
        self.a = world.empty(count, dtype=dtype)
        product = partial(product_on(device), self.x, self.weight, self.out)
        self.check_product = partial(self.problem.check_product, self.out)
        self.gathers = gathers_of(settings, world, self.a)
        self.views = {"compute": View(product, (self.out,), self.check_product)}
        for gather in self.gathers:
            suffix = self.suffix(gather)
            check = partial(self._check_gathered, gather.gathered)
            both = partial(self._both, gather.gathered)
            self.views |= {
                f"communicate{suffix}": View(gather.gather, (gather.gathered,), check),
                f"sequential{suffix}": both(partial(one_by_one, gather.gather, product)),
                f"overlapped{suffix}": both(partial(_concurrently, product, gather.begin)),
            }
        mm = partial(torch.mm, self.x, weight, out=self.out)
        first = self.gathers[0].gathered
        for name in settings.baselines:
            theirs = partial(collective, "all_gather", self.a, first, group=group_of(name))
            self.views[f"{name} sequential"] = self._both(first, partial(one_by_one, theirs(), mm))
            self.views[f"{name} overlapped"] = self._both(
                first, partial(_concurrently, mm, theirs(background=True))
            )

    def suffix(self, gather: Gather) -> str:
        """The suffix of the names of a gather's views."""
        return "" if gather is self.gathers[0] else f" ({gather.name})"

    def renew(self, run: int) -> None:
        self.x.copy_(self.problem.rows(run))
        for source in (self.a, *(gather.source for gather in self.gathers)):
            source.copy_(self.data.own(run, len(self.a)))

    def _both(self, gathered: Tensor, call: Callable[[], object]) -> View:
        return View(
            call,
            (self.out, gathered),
            lambda run: self.check_product(run).plus(self._check_gathered(gathered, run).wrong),
        )

    def _check_gathered(self, gathered: Tensor, run: int) -> Check:
        return Check(int((gathered != self.data.expected(run, len(self.a))).sum()))


@sums_in_float32()
def measure(settings: OverlapSettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object, times in milliseconds.

    `copies_ms` is the time of the all-gather without the emulated link, null if there is no such
    link.
    """
    [gathered] = parse_sizes(settings.size)
    with (
        session(settings.threads, **settings.place) as world,
        neighbours(world, settings.neighbours),
    ):
        stopwatch = stopwatch_of(world)
        overlap = Overlap(settings, world)
        copies = _emulate(settings, world, overlap, stopwatch)
        times, checks = timed(overlap, stopwatch, settings)
        compared = tuple(f"{name} " for name in settings.baselines) or ("none ",)
        baselines = {name: time for name, time in times.items() if name.startswith(compared)}
        own = {name: time for name, time in times.items() if name not in baselines}
        return {
            "benchmark": "overlap",
            "ranks": world.ranks,
            "hosts": len(set(world.hosts)),
            "shape": asdict(settings.shape),
            "gather_bytes": gathered,
            "neighbours": settings.neighbours,
            "dtype": settings.dtype,
            "algorithm": f"all-gather of {size_name(gathered)} per rank",
            "gathers": [_figures(overlap, gather, times) for gather in overlap.gathers],
            "link": link_of(world),
            "copies_ms": copies,
            "times_ms": times_ms(own),
            "baselines_ms": times_ms(baselines),
            **figures.of_overlap(*(own[name].median for name in _VIEWS)),
            "wrong": {name: check.wrong for name, check in checks.items()},
            "verified": not any(check.wrong for check in checks.values()),
            **environment(world, settings),
        }


def _figures(overlap: Overlap, gather: Gather, times: Mapping[str, Statistics]) -> dict[str, Any]:
    """The entry of a result for a gather."""
    suffix = overlap.suffix(gather)
    medians = [times[f"{name}{'' if name == 'compute' else suffix}"].median for name in _VIEWS]
    symmetric = overlap.world.is_symmetric(gather.gathered)
    about = {
        "gather": gather.name,
        "comm_sms": gather.comm_sms,
        "channels": nccl.channels() if gather.name == "nccl-zero-cta" else None,
        "symmetric_out": symmetric,
    }
    return about | figures.of_overlap(*medians)


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the times, the figures, and notes on how to read them."""
    link = result["link"]
    machine = result["machine"]
    size = f"{Shape(**result['shape'])} {result['dtype']}"
    first = result.get("gathers", [{}])[0]
    by = f" by {first['gather']}" if first and result["options"]["gather"] else ""
    out = ", into ordinary memory" if first and not first["symmetric_out"] else ""
    where = f"{by}{out}"
    where += f", EMULATED LINK of {link['gbps']:g} Gbit/s" if link else ""
    console.print(
        Text(
            f"overlap: {result['ranks']} ranks, {size} and an {result['algorithm']}{where}"
            f"{tables.loaded(result)}",
            "bold",
        ),
        soft_wrap=True,
    )
    table = tables.table(("", *tables.TIMES.values()))
    for name, times in (result["times_ms"] | result["baselines_ms"]).items():
        table.add_row(
            tables.named(name, result["wrong"][name]),
            *tables.milliseconds(times),
        )
    console.print(table)
    gathers = result.get("gathers", [])
    for gather in gathers if len(gathers) > 1 else [result]:
        console.print(_sentence(gather), soft_wrap=True)
    if machine["cores"] < 2 * result["ranks"]:
        console.print(
            f"{result['ranks']} ranks that compute have {machine['cores']} cores: copies take "
            "their time from products, and can be "
            "hidden only where a core is free, or behind a link."
            + (
                f" Those that the emulated link still makes take {result['copies_ms']:.3f} ms of a "
                "core."
                if link
                else ""
            ),
            style="yellow",
            soft_wrap=True,
        )
    tables.print_notes(
        console,
        *tables.checking(result),
        *tables.noisy(result),
        *tables.cut_short(result),
        tables.verdict(
            result, "on every rank, before and after timing, on new inputs and poisoned outputs."
        ),
        *tables.disturbed(result),
        tables.machine(result),
    )


def _sentence(of: dict[str, Any]) -> str:
    """The figures of a gather."""
    figures = (
        f"speedup {of['speedup']:.2f}x (sequential / overlapped); "
        f"{of['overlap_percent']:.0f} % of communicate hidden; "
        f"limit ratio {of['limit_ratio']:.2f} (overlapped / max(compute, communicate); 1 is the "
        "limit)"
    )
    if "gather" not in of:
        return figures
    return f"{of['gather']}: {figures}"


def _concurrently(product: Callable[[], object], begin: Callable[[], Any]) -> None:
    work = begin()
    product()
    work.wait()


def _emulate(
    settings: OverlapSettings, world: World, overlap: Overlap, stopwatch: Stopwatch
) -> float | None:
    """Emulate the requested link; the milliseconds of the all-gather without it."""
    if settings.link_gbps is None:
        return None
    alone = stopwatch.interleave(
        {name: overlap.views[name].call for name in ("compute", "communicate")}, 2, 5
    )
    received = 8 * (world.ranks - 1) * overlap.a.numel() * overlap.a.itemsize
    balanced = f"{received / (alone['compute'].median * 1e-3) / 1e9:.4g}"
    world.emulate_link(float(balanced if settings.link_gbps == "auto" else settings.link_gbps))
    return alone["communicate"].median
