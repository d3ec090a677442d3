"""The commands: the benchmark's figures, the detection of wrong results, and rejections. No test
asserts a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import beside_gloo, on_ranks
from typer.testing import CliRunner

import weft
from weft.cli import app, options
from weft.cli.values import Shape
from weft.doctor import checks as doctor
from weft.measure import timing
from weft.measure.timing import Statistics, Stopwatch, summarize
from weft.ops import stored
from weft.ops.call import Selection
from weft.plan.binding import bind
from weft.plan.trace import Span, Trace
from weft.schedules.operators import OPERATORS, PLANNERS
from weft.schedules.workload import Request, Variant, Workload
from weft_tools.bench import (
    fused,
    plots,
    report,
    saved,
    scaled,
    torch_products,
    verification,
    views,
)
from weft_tools.bench import subjects as case
from weft_tools.bench.alone import ALONE
from weft_tools.bench.baselines import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    products,
)
from weft_tools.bench.budget import Budget
from weft_tools.bench.fused import measure
from weft_tools.bench.limit import limit_of
from weft_tools.bench.result import Result
from weft_tools.bench.settings.fused import AllGatherMatmul, FusedSettings
from weft_tools.bench.systems import SYSTEMS
from weft_tools.bench.verification import RUNS, Check, Problem, Sums, compare
from weft_tools.bench.views import View, Views, verify
from weft_tools.predict import figures

SMALL = ["--shape", "64x64x32", "--warmup", "1", "--iterations", "2", "--threads", "1"]
TIMES = dict.fromkeys(("median", "mean", "min", "max", "p99"), float) | {"runs": int}
SCHEMA = {
    "benchmark": str,
    "ranks": int,
    "hosts": int,
    "neighbours": type(None),
    "shape": {"m": int, "k": int, "n": int},
    "dtype": str,
    "out_dtype": str,
    "algorithm": str,
    "chunk_rows": int,
    "order": str,
    "reason": str,
    "notes": list,
    "link": type(None),
    "times_ms": dict.fromkeys(
        ("compute", "compute in chunks", "communicate", "sequential", "pipelined"), TIMES
    ),
    "baselines_ms": dict.fromkeys(("gloo+torch.mm", "one process"), TIMES),
    "baselines_multiply_in": str,
    "slow_baselines_ms": dict,
    "streamed_ms": dict,
    "speedup": float,
    "overlap_percent": float,
    "limit_ratio": float,
    "tflops": float,
    "chunking_ms": float,
    "exposed_ms": float,
    "hidden_percent": dict,
    "wrong": dict,
    "verified": bool,
    "max_error": float,
    "error_bound": float,
    "options": dict,
    "date": str,
    "machine": {
        "cpu": str,
        "cores": int,
        "threads_per_rank": int,
        "memory_gib": float,
        "vector_instructions": str,
        "system": str,
        "stores": str,
        "waited_for_core_percent": float,
    },
    "versions": {"weft": str, "torch": str, "python": str},
}


def kinds(value, schema=SCHEMA):
    """The types of a JSON value, with the nesting of the schema."""
    return (
        {key: kinds(inner, schema.get(key)) for key, inner in value.items()}
        if isinstance(value, dict) and isinstance(schema, dict)
        else type(value)
    )


COMMAND = [
    sys.executable,
    "-m",
    "weft",
]


GLOO = SYSTEMS["gloo"].fused

ENVIRONMENT = {
    "ranks": 2,
    "hosts": 1,
    "link": None,
    "neighbours": None,
    "machine": {
        "cpu": "a processor",
        "cores": 2,
        "threads_per_rank": 1,
        "memory_gib": 8.0,
        "vector_instructions": "",
        "system": "",
        "stores": "adaptive",
        "waited_for_core_percent": 0.0,
    },
    "versions": {"weft": "0", "torch": "0", "python": "0"},
    "options": {"warmup": 3, "iterations": 20, "seed": 0},
    "date": "2026-11-25T12:00:00+00:00",
}


def result(**changes):
    """A result with made-up times."""
    names = ("compute", "compute in chunks", "communicate", "sequential", "pipelined")
    times = {
        name: Statistics(median, median, median - 1, median + 1, median + 1, 20)
        for name, median in zip(names, (10.0, 10.5, 8.0, 18.0, 12.0), strict=True)
    }
    made = {
        "settings": AllGatherMatmul(shape=Shape(1000, 1000, 500)),
        "choice": Selection(Variant("direct"), "as asked for"),
        "chunk_rows": 500,
        "times": times,
        "baselines": dict.fromkeys((GLOO, ALONE), Statistics(24.0, 25.0, 20.0, 30.0, 30.0, 20)),
        "ablation": {},
        "checks": {name: Check(0, 1e-6, 1e-3) for name in (*names, GLOO, ALONE)},
        "environment": ENVIRONMENT,
        "traces": [],
    }
    return Result(**(made | changes))


def text_of(result):
    from rich.console import Console

    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        report.print_tables(report.to_json(result), console)
    return captured.get()


def test_figures_follow_their_formulas():
    assert figures.speedup(sequential=18, pipelined=12) == 1.5
    assert figures.overlap_percent(compute=10, communicate=8, pipelined=12) == 75
    assert figures.overlap_percent(compute=10, communicate=8, pipelined=10) == 100
    assert figures.overlap_percent(compute=10, communicate=8, pipelined=30) == 0
    assert figures.limit_ratio(compute=10, communicate=8, pipelined=12) == 1.2
    assert figures.limit_ratio(compute=8, communicate=10, pipelined=12) == 1.2
    assert figures.tflops(1000, 1000, 500, milliseconds=1.0) == pytest.approx(1.0)
    assert figures.of_cutting(compute=10, in_chunks=10.5, overlapped=12) == {
        "chunking_ms": 0.5,
        "exposed_ms": 1.5,
    }


def test_statistics_are_in_milliseconds():
    assert summarize([0.001, 0.006, 0.002]) == Statistics(2.0, 3.0, 1.0, 6.0, 6.0, 3)


def test_interleaving_runs_every_view_in_every_round():
    calls = []
    with weft.init() as world:
        views = {name: lambda name=name: calls.append(name) for name in "abc"}
        times = Stopwatch(world).interleave(views, warmup=2, iterations=4)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 2 + 4
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert [times[name].iterations for name in "abc"] == [4, 4, 4]


class Paced(Stopwatch):
    """A stopwatch by which each call takes its number of seconds, without waiting for them."""

    def time(self, call, calls=1):
        return float(call())


def test_beyond_the_budget_slow_views_run_once_and_quick_ones_a_few_times():
    with weft.init() as world:
        times = Paced(world).interleave(
            {"slow": lambda: 1.0, "quick": lambda: 0.01}, warmup=3, iterations=20, budget=0.0
        )
    runs = {name: time.iterations for name, time in times.items()}
    assert runs == {"slow": 1, "quick": timing.FEWEST}


def test_iterations_fit_into_the_budget_of_a_call():
    with weft.init() as world:
        times = Paced(world).interleave(
            {"slow": lambda: 0.5, "fast": lambda: 0.01}, warmup=1, iterations=100, budget=8.0
        )
    assert {name: time.iterations for name, time in times.items()} == {"slow": 8, "fast": 100}


@pytest.mark.parametrize(("end", "runs"), [(1000.0, 20), (60.0, 10), (0.0, 1)])
def test_checks_after_the_iterations_are_within_the_time(monkeypatch, end, runs):
    """The clock ticks by ten seconds in the first checks; the last ones take as long."""
    clock = [0.0]
    monkeypatch.setattr(views, "monotonic", lambda: clock[0])
    monkeypatch.setattr(views, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 3.0
        return 4.0

    class Ticking(Views):
        def __init__(self):
            self.views = {"slow": View(call, (), lambda run: Check(0))}

        def renew(self, run):
            clock[0] += 7.0

    settings = AllGatherMatmul(warmup=1, iterations=20)
    with weft.init() as world:
        budget = Budget(world, end, lambda: clock[0])
        times, _ = views.timed(Ticking(), Paced(world), settings, budget=budget)
    assert times["slow"].iterations == runs
    if not end:
        assert times["slow"].median == 3000.0, "of the first check: nothing else was called"


def test_rounds_end_in_time_on_a_machine_that_becomes_busy(monkeypatch):
    """The first calls take a second, later ones ten times as long."""
    clock = [0.0]
    monkeypatch.setattr(views, "monotonic", lambda: clock[0])
    monkeypatch.setattr(views, "perf_counter", lambda: clock[0])

    class Slower(Views):
        calls = 0

        def __init__(self):
            self.views = {"one": View(self.call, (), lambda run: Check(0))}

        def call(self):
            self.calls += 1
            clock[0] += 1.0 if self.calls < 4 else 10.0
            return 1.0

        def renew(self, run):
            pass

    with weft.init() as world:
        budget = Budget(world, 60.0, lambda: clock[0])
        times, _ = views.timed(Slower(), Paced(world), AllGatherMatmul(warmup=1), budget=budget)
    assert times["one"].iterations == 7
    assert clock[0] < 60.0 + 2 * 10.0, "the round that had begun, and the last check"


def test_slow_views_get_their_share_of_the_budget(monkeypatch):
    monkeypatch.setattr(timing, "BUDGET", 24.0)
    seconds = {"fast": 0.01, "slower": 2.0, "slow": 5.0, "very slow": 6.0}
    with weft.init() as world:
        views = {name: lambda each=each: each for name, each in seconds.items()}
        begun = []
        times = Paced(world).interleave(views, warmup=3, iterations=20, begins=begun.append)
    assert begun == [*seconds]
    runs = {name: time.iterations for name, time in times.items()}
    assert runs == {"fast": 20, "slower": 3, "slow": 3, "very slow": 1}


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32",) * 2,
        ("float64",) * 2,
        ("bfloat16",) * 2,
        ("float16",) * 2,
        ("float16", "float32"),
    ],
)
def test_verification_accepts_a_product_and_nothing_else(dtypes):
    dtype, out_dtype = (getattr(torch, name) for name in dtypes)
    problem = Problem(9, 130, 7, dtype, out_dtype, seed=3, rank=1)
    wide = torch.promote_types(dtype, torch.float32)
    out = (problem.rows(2).to(wide) @ problem.weight.to(wide)).to(out_dtype)
    assert problem.check_product(out, 2).wrong == 0
    assert problem.check_product(out, 3).wrong > 0, "the product of other inputs"
    for wrong in (
        torch.nan,
        out[4, 5] + 3 * problem.bound[6, 5] + out[4, 5].abs() * torch.finfo(out_dtype).eps,
    ):
        spoilt = out.clone()
        spoilt[4, 5] = wrong
        assert problem.check_product(spoilt, 2).wrong == 1
    missing = (problem.rows(2)[:, 1:].to(wide) @ problem.weight[1:].to(wide)).to(out_dtype)
    assert problem.check_product(missing, 2).wrong > 0, "a product that leaves a column out"


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32",) * 3,
        ("float64",) * 3,
        ("bfloat16",) * 3,
        ("float16",) * 3,
        ("float16", "float32", "float16"),
    ],
)
def test_verification_accepts_a_sum_and_nothing_else(dtypes, monkeypatch):
    dtype, product, out_dtype = (getattr(torch, name) for name in dtypes)
    problems, summed = [], []
    monkeypatch.setattr(verification, "number_of_ranks", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(
            verification, "sum_over_ranks", lambda tensor: summed.append(tensor) or tensor
        )
        problems.append(Sums(9, 130, 7, dtype, out_dtype, product, seed=3, rank=rank))
    totals = [sum(summed[i :: len(summed) // 3]) for i in range(len(summed) // 3)]
    monkeypatch.setattr(verification, "sum_over_ranks", lambda tensor: totals.pop(0))
    problem = Sums(9, 130, 7, dtype, out_dtype, product, seed=3, rank=1)
    wide = torch.promote_types(dtype, torch.float32)
    partial = [(p.rows(2).to(wide) @ p.weight.to(wide)).to(product) for p in problems]
    out = sum(part.to(wide) for part in partial).to(out_dtype)
    assert problem.check_product_sum(out[4:], 2, 4).wrong == 0
    assert problem.check_product_sum(out[4:], 2, 3).wrong > 0, "other rows"
    assert problem.check_product_sum(out, 1, 0).wrong > 0, "the sum of other inputs"
    less = sum(part.to(wide) for part in partial[1:]).to(out_dtype)
    assert problem.check_product_sum(less, 2, 0).wrong > 0, "a sum that leaves a rank out"
    after_each_sum = problems[0].rows(2).new_zeros(9, 7).to(out_dtype)
    # as a user of gloo adds them up: each product and each partial sum is rounded
    for p in problems:
        after_each_sum = after_each_sum + (p.rows(2).to(wide) @ p.weight.to(wide)).to(out_dtype)
    assert problem.check_baseline(after_each_sum, 2, 0).wrong == 0
    assert problem.check_baseline(after_each_sum, 2, 1).wrong > 0, "rows that are off by one"
    assert problem.check_baseline(less, 2, 0).wrong > 0, "a sum that leaves a rank out"
    made = sum(p.products(2).to(wide) for p in problems).to(out_dtype)
    assert problem.check_sum(made, 2, 0).wrong == 0
    made[1, 2] += 1
    assert problem.check_sum(made, 2, 0).wrong == 1


def test_gathered_rows_must_be_equal():
    problem = Problem(5, 4, 3, torch.float32, torch.float32, seed=0, rank=0)
    rows = problem.rows(1).clone()
    assert problem.check_rows(rows, 1) == Check(0, 0.0, 0.0)
    rows[3, 2] = torch.nextafter(rows[3, 2], torch.tensor(torch.inf))
    assert problem.check_rows(rows, 1).wrong == 1


def test_inputs_of_every_run_differ_everywhere():
    problem = Problem(1, 64, 1, torch.float32, torch.float32, seed=0, rank=0)
    seen = torch.cat([problem.rows(run) for run in range(RUNS)])
    assert len(seen.unique(dim=0)) == RUNS
    assert not torch.equal(
        problem.weight, Problem(1, 64, 1, torch.float32, torch.float32, seed=0, rank=1).weight
    )


def test_nan_is_infinitely_wrong():
    assert compare(
        torch.tensor([1.0, torch.nan]), torch.ones(2).double(), torch.full((2,), 9.0)
    ) == Check(1, torch.inf, 9.0)


@pytest.mark.parametrize("m", [6, 7])
def test_baselines_sum_products(m, monkeypatch):
    a, b = torch.randn(m, 5).half(), torch.randn(5, 2).half()
    out = torch.empty(m, 2)
    whole = a.float() @ b.float()
    for baseline in (matmul_reduce_scatter, matmul_all_reduce):
        baseline(a, b, out.fill_(torch.nan))()
        torch.testing.assert_close(out, whole)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    shard = -(-m // 3)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        monkeypatch.setattr(
            dist,
            name,
            lambda into, product, op, **_: into.copy_(3 * product[shard : 2 * shard]),
            raising=False,
        )
    sizes = [m // 3 + (rank < m % 3) for rank in range(3)]
    kept = torch.empty(sizes[1], 2)
    matmul_reduce_scatter(a, b, kept)()
    torch.testing.assert_close(kept, 3 * torch.split(whole, sizes)[1])


@pytest.mark.parametrize("rows", [[3], [3, 3, 3], [4, 0, 2]])
def test_baseline_multiplies_all_rows(rows, monkeypatch):
    monkeypatch.setattr(all_gather_matmul.__globals__["dist"], "is_initialized", lambda: True)
    shards, b = [torch.randn(n, 5).half() for n in rows], torch.randn(5, 2).half()
    padded = torch.zeros(len(rows), max(rows), 5).half()
    for shard, place in zip(shards, padded, strict=True):
        place[: len(shard)] = shard
    for name in ("all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(
            torch.distributed,
            name,
            lambda into, own, **_: into.copy_(padded.view(-1, 5)),
            raising=False,
        )
    out = torch.empty(sum(rows), 2)
    all_gather_matmul(shards[0], b, out, rows)()
    torch.testing.assert_close(out, torch.cat(shards).float() @ b.float())


@pytest.mark.parametrize("bias", [False, True])
def test_baselines_multiply_in_float32_where_torch_has_no_fast_product(monkeypatch, bias):
    """As on a processor whose bfloat16 product takes 100 times as long."""
    monkeypatch.setattr(torch_products, "slowdown", lambda dtype: 100.0)
    used = []
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda x, b, **k: used.append(x.dtype) or mm(x, b, **k))
    monkeypatch.setattr(
        torch, "addmm", lambda c, x, b, **k: used.append(x.dtype) or addmm(c, x, b, **k)
    )
    x, b, added = (torch.randn(*shape).bfloat16() for shape in ((9, 70), (70, 5), (5,)))
    out = torch.full((9, 5), torch.nan, dtype=torch.bfloat16)
    products([(x[:4], out[:4]), (x[4:], out[4:])], b, added if bias else None)()
    exact = x.float() @ b.float() + (added.float() if bias else 0)
    assert torch.equal(out, exact.bfloat16())
    assert used == [torch.float32] * 2


def test_a_result_says_in_which_dtype_baselines_multiply():
    settings = AllGatherMatmul(shape=Shape(1000, 1000, 500), dtype="bfloat16")
    made = result(settings=settings, multiplied_in="float32")
    assert report.to_json(made)["baselines_multiply_in"] == "float32"
    assert "gloo+torch.mm in float32" in text_of(made)
    assert report.to_json(result(settings=settings))["baselines_multiply_in"] == "bfloat16"
    assert " in float32" not in text_of(result(settings=settings))


def test_baselines_multiply_in_the_faster_dtype(monkeypatch):
    """Of which the time by float32 includes the conversions."""
    seconds = {torch.bfloat16: 0.05, torch.float16: 0.0011, torch.float32: 0.001}
    monkeypatch.setattr(torch_products, "_seconds", lambda _, product: seconds[product])
    torch_products.slowdown.cache_clear()
    chosen = {dtype: torch_products.computed_in(dtype) for dtype in seconds}
    assert chosen == {**{dtype: dtype for dtype in seconds}, torch.bfloat16: torch.float32}
    with torch_products.multiplying_in(torch.bfloat16):
        assert torch_products.computed_in(torch.bfloat16) == torch.bfloat16
    assert "takes 50.0 times as long" in torch_products.sentence(torch.bfloat16, 50.0)
    torch_products.slowdown.cache_clear()


def test_rows_of_a_slow_baseline():
    assert scaled.measured_rows(1024, 2, slowdown=40) == 16
    assert scaled.measured_rows(5, 2, slowdown=40) == 5
    assert scaled.measured_rows(1024, 2, slowdown=3) == 1024
    assert scaled.scaled(Statistics(2, 3, 1, 4, 4, 20), 64) == Statistics(
        128, 192, 64, 256, 256, 20
    )


SLOW = "gloo+torch.mm in bfloat16"


def slow_result(rows):
    """A result whose baseline in bfloat16 takes ten seconds, measured on this many rows."""
    settings = AllGatherMatmul(shape=Shape(1024, 1000, 500), dtype="bfloat16")
    slow = {SLOW: Statistics(1e4, 1e4, 9e3, 2e4, 2e4, 20)}
    more = {"multiplied_in": "float32", "slow": slow, "measured_rows": rows}
    checks = result().checks | {SLOW: Check(0, 7.0, 9.0)}
    return result(settings=settings, checks=checks, **more)


def test_a_scaled_baseline_is_marked_and_no_ratio_is_to_it():
    made = report.to_json(slow_result(16))
    assert made["slow_baselines_ms"][SLOW] == {
        "median": 1e4,
        "mean": 1e4,
        "min": 9e3,
        "max": 2e4,
        "p99": 2e4,
        "runs": 20,
        "measured_rows": 16,
    }
    assert made["max_error"] == 1e-6, "of weft's products"
    text = text_of(slow_result(16))
    assert f"SCALED: {SLOW} was measured, and verified, on 16 of 1024 rows" in text
    assert "times multiplied by 64" in text
    [row] = [line for line in text.splitlines() if line.strip().startswith(f"{SLOW}, SCALED")]
    assert "x" not in row.removeprefix(f" {SLOW}")
    assert "vs gloo" in text
    assert "2.00x" in text, "24 ms in float32 to 12 ms"
    assert f"{SLOW},10000" in saved.to_csv(made)


def test_a_slow_baseline_of_all_rows_is_not_marked():
    text = text_of(slow_result(1024))
    assert "SCALED" not in text
    assert f"{SLOW}: by torch.mm as it is, without ratios" in text


def test_a_scaled_bar_does_not_shorten_the_others(tmp_path):
    made = report.to_json(slow_result(16))
    by_name = {bar.name: bar for bar in limit_of(made).bars}
    assert by_name[f"{SLOW}, SCALED"].scaled
    assert by_name[f"{SLOW}, SCALED"].parts[0].percent == 100
    assert by_name["gloo+torch.mm in float32"].parts[0].percent == 100
    assert not by_name["gloo+torch.mm in float32"].scaled
    plots.draw_times(made, tmp_path / "times.svg")
    assert "10000, scaled" in (tmp_path / "times.svg").read_text()


def test_json_of_a_result():
    made = report.to_json(result())
    assert kinds(made) == SCHEMA
    assert list(made) == list(SCHEMA)
    assert (made["speedup"], made["overlap_percent"], made["limit_ratio"]) == (1.5, 75.0, 1.2)
    link = report.to_json(
        result(environment=ENVIRONMENT | {"link": {"gbps": 10.0, "latency_us": 5.0}})
    )["link"]
    assert link == {"gbps": 10.0, "latency_us": 5.0}


def test_json_of_a_wrong_result():
    checks = result().checks | {"pipelined": Check(4, torch.inf, 1e-3)}
    made = report.to_json(result(checks=checks))
    assert made["verified"] is False
    assert made["max_error"] is None
    json.dumps(made, allow_nan=False)


def test_tables_mark_slower_wrong_and_emulated():
    assert "SLOWER" not in text_of(result())
    assert "0.50x SLOWER" in text_of(
        result(baselines={GLOO: Statistics(6.0, 6.0, 5.0, 7.0, 7.0, 20)})
    )
    checks = result().checks | {"pipelined": Check(4, torch.inf, 1e-3)}
    assert "pipelined (direct) WRONG" in text_of(result(checks=checks))
    assert "NOT VERIFIED" in text_of(result(checks=checks))
    assert "EMULATED LINK" in text_of(
        result(environment=ENVIRONMENT | {"link": {"gbps": 10.0, "latency_us": 5.0}})
    )
    assert "too slow for 20 runs: 3 measured" in text_of(
        result(baselines={GLOO: Statistics(6.0, 6.0, 5.0, 7.0, 7.0, 3)})
    )
    options = ENVIRONMENT["options"] | {"seconds": 60.0}
    assert f"--seconds 60 left no time for 20 runs of {GLOO}: 3 measured" in text_of(
        result(
            baselines={GLOO: Statistics(6.0, 6.0, 5.0, 7.0, 7.0, 3)},
            environment=ENVIRONMENT | {"options": options},
        )
    )


@pytest.mark.parametrize(
    ("operator", "algorithm"),
    [("all_gather_matmul", "sequential"), ("all_gather_matmul_reduce_scatter", "gathered")],
)
def test_no_speedup_is_stated_where_nothing_overlaps(operator, algorithm):
    settings = FusedSettings(operator, shape=Shape(1000, 1000, 500))
    choice = Selection(Variant(algorithm), "few rows")
    text = text_of(result(settings=settings, choice=choice))
    assert f"weft ({algorithm})" in text
    assert "Nothing overlaps" in text
    for figure in ("speedup ", "overlap ", "limit ratio"):
        assert figure not in text, figure
        assert figure in text_of(result()), figure


def test_the_costs_of_cutting_and_of_waiting():
    """The second is that of the algorithm that streams, which is not the selected one here."""
    direct = {"direct": Statistics(13.0, 13.0, 12.0, 14.0, 14.0, 20)}
    made = report.to_json(result(choice=Selection(Variant("sequential"), "fast"), streamed=direct))
    assert (made["chunking_ms"], made["exposed_ms"]) == (0.5, 2.5)
    assert "exposed_ms" in report.to_json(result())
    assert "2 ms  cost of waiting: direct - compute in chunks" in text_of(result(streamed=direct))
    older = result()
    del older.times["compute in chunks"]
    assert "exposed" not in text_of(older)


def test_the_hidden_share_of_every_trace():
    spans = [
        Span(0, "comm", "copy", "copy a -> b", 4, 0, 400),
        Span(0, "compute", "matmul", "matmul a -> out", 4, 100, 400),
    ]
    traces = [Trace("sequential", (spans[1],)), Trace("pipelined", tuple(spans))]
    made = report.to_json(result(traces=traces))
    assert made["hidden_percent"] == {"sequential": None, "pipelined": 75}
    assert "75 %  of copying is behind products: pipelined" in text_of(result(traces=traces))
    assert report.to_json(result())["hidden_percent"] == {}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_times_are_drawn(tmp_path, suffix):
    path = tmp_path / f"times.{suffix}"
    plots.draw_times(
        report.to_json(
            result(ablation=dict.fromkeys(("cascade", "overlapped"), Statistics(3, 3, 2, 4, 4, 20)))
        ),
        path,
    )
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--shape", "64x64"], "MxKxN"),
        (["--shape", "0x64x64"], "MxKxN"),
        (["--dtype", "int8"], "float32"),
        (["--dtype", "float32", "--out-dtype", "float16"], "is float32"),
        (["--algorithm", "direct", "--link-gbps", "10"], "use --algorithm push, pull or ring"),
        (["--link-latency-us", "10"], "add --link-gbps"),
        (["--link-gbps", "-1"], "positive"),
        (["--link-gbps", "fast"], "positive"),
        (["--link-gbps", "10", "-n", "1"], "--ranks 2"),
        (["--link-gbps", "10", "--baseline", "gloo"], "--baseline none"),
        (["--baseline", "nccl"], "none, gloo, gloo-chunks"),
        (["--baseline", "gloo-chunks", "--shape", "9x8x8"], "takes equal shards"),
        (
            ["--device", "cuda", "--baseline", "gloo"],
            "none, nccl, nccl-chunks, nccl-registered, torch",
        ),
        (["--device", "cuda", "--engine", "host"], "use streams or triton"),
        (["--engine", "triton"], "use host or reference or streams or interpreter"),
        (["--engine", "streams", "--link-gbps", "1"], "does not emulate links"),
        (["--engine", "reference", "--trace", "t.json"], "has no lanes over time"),
        (["--chunk-rows", "8", "--algorithm", "direct"], "push, pull or ring"),
        (["--ablate", "--algorithm", "sequential"], "push, pull or ring"),
        (["--plot", "times.pdf"], ".png or .svg"),
        (["--trace", "/nowhere/at/all.json"], "make it first"),
        (["--iterations", "0"], "--iterations"),
        (["--ranks", "0"], "--ranks' / '-n': expected at least 1; got 0"),
        (["--ranks", "two"], "--ranks' / '-n': expected an integer; got two"),
        (["--dtype", "fp16"], "--dtype': 'fp16' is not one of 'float16'"),
    ],
)
def test_invalid_options_are_refused(arguments, advice):
    outcome = CliRunner().invoke(
        app, ["bench", "all-gather-matmul", *arguments], terminal_width=500
    )
    assert outcome.exit_code == 2
    assert advice in " ".join(outcome.stderr.replace("│", " ").split())


def bench_json(*arguments):
    """The result of ``weft bench``."""
    outcome = CliRunner().invoke(app, ["bench", *arguments, "--json", "-"])
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.data
@pytest.mark.parametrize("engine", ["reference", "streams", "interpreter"])
def test_another_engine_executes_the_same_benchmark(engine):
    if engine == "interpreter":
        pytest.importorskip("triton", "3.6")
    made = bench_json("all-gather-matmul", *SMALL, "--algorithm", "push", "--engine", engine)
    assert made["verified"]
    assert made["options"]["engine"] == engine
    compared = ["gloo+torch.mm", "one process"] if engine == "streams" else []
    assert [*made["baselines_ms"]] == compared


@pytest.mark.data
@pytest.mark.parametrize(
    "operator",
    [
        pytest.param("all-gather-matmul", marks=pytest.mark.slow),
        "matmul-reduce-scatter",
        pytest.param("matmul-all-reduce", marks=pytest.mark.slow),
    ],
)
def test_baselines_in_chunks_are_verified(operator):
    made = bench_json(operator, *SMALL, "--dtype", "bfloat16", "--baseline", "gloo-chunks")
    assert made["verified"]
    assert [*made["baselines_ms"]] == ["gloo-chunks"]


def test_ranks_take_the_gpu_of_their_local_rank(monkeypatch):
    from weft.gpu.backend import device_of_rank

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in ("1", "3"):  # with more ranks than GPUs in turn
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert device_of_rank() == torch.device("cuda:1")


def test_gloo_is_refused_for_an_operator_without_baselines(monkeypatch):
    monkeypatch.setattr(case, "subject", lambda operator: case.Defined)
    outcome = CliRunner().invoke(
        app, ["bench", "matmul-all-reduce", "--baseline", "gloo"], terminal_width=500
    )
    assert outcome.exit_code == 2
    said = " ".join(outcome.stderr.replace("│", " ").split())
    assert "matmul-all-reduce has no baseline to compare with" in said


def products_of_uneven_rows(world, operator):
    """The rows of the product alone, the names of the views, and those with wrong results."""
    settings = FusedSettings(operator, shape=Shape(4, 24, 8), algorithm="sequential")
    if operator == "all_gather_matmul_reduce_scatter":
        settings = replace(settings, algorithm="gathered")
    subject = case.subject(operator)(settings, world, Stopwatch(world), Budget(world, 60.0))
    _, checks = verify(subject, world, lambda: None)
    wrong = [name for name, check in checks.items() if check.wrong]
    return len(subject.product), [*subject.views], wrong


@pytest.mark.parametrize(
    ("operator", "rows"),
    [
        ("all_gather_matmul_reduce_scatter", [4, 4, 4]),
        ("all_to_all_matmul", [6, 3, 3]),
        ("all_to_all_matmul_all_to_all", [6, 3, 3]),
    ],
)
def test_the_product_alone_has_all_rows_that_a_rank_multiplies(operator, rows):
    """The four rows are 2, 1 and 1 of three ranks."""
    found = on_ranks(products_of_uneven_rows, 3, operator, context=beside_gloo)
    assert [of_rank for of_rank, _, _ in found] == rows
    for _, names, wrong in found:
        assert names == ["compute", "communicate", "sequential", "pipelined", "compute in chunks"]
        assert wrong == []


def test_a_balanced_link_takes_rows_there_and_products_back():
    """A rank of two puts ten rows of 1000 bytes to the other, and ten products of 400 bytes."""
    operator = OPERATORS["all_to_all_matmul_all_to_all"]
    plan = bind(operator.communicate(Request(2, 1, "push")), [10, 10])
    row_bytes = {"a": 1000, "inbox": 1000, "made": 400, "back": 400, "out": 400}
    assert fused.balanced_gbps(plan, row_bytes, compute=1e-3, latency_us=0.0) == 0.112


def one_process(world, operator, shape, dtype):
    """The wrong elements of the baseline of one process: as it is, after rank 0 spoiled an element,
    and of a call that does nothing.
    """
    settings = FusedSettings(operator, shape=shape, dtype=dtype)
    subject = case.subject(operator)(settings, world, Stopwatch(world), Budget(world, 60.0))
    subject.views = {name: subject.views[name] for name in (ALONE,)}
    view, found = subject.views[ALONE], []

    def spoiled():
        view.call()
        view.outputs[0][-1, -1] += 64

    for call in (view.call, spoiled, lambda: None):
        subject.views[ALONE] = view._replace(call=call)
        _, checks = verify(subject, world, lambda: None)
        found.append(checks[ALONE].wrong)
    return found


@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_all_reduce"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_of_one_process_is_verified(operator, dtype):
    shape = Shape(41, 24, 8)
    [[right, spoiled, nothing], _] = on_ranks(
        one_process, 2, operator, shape, dtype, context=beside_gloo
    )
    assert right == 0
    assert spoiled == 1
    assert nothing == 41 * 8


def slow_baselines(world, operator):
    """The baselines where torch has no fast product, those that are slow, and the wrong elements of
    the latter: as they are, and of calls that do nothing.
    """
    fused.slowdown = lambda dtype: 40.0
    settings = FusedSettings(operator, shape=Shape(41, 24, 8), dtype="bfloat16")
    subject = case.subject(operator)(settings, world, Stopwatch(world), Budget(world, 60.0))
    every, found = [*subject.views], []
    for measured in (
        subject.slow,
        {name: view._replace(call=lambda: None) for name, view in subject.slow.items()},
    ):
        subject.views = measured
        _, checks = verify(subject, world, lambda: None)
        found.append([check.wrong for check in checks.values()])
    return subject.few_rows, every, found


@pytest.mark.parametrize(
    ("operator", "rows"),
    [("all_gather_matmul", 16), ("matmul_reduce_scatter", 8), ("matmul_all_reduce", 16)],
)
def test_slow_baselines_are_verified_on_few_rows(operator, rows):
    [(few, views, [right, nothing]), _] = on_ranks(slow_baselines, 2, operator, context=beside_gloo)
    assert few == 16
    assert {GLOO, ALONE, SLOW, "one process in bfloat16"} <= {*views}
    assert right == [0, 0]
    assert nothing == [rows * 8, 16 * 8]


def test_ranks_must_agree_with_the_launcher(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    outcome = CliRunner().invoke(app, ["bench", "all-gather-matmul", "--ranks", "2"])
    assert outcome.exit_code == 2


@pytest.mark.data
def test_bench_on_two_ranks(tmp_path):
    files = [
        "--plot",
        tmp_path / "times.png",
        "--trace",
        tmp_path / "trace.json",
        "--timeline",
        tmp_path / "timeline.svg",
    ]
    folders = ["--save-outputs", tmp_path / "outputs", "--save-data", tmp_path / "data"]
    more = ["--json", "-", "--seed", "5", *folders]
    command = [
        *COMMAND,
        "bench",
        "all-gather-matmul",
        "-n",
        "2",
        *SMALL,
        *map(str, [*files, *more]),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert outcome.returncode == 0, outcome.stderr
    made = json.loads(outcome.stdout)
    assert kinds(made) == SCHEMA
    assert made["verified"]
    assert 0 < made["max_error"] <= made["error_bound"]
    assert "pipelined" in outcome.stderr
    assert (tmp_path / "times.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "timeline.svg").read_text()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    traced = ["sequential", *made["streamed_ms"], "pipelined"]
    assert [*made["hidden_percent"]] == traced
    assert {event["pid"] for event in events} == {*range(2 * len(traced))}, "of two ranks each"
    for rank in range(2):
        out = torch.load(tmp_path / "outputs" / f"rank{rank}.pt")
        assert out.shape == (64, 32)
        assert out.isfinite().all()
    check_saved_data(tmp_path / "data", made["error_bound"])
    saved = tmp_path / "saved.json"
    saved.write_text(outcome.stdout)
    again = CliRunner().invoke(app, ["show", str(saved), "--plot", str(tmp_path / "again.png")])
    assert again.exit_code == 0
    table = [line.split() for line in outcome.stderr.splitlines() if " 20 " in f"{line} "]
    assert [line.split() for line in again.stdout.splitlines() if " 20 " in f"{line} "] == table
    assert (tmp_path / "again.png").stat().st_size > 1000


def descendants(pid):
    """The processes that a process has started, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [*children, *(each for child in children for each in descendants(child))]


@pytest.mark.slow
def test_a_bench_that_is_terminated_says_so_in_one_line():
    options = ["--iterations", "100000", "--neighbours", "1"]
    command = [*COMMAND, "bench", "all-gather-matmul", *options]
    bench = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    # the server of forks, the tracker of its resources, two ranks, and the neighbour that one of
    # them starts once they have a world
    while bench.poll() is None and len(descendants(bench.pid)) < 5:
        os.sched_yield()
    bench.terminate()
    _, messages = bench.communicate(timeout=60)
    assert bench.returncode == 143
    budget, *others = messages.splitlines()
    assert budget == "all-gather-matmul: about 60 s at most, as --seconds says"
    assert others == ["weft bench: stopped by SIGTERM"]


def check_saved_data(folder, bound):
    """Check saved outputs of all_gather_matmul as a stranger would, with NumPy alone."""
    ranks = [np.load(folder / f"rank{rank}.npz") for rank in range(2)]
    gathered = np.concatenate([rank["a"] for rank in ranks]).astype(np.float64)
    for rank in ranks:
        product = gathered @ rank["b"].astype(np.float64)
        assert np.allclose(product, rank["expected"], rtol=1e-12, atol=1e-12)
        assert np.abs(rank["out"] - product).max() <= bound


def test_saved_results_are_shown(tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(report.to_json(result())))
    shown = CliRunner().invoke(app, ["show", str(file)])
    assert "pipelined (direct)" in shown.stdout
    header, *rows = CliRunner().invoke(app, ["show", "--csv", str(file)]).stdout.splitlines()
    assert header == "view,median_ms,mean_ms,min_ms,max_ms,p99_ms,runs"
    assert rows[4] == "pipelined,12.0,12.0,11.0,13.0,13.0,20"
    assert len(rows) == 7
    for text, why in (
        ("[]", "no result of weft bench"),
        ("{", "is not JSON"),
        ('{"benchmark": "x"}', "has no benchmark 'x'"),
        ('{"benchmark": "all-gather-matmul"}', "another version of weft has written it"),
    ):
        file.write_text(text)
        rejected = CliRunner().invoke(app, ["show", str(file)])
        assert (rejected.exit_code, why in rejected.stderr) == (2, True), rejected.stderr


def test_an_algorithm_that_streams_is_shown_beside_sequential():
    times = Statistics(13.0, 13.0, 12.0, 14.0, 14.0, 20)
    shown = text_of(result(streamed={"direct": times}))
    assert "takes 1.08 times the time of" in shown
    assert "communicate is 80% of compute" in shown


@pytest.mark.data
@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("matmul-reduce-scatter", ["-n", "2", "--dtype", "float16"]),
        (
            "matmul-reduce-scatter",
            [
                "-n",
                "3",
                "--shape",
                "41x24x8",
                "--algorithm",
                "push",
                "--link-gbps",
                "auto",
                "--chunk-rows",
                "5",
            ],
        ),
        (
            "matmul-reduce-scatter",
            ["-n", "3", "--shape", "41x24x8", "--algorithm", "ring", "--dtype", "bfloat16"],
        ),
        (
            "matmul-all-reduce",
            ["-n", "2", "--dtype", "bfloat16", "--chunk-rows", "7", "--algorithm", "one_shot"],
        ),
        (
            "matmul-all-reduce",
            [
                "-n",
                "3",
                "--shape",
                "41x24x8",
                "--dtype",
                "float16",
                "--link-gbps",
                "1",
                "--link-latency-us",
                "2",
            ],
        ),
    ],
)
def test_bench_of_sums(operator, arguments, tmp_path):
    more = [
        "--json",
        "-",
        "--timeline",
        str(tmp_path / "timeline.png"),
        "--save-outputs",
        str(tmp_path),
    ]
    outcome = CliRunner().invoke(app, ["bench", operator, *SMALL, *arguments, *more])
    assert outcome.exit_code == 0, outcome.stderr
    made = json.loads(outcome.stdout)
    assert made["benchmark"] == operator
    assert made["verified"]
    assert set(made) == set(SCHEMA)
    assert made["max_error"] <= made["error_bound"]
    rows = [torch.load(tmp_path / f"rank{rank}.pt").shape[0] for rank in range(made["ranks"])]
    m = made["shape"]["m"]
    assert sum(rows) == (m if operator == "matmul-reduce-scatter" else m * made["ranks"])


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("matmul-reduce-scatter", ["--dtype", "float16", "--out-dtype", "float32"]),
        ("matmul-all-reduce", ["--dtype", "float64"]),
    ],
)
def test_bench_of_sums_on_one_rank(operator, arguments, tmp_path):
    test_bench_of_sums(operator, ["-n", "1", *arguments], tmp_path)


@pytest.mark.data
def test_bench_with_uneven_shards_steps_and_a_link(tmp_path):
    arguments = [
        "-n",
        "3",
        "--shape",
        "41x24x8",
        "--dtype",
        "float16",
        "--out-dtype",
        "float32",
        "--algorithm",
        "push",
    ]
    more = [
        "--ablate",
        "--link-gbps",
        "10",
        "--link-latency-us",
        "2",
        "--chunk-rows",
        "5",
        "--json",
        "-",
        "--trace",
        str(tmp_path / "trace.json"),
    ]
    outcome = CliRunner().invoke(app, ["bench", "all-gather-matmul", *SMALL, *arguments, *more])
    assert outcome.exit_code == 0, outcome.stderr
    made = json.loads(outcome.stdout)
    assert made["link"] == {"gbps": 10.0, "latency_us": 2.0}
    assert made["baselines_ms"] == {}
    assert made["chunk_rows"] == 4, "14 rows of a rank are sent in 4 pieces"
    assert list(made["ablation_ms"]) == [
        "cascade",
        "overlapped",
        "+ own rows first",
        "+ arrivals joined",
    ]
    traced = ["sequential", *list(made["ablation_ms"])[1:], "pipelined"]
    assert list(made["hidden_percent"]) == traced, "each step is traced"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert list(dict.fromkeys(processes)) == [
        f"{name}: rank {rank}" for name in traced for rank in range(3)
    ]


def test_a_wrong_output_fails_the_benchmark(monkeypatch, tmp_path):
    right = weft.all_gather_matmul

    def wrong(*arguments, out, **more):
        right(*arguments, out=out, **more)
        out[-1, -1] += 1

    def in_this_process(fn, ranks, *arguments, threads):
        return [fn(*arguments)]

    monkeypatch.setattr(weft, "all_gather_matmul", wrong)
    monkeypatch.setattr(import_module("weft.launchers.launcher"), "launch", in_this_process)
    outcome = CliRunner().invoke(
        app,
        ["bench", "all-gather-matmul", "-n", "1", *SMALL, "--json", str(tmp_path / "result.json")],
    )
    assert outcome.exit_code == 1
    assert "NOT VERIFIED" in outcome.stdout
    made = json.loads((tmp_path / "result.json").read_text())
    assert made["verified"] is False
    assert made["max_error"] > made["error_bound"]


def test_an_operator_that_does_nothing_fails_the_benchmark(monkeypatch):
    calls, right = [], weft.all_gather_matmul

    def once(*arguments, out, **more):
        calls.append(1)
        return right(*arguments, out=out, **more) if len(calls) < 3 else out

    monkeypatch.setattr(weft, "all_gather_matmul", once)
    found = measure(
        case.GatheredRows,
        AllGatherMatmul(shape=Shape(8, 8, 4), warmup=1, iterations=2, baseline="none"),
    )
    assert {name for name, check in found.checks.items() if check.wrong} == {
        "sequential",
        "pipelined",
    }


@pytest.mark.data
@pytest.mark.slow
def test_bench_joins_the_ranks_of_a_launcher():
    """Benchmarks of products and of collectives, one after the other."""
    both = "import sys; from weft.cli import app; [app(each.split(), standalone_mode=False) for each in sys.argv[1:]]"
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    sweep = [
        "bench",
        "broadcast",
        "--sizes",
        "8,4K",
        "--warmup",
        "1",
        "--iterations",
        "2",
        "--threads",
        "1",
        "--json",
        "-",
    ]
    benches = [
        " ".join(words) for words in (["bench", "all-gather-matmul", *SMALL, "--json", "-"], sweep)
    ]
    outcome = subprocess.run(
        [*torchrun, sys.executable, "-c", both, *benches],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert outcome.returncode == 0, outcome.stderr
    product, end = json.JSONDecoder().raw_decode(outcome.stdout)
    sweep = json.loads(outcome.stdout[end:])
    assert [made["benchmark"] for made in (product, sweep)] == ["all-gather-matmul", "broadcast"], (
        "one object each, from one rank"
    )
    assert product["ranks"] == sweep["ranks"] == 2


def test_one_rank_of_a_thousand_is_shown_at_once():
    shown = CliRunner().invoke(app, ["plan", "show", "all-reduce", "-n", "1024", "--rank", "7"])
    assert shown.exit_code == 0
    assert [line for line in shown.stdout.splitlines() if line.startswith("rank ")] == ["rank 7"]
    assert "not verified: proofs are of at most 64 ranks" in shown.stdout
    wrong = CliRunner().invoke(app, ["plan", "show", "all-reduce", "-n", "4", "--rank", "4"])
    assert wrong.exit_code == 2


def test_plans_are_shown_and_proved():
    outcome = CliRunner().invoke(
        app, ["plan", "show", "all-gather-matmul", "-n", "3", "--algorithm", "push"]
    )
    assert outcome.exit_code == 0
    assert "all_gather_matmul / push on 3 ranks" in outcome.stdout
    assert "verified: no race, no deadlock" in outcome.stdout
    assert "blocks per rank: 2, 2" in CliRunner().invoke(app, ["plan", "show", "all-gather"]).stdout
    for operator, planner in PLANNERS.items():
        for algorithm in planner.algorithms:
            outcome = CliRunner().invoke(
                app,
                ["plan", "show", operator.replace("_", "-"), "-n", "3", "--algorithm", algorithm],
            )
            assert outcome.exit_code == 0, outcome.output
            assert f"{operator} / {algorithm} on 3 ranks" in outcome.stdout
    for wrong in (
        ["--algorithm", "auto"],
        ["--algorithm", "star"],
    ):
        assert CliRunner().invoke(app, ["plan", "show", "all-gather-matmul", *wrong]).exit_code == 2


def test_a_plan_whose_result_is_symmetric_is_shown():
    words = ["plan", "show", "matmul-all-reduce", "--algorithm", "push"]
    plain = CliRunner().invoke(app, words).stdout
    symmetric = CliRunner().invoke(app, [*words, "--symmetric"]).stdout
    assert "summed@1[0:2] -> out@1[0:2]" in plain
    assert "summed@" not in symmetric
    assert "copy   out@1[2:3] -> out@0[2:3]" in symmetric
    assert "verified: no race, no deadlock" in symmetric


def test_help_and_plans_do_not_load_torch():
    code = "import sys; from weft.cli import app; app(['plan', 'show', 'all-gather'], standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "all-reduce", "--json", "/proc/result.json"],
        ["bench", "all-gather-matmul", *SMALL, "--trace", "/proc/trace.json"],
        ["tune", "all-gather-matmul", "--shape", "8x8x8", "--json", "/proc/result.json"],
        ["calibrate", "--json", "/proc/result.json"],
    ],
)
def test_files_that_cannot_be_written_are_refused_before_measuring(arguments, monkeypatch):
    monkeypatch.setattr(import_module("weft.launchers.launcher"), "launch", None)
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2, outcome.output
    assert "cannot be" in outcome.output


def test_an_existing_file_stays_until_there_is_a_result(tmp_path):
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("an earlier result")
    for file in (kept, new):
        options.check_files(str(file), None)
    assert kept.read_text() == "an earlier result"
    assert not new.exists()


@pytest.mark.parametrize(
    "arguments", [["tune", "all-gather-matmul", "--shape", "8x8x8"], ["calibrate"]]
)
def test_nothing_is_measured_without_a_cache_directory(arguments, monkeypatch):
    monkeypatch.setattr(import_module("weft.launchers.launcher"), "launch", None)
    monkeypatch.setenv("WEFT_CACHE", "/proc/nowhere")
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2, outcome.output
    output = " ".join(outcome.output.replace("│", " ").split())
    assert "measurements cannot be stored in /proc/nowhere" in output


def test_measured_variants_are_shown_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    assert "No choices" in doctor._measurements()
    for rows in (64, 128):
        case = Workload("all_gather_matmul", (rows, rows), 8, 8, "float32", "float32")
        name = stored.key(case, "1 thread")
        stored.remember(name, stored.Measured(Variant("ring", 4), 1.0, busy=rows == 64))
    (file,) = tmp_path.glob("variants-*.json")
    text = doctor._measurements()
    assert f"2 choice(s) of auto and of collectives are remembered in {file}" in text
    assert "1 of them, measured on busy cores, will be measured again" in text
    outcome = CliRunner().invoke(app, ["tune", "--clear"])
    assert (outcome.exit_code, outcome.output.split()[:2]) == (0, ["Forgot", "2"])
    assert stored.find(name) is None
    assert not file.exists()
    assert CliRunner().invoke(app, ["tune", "--clear"]).output.startswith("Forgot 0 ")


def test_the_paths_of_a_collective_are_tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    command = ["tune", "all-gather", "--sizes", "4K,64K", "--iterations", "2", "--json", "-"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    small, large = json.loads(outcome.stdout)["tuned"]
    assert [row["algorithm"] for row in small["ways"]] == ["eager"], "there is nothing to choose"
    ways = {row["algorithm"] for row in large["ways"]}
    assert {"eager", "slots"} <= ways <= {"eager", "slots", "read"}
    (file,) = tmp_path.glob("variants-*.json")
    stored = json.loads(file.read_text())
    assert [each["algorithm"] for name, each in stored.items() if "65536" in name] == [
        large["ways"][0]["algorithm"]
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["all-gather"], "all-gather needs --sizes"),
        (["all-gather", "--shape", "8x8x8"], "all-gather has no product: give --sizes"),
        (["all-gather-matmul"], "all-gather-matmul needs --shape"),
        (["all-gather-matmul", "--sizes", "8"], "all-gather-matmul has a product: give --shape"),
    ],
)
def test_what_is_tuned_is_given_by_sizes_or_shapes(options, why, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    outcome = CliRunner().invoke(app, ["tune", *options])
    assert outcome.exit_code == 2, outcome.output
    assert why in " ".join(outcome.output.replace("│", " ").split())


def test_the_version():
    outcome = CliRunner().invoke(app, ["--version"])
    assert (outcome.exit_code, outcome.stdout) == (0, f"weft {weft.__version__}\n")
