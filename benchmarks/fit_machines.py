"""Fit the machine profiles to published results, and print the errors of the simulator.

    python benchmarks/fit_machines.py            # prints the tables of errors
    python benchmarks/fit_machines.py --write    # also writes the profiles, and the tables in docs

Each `System` selects the published rows to which a machine's figures are fitted, and the plan that
models each row. The fit minimises the sum of squared logarithms of predicted / published by a
pattern search over the logarithms of the parameters. *Leave one out* fits to all rows but one and
predicts that one, for every row.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.ablation import STEPS, split_arrivals
from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Plan, Region
from weft.plan.binding import bind, split
from weft.predict.machine import Link, Machine, Product
from weft.predict.simulator import Rows, seconds
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import all_gather_matmul
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.workload import Request

HERE = Path(__file__).parent
PROFILES = HERE.parent / "weft" / "predict" / "machines"
PAGE = HERE.parent / "docs" / "prediction.md"
BEGIN, END = "<!-- tables of fit_machines.py -->", "<!-- end of tables -->"

Parameters = dict[str, float]


class Point(NamedTuple):
    """A published figure in seconds, the plan that models it, and the variant of the machine on
    which it was measured.
    """

    label: str
    published: float
    plan: Plan
    rows: dict[str, Rows]
    variant: str = ""


@dataclass(frozen=True)
class System:
    """The initial parameters of a machine, the function that makes the machine (or a variant of it)
    from them, and the points of the fit.

    `of` is the profile to which the variants belong, by default the machine's own.
    """

    title: str
    begin: Parameters
    machine: Callable[[Parameters, str], Machine]
    points: Sequence[Point]
    variants: tuple[str, ...] = ()
    of: str = ""


ASSUMED = "memory_gbs and reduce_gbs are assumed"
ASCEND: dict[str, Any] = {"memory_gbs": 700, "reduce_gbs": 1400}


def published(system: str) -> list[dict[str, str]]:
    """The rows of a system in the published table."""
    with (HERE / "published_results.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["system"] == system]


def predict(system: System, parameters: Parameters, point: Point) -> float:
    """Predicted seconds."""
    return seconds(point.plan, system.machine(parameters, point.variant), point.rows)


def fit(system: System, points: Sequence[Point], begin: Parameters) -> Parameters:
    """The parameters with the least squared logarithmic error."""

    def error(parameters: Parameters) -> float:
        return sum(
            math.log(predict(system, parameters, point) / point.published) ** 2 for point in points
        )

    best, least, step = dict(begin), error(begin), 0.2
    while step > 0.01:
        improved = False
        for name in best:
            for factor in (math.exp(step), math.exp(-step)):
                tried = best | {name: best[name] * factor}
                if name.endswith("slowdown") and tried[name] < 1:
                    tried[name] = 1.0
                if (found := error(tried)) < least * (1 - 1e-6):
                    best, least, improved = tried, found, True
                    break
        step = step if improved else step / 2
    return best


def streaming() -> System:
    """System 1: full-mesh push on all links at once, 64 chunks per source, consumed peer after
    peer.
    """
    points = []
    for row in published("allgather_gemm"):
        ranks, m, k, n = _numbers(row)
        request = Request(ranks, 64, "push", links=ranks - 1)
        plan = bind(split_arrivals(all_gather_matmul(request).part([0])), split(m, ranks))
        points.append(
            Point(f"{ranks} ranks, {m}x{k}x{n}", float(row["value"]) / 1e3, plan, _gathering(k, n))
        )

    def machine(p: Parameters, _: str) -> Machine:
        return Machine(
            "ascend-910b1",
            {"float16": Product(p["tflops"], fixed_us=p["fixed_us"])},
            (Link(p["gbs"]),),
            **ASCEND,
            communicate_slowdown=p["communicate_slowdown"],
            lanes=15,
            source="published times of a chunk-streaming all-gather + matmul on Ascend 910B1. "
            f"{ASSUMED}",
        )

    begin = {"tflops": 350.0, "gbs": 16.0, "fixed_us": 1.0, "communicate_slowdown": 1.5}
    return System("System 1: all-gather + matmul, chunk streaming", begin, machine, points)


def steps() -> System:
    """System 2: the cascade and three improvements of it, four pieces per source."""
    rows = published("all_gather_matmul_v2")
    ranks, m, k, n = _numbers(rows[0])
    cascade, overlapped = (
        all_gather_matmul(Request(ranks, 4, algorithm, links=ranks - 1)).part([0])
        for algorithm in ("sequential", "push")
    )
    plans = [cascade, *(without(overlapped) for without in STEPS.values())]
    points = []
    for row, improved in zip(rows, plans, strict=True):
        plan = bind(improved, split(m, ranks))
        points.append(Point(row["variant"], float(row["value"]) / 1e6, plan, _gathering(k, n)))

    def machine(p: Parameters, _: str) -> Machine:
        return Machine(
            "ascend-950",
            {"float16": Product(p["tflops"]), "bfloat16": Product(p["tflops"])},
            (Link(p["gbs"]),),
            **ASCEND,
            compute_slowdown=p["compute_slowdown"],
            lanes=15,
            source=f"published times of all-gather + matmul in four steps on Ascend 950. {ASSUMED}",
        )

    begin = {"tflops": 120.0, "gbs": 8.0, "compute_slowdown": 1.2}
    return System("System 2: all-gather + matmul in four steps", begin, machine, points)


def transfers() -> System:
    """System 3: one transfer between two ranks, staged or by the DMA engine."""
    points = []
    for row in published("tget_bandwidth"):
        size, variant = (
            int(row["bytes"]),
            {"TGET": "get", "TGET_ASYNC": "get-async"}[row["variant"]],
        )
        lanes = ({"compute": (Copy(Region(1, "a", 0, 1), Region(0, "out", 0, 1)),)}, {})
        plan = Plan(
            "get", variant, {"a": Buffer("input", (1, 1)), "out": Buffer("output", (1, 1))}, lanes
        )
        rows = dict.fromkeys(("a", "out"), Rows(size // 4, "float32"))
        points.append(
            Point(f"{variant}, {size} B", size / (float(row["value"]) * 1e9), plan, rows, variant)
        )

    def machine(p: Parameters, variant: str) -> Machine:
        link = Link(p[f"{variant}.gbs"], p[f"{variant}.latency_us"])
        source = "published bandwidth of get on Ascend A2/A3; the rest is that of ascend-910b1"
        return Machine("ascend-910b1", {}, (link,), **ASCEND, source=source)

    begin = {
        "get.gbs": 4.0,
        "get.latency_us": 20.0,
        "get-async.gbs": 13.0,
        "get-async.latency_us": 20.0,
    }
    return System("System 3: get and asynchronous get", begin, machine, points, of="ascend-910b1")


def streams() -> System:
    """System 4: a product concurrent with an all-gather, and matmul + all-reduce in four pieces."""
    points = []
    for row in published("bench_overlapped_matmul_allgather"):
        ranks, size, n = int(row["ranks"]), int(row["m"]), int(row["bytes"]) // 2 // 1024
        product = matmul(Region(0, "x", 0, size), Region(0, "y", 0, size))
        gather = bind(all_gather(ranks, 1, "push", symmetric_gathered=True).part([0]), [n] * ranks)
        communicate = gather.lanes[0]["compute"]
        lanes = (
            {"compute": (*communicate, product)}
            if row["variant"] == "sequential"
            else {"compute": (product,), "comm": communicate}
        )
        plan = replace(gather, lanes=(lanes, *gather.lanes[1:]))
        rows = dict.fromkeys(("a", "gathered"), Rows(1024, "float16")) | dict.fromkeys(
            ("x", "y"), Rows(size, "float16")
        )
        variant = "nccl" if row["variant"] == "overlapped" else ""
        points.append(
            Point(
                f"matmul and all-gather, {row['variant']}",
                float(row["value"]) / 1e3,
                plan,
                rows,
                variant,
            )
        )
    for row in published("nvfuser_overlap")[1:]:  # no plan models many streams
        ranks, m, k, n = _numbers(row)
        plan = bind(
            matmul_all_reduce(Request(ranks, 4, "one_shot", remote_reads=False)), split(m, ranks)
        )
        variant = "nccl" if row["variant"] == "two streams" else ""
        rows = {"a": Rows(k // ranks, "bfloat16")} | dict.fromkeys(
            ("partial", "inbox", "out"), Rows(n, "bfloat16")
        )
        points.append(
            Point(
                f"matmul + all-reduce, {row['variant']}",
                float(row["value"]) / 1e3,
                plan,
                rows,
                variant,
            )
        )

    def machine(p: Parameters, variant: str) -> Machine:
        return Machine(
            "h100-nvlink-8",
            {dtype: Product(p["tflops"]) for dtype in ("float16", "bfloat16")},
            (Link(p["gbs"], reach=8, shared=True), Link(50, latency_us=5, shared=True)),
            memory_gbs=1300,
            reduce_gbs=2600,
            compute_slowdown=p[
                "nccl.compute_slowdown" if variant == "nccl" else "compute_slowdown"
            ],
            ranks=8,
            source="published times of a product concurrent with an all-gather, and of matmul "
            "+ all-reduce, on H100 with NVLink; nccl: "
            "communication by kernels, otherwise by copy engines over symmetric memory. "
            f"{ASSUMED}, as is the link between groups of 8: 400 Gbit/s for each rank",
        )

    begin = {"tflops": 700.0, "gbs": 350.0, "compute_slowdown": 1.1, "nccl.compute_slowdown": 1.3}
    return System("System 4: streams and symmetric memory", begin, machine, points, ("nccl",))


def tiles() -> System:
    """System 5: three implementations of a flat all-gather; the published GB/s are the bytes that a
    rank receives per second.
    """
    points = []
    for row in published("iris_all_gather"):
        ranks, size, variant = int(row["ranks"]), int(row["bytes"]), row["variant"].lower()
        plan = all_gather(ranks, 1, "push", symmetric_gathered=True, links=ranks - 1).part([0])
        rows = dict.fromkeys(("a", "gathered"), Rows(size // 2, "float16"))
        points.append(
            Point(
                f"{variant}, {size >> 20} MiB",
                (ranks - 1) * size / (float(row["value"]) * 1e9),
                plan,
                rows,
                variant,
            )
        )

    def machine(p: Parameters, variant: str) -> Machine:
        variant = variant or "rccl"
        return Machine(
            "mi325x-8",
            {dtype: Product(650.0) for dtype in ("float16", "bfloat16")},
            (Link(p["gbs"]),),
            memory_gbs=2000,
            reduce_gbs=4000,
            launch_us=p[f"{variant}.launch_us"],
            lanes=7,
            ranks=8,
            source="published bandwidth of all-gathers on 8 MI325X by RCCL, Triton and Gluon. "
            f"{ASSUMED}, as are the rates of products: half of the vendor's figures; "
            "interference is unknown and left out",
        )

    begin = {
        "gbs": 42.0,
        "rccl.launch_us": 60.0,
        "triton.launch_us": 100.0,
        "gluon.launch_us": 80.0,
    }
    return System("System 5: flat all-gather", begin, machine, points, ("triton", "gluon"))


def _numbers(row: dict[str, str]) -> list[int]:
    """Ranks, M, K and N."""
    return [int(row[name]) for name in ("ranks", "m", "k", "n")]


def _gathering(k: int, n: int) -> dict[str, Rows]:
    return dict.fromkeys(("a", "staged", "inbox"), Rows(k, "float16")) | {"out": Rows(n, "float32")}


class Errors(NamedTuple):
    """The errors of the predictions of a system's points, in percent: fitted to all points, and to
    all but the predicted one.
    """

    system: System
    parameters: Parameters
    fitted: list[float]
    left_out: list[float]


def measure(system: System) -> Errors:
    """Fit a system, with and without each of its points."""
    best = fit(system, system.points, system.begin)
    fitted, left_out = [], []
    for point in system.points:
        others = [other for other in system.points if other is not point]
        fitted.append(100 * (predict(system, best, point) / point.published - 1))
        left_out.append(
            100 * (predict(system, fit(system, others, system.begin), point) / point.published - 1)
        )
    return Errors(system, best, fitted, left_out)


def table(errors: Errors) -> str:
    """The errors as a Markdown table."""
    system, parameters = (
        errors.system,
        ", ".join(f"{name} {value:.4g}" for name, value in errors.parameters.items()),
    )
    lines = [
        f"**{system.title}**: {len(errors.parameters)} parameters from {len(system.points)} "
        f"figures ({parameters})",
        "",
    ]
    lines += ["| | published | predicted | error | left out |", "|---|---|---|---|---|"]
    for point, error, left_out in zip(system.points, errors.fitted, errors.left_out, strict=True):
        times = (
            f"{1e3 * point.published:.3f} ms | {1e3 * point.published * (1 + error / 100):.3f} ms"
        )
        lines.append(f"| {point.label} | {times} | {error:+.1f} % | {left_out:+.1f} % |")
    means = " | ".join(
        f"**{sum(map(abs, values)) / len(values):.1f} %**"
        for values in (errors.fitted, errors.left_out)
    )
    return "\n".join([*lines, f"| mean of absolute errors | | | {means} |"])


def profile_of(system: System) -> str:
    """The name of the profile that a system's figures go to."""
    return system.of or system.machine(system.begin, "").name


def profile(all_errors: Sequence[Errors], name: str) -> str:
    """The TOML profile of a machine, with the residuals of the fit."""
    own = [errors for errors in all_errors if profile_of(errors.system) == name]
    lines = [
        "# Written by benchmarks/fit_machines.py --write; see docs/prediction.md and "
        "weft/predict/machine.py."
    ]
    residuals: dict[str, float] = {}
    machine, variants = None, []
    for system, parameters, fitted, _ in own:
        residuals |= {
            point.label: round(error, 1) for point, error in zip(system.points, fitted, strict=True)
        }
        if not system.of:
            machine = system.machine(parameters, "")
        of_system = (
            dict.fromkeys(point.variant for point in system.points)
            if system.of
            else system.variants
        )
        variants += [(variant, system.machine(parameters, variant)) for variant in of_system]
    assert machine is not None
    plain = _entries(machine, "residuals", "products")
    lines += [f"{key} = {value}" for key, value in plain.items()]
    for name, product in machine.products.items():
        lines += [
            "",
            f"[products.{name}]",
            *(f"{key} = {_toml(value)}" for key, value in asdict(product).items()),
        ]
    for variant, other in variants:
        changed = {
            key: value
            for key, value in _entries(other, "residuals", "products", "name").items()
            if plain.get(key) != value
        }
        lines += [
            "",
            f"[variants.{variant}]",
            *(f"{key} = {value}" for key, value in changed.items()),
        ]
    lines += ["", "[residuals]  # percent by which predictions miss the published figures"]
    return (
        "\n".join([*lines, *(f'"{label}" = {error}' for label, error in residuals.items())]) + "\n"
    )


def _entries(machine: Machine, *but: str) -> dict[str, str]:
    """A machine's fields as TOML, without fields that have their default."""
    default = Machine("", {}, (), 0, 0)
    values = {
        key: value
        for key, value in vars(machine).items()
        if key not in but and value != getattr(default, key)
    }
    return {key: _toml(value) for key, value in values.items()}


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.5g}"
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case Link():
            fields = {key: field for key, field in asdict(value).items() if field}
            return (
                "{ " + ", ".join(f"{key} = {_toml(field)}" for key, field in fields.items()) + " }"
            )
        case _:
            return json.dumps(value)


def main() -> None:
    """Print the tables; with --write also write them, and the profiles."""
    all_errors = []
    for make in (streaming, steps, transfers, streams, tiles):
        all_errors.append(errors := measure(make()))
        print(table(errors), end="\n\n", flush=True)
    if "--write" in sys.argv[1:]:
        for name in dict.fromkeys(profile_of(errors.system) for errors in all_errors):
            (PROFILES / f"{name}.toml").write_text(profile(all_errors, name))
        page = PAGE.read_text()
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text("\n\n".join([before, *map(table, all_errors), after]))


if __name__ == "__main__":
    main()
