"""The five published systems: their figures, the plans that model them, and the machines to fit.

A `System` selects the published rows to which a machine's figures are fitted, and those that only
test the fit. `fit_machines.py` fits them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.plan import Plan
from weft.plan.binding import bind, split
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import all_gather_matmul
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.workload import Request
from weft_tools.bench.ablation import STEPS, split_arrivals
from weft_tools.predict import copies, overlap
from weft_tools.predict.machine import LinkRate, Machine, ProductRate
from weft_tools.predict.simulator import Rows, seconds

TABLE = Path(__file__).parent / "published_results.csv"

Parameters = dict[str, float]


class Point(NamedTuple):
    """A published figure, in seconds or in cycles of the device, the plan that models it, and the
    variant of the machine on which it was measured.
    """

    label: str
    published: float
    plan: Plan
    rows: dict[str, Rows]
    variant: str = ""
    cycles: bool = False

    def predicted(self, machine: Machine) -> float:
        """The prediction of the figure, in its unit."""
        took = seconds(self.plan, machine, self.rows)
        return machine.cycles(took) or 0.0 if self.cycles else took


@dataclass(frozen=True)
class System:
    """The initial parameters of a machine, the function that makes the machine (or a variant of it)
    from them, and the points of the fit; nothing is fitted to those of `tests`.

    `of` is the profile to which the variants belong, by default the machine's own. `shipped`:
    whether there is a profile of it.
    """

    title: str
    begin: Parameters
    machine: Callable[[Parameters, str], Machine]
    points: Sequence[Point]
    variants: tuple[str, ...] = ()
    of: str = ""
    tests: Sequence[Point] = ()
    shipped: bool = True


ASSUMED = "memory_gbs and reduce_gbs are assumed"
ASCEND: dict[str, Any] = {
    "memory_gbs": 700,
    "reduce_gbs": 1400,
    "notify_us": 1.02,
    "notify_source": "at most the time in which the published get of Ascend A2/A3 reads and stores "
    "4 KiB of a peer: 50.85 ticks, taken to be of 20 ns",
}
COUNTER_MHZ = 50.0
"""Of the counter of an Ascend A2/A3: the 24 figures of system 3 fit 49."""


def published(system: str) -> list[dict[str, str]]:
    """The rows of a system in the published table."""
    with TABLE.open() as file:
        return [row for row in csv.DictReader(file) if row["system"] == system]


def streaming() -> System:
    """System 1: full-mesh push on all links at once, 64 chunks per source, consumed peer after
    peer.
    """
    points = []
    for row in published("allgather_gemm"):
        ranks, m, k, n = _numbers(row)
        request = Request(ranks, 64, "push", links=ranks - 1)
        plan = bind(split_arrivals(all_gather_matmul(request).part([0])), split(m, ranks))
        rows = _gathering(k, n, "float32")
        points.append(Point(f"{ranks} ranks, {m}x{k}x{n}", float(row["value"]) / 1e3, plan, rows))

    def machine(p: Parameters, _: str) -> Machine:
        return Machine(
            "ascend-910b1",
            {"float16": ProductRate(p["tflops"], fixed_us=p["fixed_us"])},
            (LinkRate(p["gbs"]),),
            **ASCEND,
            communicate_slowdown=p["communicate_slowdown"],
            lanes=15,
            source="published times of a chunk-streaming all-gather + matmul on Ascend 910B1. "
            f"{ASSUMED}",
        )

    begin = {"tflops": 350.0, "gbs": 16.0, "fixed_us": 1.0, "communicate_slowdown": 1.5}
    return System("System 1: all-gather + matmul, chunk streaming", begin, machine, points)


def steps(rows_of_each: bool = True) -> System:
    """System 2: the cascade and three improvements of it, four pieces per source.

    The published 1024 rows are read as those of each rank (`rows_of_each`), as the operator defines
    its input, or as those of all ranks.
    """
    rows = published("all_gather_matmul_v2")
    ranks, m, k, n = _numbers(rows[0])
    total = m * ranks if rows_of_each else m
    cascade, overlapped = (
        all_gather_matmul(Request(ranks, 4, algorithm, links=ranks - 1)).part([0])
        for algorithm in ("sequential", "push")
    )
    plans = [cascade, *(without(overlapped) for without in STEPS.values())]
    points = []
    for row, improved in zip(rows, plans, strict=True):
        plan = bind(improved, split(total, ranks))
        columns = _gathering(k, n, row["dtype"])
        points.append(Point(row["variant"], float(row["value"]) / 1e6, plan, columns))

    def machine(p: Parameters, _: str) -> Machine:
        return Machine(
            "ascend-950",
            {"float16": ProductRate(p["tflops"]), "bfloat16": ProductRate(p["tflops"])},
            (LinkRate(p["gbs"]),),
            **{
                **ASCEND,
                "notify_source": f"assumed, that of Ascend A2/A3: {ASCEND['notify_source']}",
            },
            compute_slowdown=p["compute_slowdown"],
            lanes=15,
            source="published times of all-gather + matmul in four steps on Ascend 950, with 1024 "
            f"rows of each rank. {ASSUMED}",
        )

    begin = {"tflops": 0.12 * total, "gbs": 0.008 * total, "compute_slowdown": 1.2}
    of_whom = "each rank" if rows_of_each else "all ranks together"
    title = f"System 2: all-gather + matmul in four steps, {m} rows of {of_whom}"
    return System(title, begin, machine, points, shipped=rows_of_each)


def transfers() -> System:
    """System 3: one transfer between two ranks, staged or by the DMA engine: its bandwidth, seen by
    the host, and its cycles, counted by the device.
    """
    points = []
    for row in [*published("tget_bandwidth"), *published("tget_cycles")]:
        size = int(row["bytes"])
        variant = {"TGET": "get", "TGET_ASYNC": "get-async"}[row["variant"]]
        plan = copies.plan("get", 2, asynchronous=variant == "get-async")
        cycles = row["unit"] == "cycles"
        value = float(row["value"])
        points.append(
            Point(
                f"{variant}, {size} B{', cycles' if cycles else ''}",
                value if cycles else size / (value * 1e9),
                plan,
                copies.rows(size),
                variant,
                cycles,
            )
        )

    def machine(p: Parameters, variant: str) -> Machine:
        link = LinkRate(p[f"{variant}.gbs"], p.get(f"{variant}.latency_us", 0.0))
        return Machine(
            "ascend-910b1",
            {},
            (link,),
            **ASCEND,
            launch_us=p["launch_us"],
            counter_mhz=COUNTER_MHZ,
            source="published bandwidth and cycles of get on Ascend A2/A3, whose counter is taken "
            "to have 50 MHz; the rest is that of ascend-910b1",
        )

    begin = {
        "launch_us": 20.0,
        "get.gbs": 4.0,
        "get-async.gbs": 13.0,
        "get-async.latency_us": 2.0,
    }
    return System("System 3: get and asynchronous get", begin, machine, points, of="ascend-910b1")


def streams() -> System:
    """System 4: a product concurrent with an all-gather, and matmul + all-reduce in four pieces.

    With a stream for each piece, kernels that communicate get no cores before the last product has
    begun: that figure is tested as if nothing overlapped.
    """

    def machine(p: Parameters, variant: str) -> Machine:
        by_kernel = variant == overlap.KERNEL
        return Machine(
            "h100-nvlink-8",
            {dtype: ProductRate(p["tflops"]) for dtype in ("float16", "bfloat16")},
            (LinkRate(p["gbs"], reach=8, shared=True), LinkRate(50, latency_us=5, shared=True)),
            memory_gbs=1300,
            reduce_gbs=2600,
            notify_us=0.6,
            notify_source="the latency of a step over NVLink in NCCL's model of its protocol LL, "
            "which sends flags with the data (src/graph/tuning.cc: hwLat)",
            compute_slowdown=p["nccl.compute_slowdown" if by_kernel else "compute_slowdown"],
            ranks=8,
            source="published times of a product concurrent with an all-gather, and of matmul "
            "+ all-reduce, on H100 with NVLink; nccl: "
            "communication by kernels, otherwise by copy engines over symmetric memory. "
            f"{ASSUMED}, as is the link between groups of 8: 400 Gbit/s for each rank",
        )

    begin = {"tflops": 700.0, "gbs": 350.0, "compute_slowdown": 1.1, "nccl.compute_slowdown": 1.3}
    points, tests = [], []
    for row in published("bench_overlapped_matmul_allgather"):
        case = overlap.Beside(*_numbers(row), row["dtype"], int(row["bytes"]))
        part = "sequential" if row["variant"] == "sequential" else "overlapped"
        plan = overlap.plan(case, part, machine(begin, ""))
        label = f"matmul and all-gather, {row['variant']}"
        variant = ""
        if row["variant"] == "overlapped":
            variant = overlap.KERNEL
        points.append(Point(label, float(row["value"]) / 1e3, plan, case.rows, variant))
    for row in published("nvfuser_overlap"):
        ranks, m, k, n = _numbers(row)
        many = row["variant"] == "many streams"
        request = Request(ranks, 4, "sequential" if many else "one_shot", remote_reads=False)
        plan = bind(matmul_all_reduce(request), split(m, ranks))
        rows = {"a": Rows(k // ranks, "bfloat16")} | dict.fromkeys(
            ("partial", "inbox", "out"), Rows(n, "bfloat16")
        )
        label = f"matmul + all-reduce, {row['variant']}"
        variant = "" if "symmetric" in row["variant"] else overlap.KERNEL
        point = Point(label, float(row["value"]) / 1e3, plan, rows, variant)
        (tests if many else points).append(point)
    title = "System 4: streams and symmetric memory"
    return System(title, begin, machine, points, (overlap.KERNEL,), tests=tests)


def tiles() -> System:
    """System 5: three implementations of a flat all-gather; published are the bytes that a rank
    receives, in units of 1024³, per second: ``(ranks - 1) · bytes / time``.

    Those of another machine of this architecture, of 8192 x 8192 numbers of each rank, test the
    fit.
    """

    def machine(p: Parameters, variant: str) -> Machine:
        variant = variant or "rccl"
        return Machine(
            "mi325x-8",
            {dtype: ProductRate(650.0) for dtype in ("float16", "bfloat16")},
            (LinkRate(p["gbs"]),),
            memory_gbs=2000,
            reduce_gbs=4000,
            notify_us=0.8,
            notify_source="the latency of a step over xGMI in RCCL's model of its protocol LL, "
            "which sends flags with the data (src/graph/tuning.cc: hwLat)",
            launch_us=p[f"{variant}.launch_us"],
            lanes=7,
            ranks=8,
            source="published bandwidth of all-gathers on 8 MI325X by RCCL, Triton and Gluon. "
            f"{ASSUMED}, as are the rates of products: half of the vendor's figures; "
            "interference is unknown and left out",
        )

    def point(row: dict[str, str], label: str, size: int, variant: str) -> Point:
        ranks = int(row["ranks"])
        plan = all_gather(ranks, 1, "push", symmetric_gathered=True, links=ranks - 1).part([0])
        rows = dict.fromkeys(("a", "gathered"), Rows(size // 2, "float16"))
        took = (ranks - 1) * size / (float(row["value"]) * 1024**3)
        return Point(label, took, bind(plan, [1] * ranks), rows, variant)

    points = []
    tests = []
    for row in published("iris_all_gather"):
        size = int(row["bytes"])
        variant = row["variant"].lower()
        points.append(point(row, f"{variant}, {size >> 20} MiB", size, variant))
    for row in published("iris_all_gather_mi308x"):
        variant = row["variant"].lower()
        label = f"{row['hardware']}, {row['cus']} CUs, {variant}, {row['value']} GiB/s"
        tests.append(point(row, label, int(row["bytes"]), variant))
    begin = {
        "gbs": 42.0,
        "rccl.launch_us": 60.0,
        "triton.launch_us": 100.0,
        "gluon.launch_us": 80.0,
    }
    variants = ("triton", "gluon")
    return System("System 5: flat all-gather", begin, machine, points, variants, tests=tests)


SYSTEMS = (streaming, steps, partial(steps, rows_of_each=False), transfers, streams, tiles)


def _numbers(row: dict[str, str]) -> list[int]:
    """Ranks, M, K and N."""
    return [int(row[name]) for name in ("ranks", "m", "k", "n")]


def _gathering(k: int, n: int, out: str) -> dict[str, Rows]:
    return dict.fromkeys(("a", "staged", "inbox"), Rows(k, "float16")) | {"out": Rows(n, out)}
