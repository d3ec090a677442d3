"""Profiles say what they were fitted to, predictions choose the fastest way, and the command answers in words, tables and files."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft import machine, predict
from weft.cli import app
from weft.machine import Link

FIT = Path(__file__).parents[1] / "benchmarks" / "fit_machines.py"


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def weft(*arguments, status=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def fits():
    spec = importlib.util.spec_from_file_location("fit_machines", FIT)
    module = sys.modules["fit_machines"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", machine.names())
def test_every_profile_can_be_read(name):
    found = machine.load(name)
    assert found.name == name
    assert found.source
    assert (
        predict.time(
            predict.case("all_gather_matmul", 4, (64, 64, 64), next(iter(found.products)).split()[0]),
            predict.Candidate("push", 4),
            found,
        )
        > 0
    )


def test_residuals_are_what_the_simulator_misses():
    fit = fits()
    for make in (fit.streaming, fit.steps, fit.transfers, fit.streams, fit.tiles):
        system = make()
        name = fit.profile_of(system)
        known = machine.load(name).residuals
        for point in system.points:
            on = machine.load(f"{name}/{point.variant}" if f"{name}/{point.variant}" in machine.names() else name)
            error = 100 * (
                fit.seconds(point.plan, on if system.of == "" else replace(on, launch_us=0.0), point.rows) / point.published - 1
            )
            assert error == pytest.approx(known[point.label], abs=0.2), (name, point.label)


@pytest.mark.parametrize("ranks", [4, 8])
def test_interleaving_is_predicted_to_win_where_all_links_deliver_at_once(ranks):
    on, case = machine.load("ascend-910b1"), predict.case("all_gather_matmul", ranks, (8192, 4096, 4096), "float16")
    found = {(way.algorithm, way.order): seconds for way, seconds in predict.forecast(case, on).ways}
    assert 0.05 < 1 - found["push", "interleaved"] / found["push", "peer"] < 0.3


def test_without_a_price_nothing_is_overlapped():
    on = machine.load("ascend-910b1")
    few = predict.forecast(predict.case("all_gather_matmul", 2, (2, 4096, 4096), "float16"), replace(on, links=(Link(1e9),)))
    assert few.best.algorithm == "sequential"


def test_a_better_machine_is_never_slower():
    on = machine.load("h100-nvlink-8")
    for operator in predict.OPERATORS:
        case = predict.case(operator, 8, (4096, 8192, 3584), "bfloat16")
        saved = predict.savings(case, predict.forecast(case, on).best, on)
        assert [value for _, value in saved] == sorted((value for _, value in saved), reverse=True)
        assert saved[-1][1] > -0.02


def test_ten_thousand_ranks_over_two_kinds_of_links():
    on = machine.load("h100-nvlink-8")
    for ranks in (1024, 10_000):
        case = predict.case("all_gather_matmul", ranks, (ranks * 8, 1024, 1024), "bfloat16")
        way = predict.Candidate("push", 8)
        assert predict.planned(case, way, on) == 8
        assert predict.time(case, way, on) > predict.compute(case, on)


def test_it_answers_in_words(tmp_path):
    said = weft(
        "predict", "all-gather-matmul", "--machine", "ascend-910b1", "--ranks", 8, "--shape", "8192x4096x4096", "--dtype", "float16"
    )
    for word in (
        "PREDICTED",
        "compute",
        "communicate",
        "sequential",
        "push interleaved",
        "limit ratio",
        "Overlap helps",
        "The bottleneck is",
    ):
        assert word in said
    both = weft("predict", "mlp", "--machine", "h100-nvlink-8", "-n", 8, "--shape", "8192x8192x28672", "--link", 200)
    assert "8192x8192x7168" in both
    assert "8192x3584x8192" in both
    assert "Together" in both


def test_files(tmp_path):
    base = ["predict", "matmul-reduce-scatter", "--machine", "ascend-950", "-n", 4, "--shape", "256x512x512"]
    weft(*base, "--json", tmp_path / "a.json", "--trace", tmp_path / "a.trace", "--timeline", tmp_path / "a.svg")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["speedup"] == pytest.approx(found["times_ms"]["sequential"] / found["times_ms"]["pipelined"])
    assert min(way["ms"] for way in found["ways"]) == found["times_ms"]["pipelined"]
    assert json.loads((tmp_path / "a.trace").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    weft(*base, "--sweep", "ranks=2:8", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.svg")
    swept = json.loads((tmp_path / "b.json").read_text())
    assert [result["ranks"] for result in swept["results"]] == swept["values"] == [2, 4, 8]
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert "16" in weft(*base, "--sweep", "link=4:16:2")


def test_beside_a_measured_run(tmp_path):
    times = {name: {"median": 2.0, "min": 1.0, "max": 3.0} for name in ("compute", "communicate", "sequential", "pipelined")}
    run = {
        "benchmark": "all-gather-matmul",
        "ranks": 2,
        "shape": {"m": 64, "k": 64, "n": 64},
        "dtype": "float16",
        "out_dtype": "float32",
    }
    run |= {"algorithm": "push", "chunk_rows": 8, "link": None, "times_ms": times, "speedup": 1.0, "limit_ratio": 1.0}
    (tmp_path / "run.json").write_text(json.dumps(run))
    said = weft("predict", "all-gather-matmul", "--machine", "ascend-950", "--compare", tmp_path / "run.json")
    assert "measured ms" in said
    assert "2.000" in said
    assert "not the JSON of weft bench" in weft("predict", "matmul-all-reduce", "--compare", tmp_path / "run.json", status=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--machine", "abacus"], "there is no machine 'abacus'; there are ascend-910b1"),
        (["--machine", "../cpu"], "there is no machine"),
        (["--machine", "ascend-950/x"], "there is no machine"),
        (["--shape", "8x8"], "three positive numbers"),
        (["--shape", "0x8x8"], "three positive numbers"),
        (["--dtype", "float64"], "float16"),
        (["--algorithm", "two_shot"], "direct, pull, push, ring, sequential"),
        (["--algorithm", "direct"], "cannot be done on ascend-950"),
        (["--sweep", "color=1:2"], "ranks=2:64"),
        (["--sweep", "ranks=8:2"], "upwards"),
        (["--plot", "x.png"], "--timeline"),
        (["--compare", "none.json"], "cannot read"),
    ],
)
def test_what_cannot_be_asked(arguments, says):
    given = [*arguments] if arguments[0] == "--machine" else ["--machine", "ascend-950", *arguments]
    assert says in " ".join(weft("predict", "all-gather-matmul", *given, status=2).replace("│", " ").split())
