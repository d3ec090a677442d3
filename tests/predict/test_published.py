"""Published figures: the profiles fitted to them, the errors that the docs state, and what they
measured as predictions of the command.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft import predict
from weft.cli import app
from weft_tools.predict import machine, overlap

REPOSITORY = Path(__file__).parents[2]
SEEDS = ("ascend-910b1", "ascend-950", "h100-nvlink-8", "mi325x-8")


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return __import__("published")


def ask(*arguments, status=0):
    """The JSON of `weft predict`, or its output if it is rejected."""
    given = ["predict", *map(str, arguments), *([] if status else ["--json", "-"])]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return (
        " ".join(result.output.replace("│", " ").split()) if status else json.loads(result.stdout)
    )


def loaded(system, point):
    """The shipped machine of a point."""
    name = system.of or system.machine(system.begin, "").name
    return machine.variant(machine.load(name), point.variant)


def error(system, point):
    return 100 * (point.predicted(loaded(system, point)) / point.published - 1)


def stated(label):
    """The error of a figure in the tables, in percent."""
    page = (REPOSITORY / "benchmarks" / "published_errors.md").read_text()
    [found] = set(
        re.findall(rf"^\| {re.escape(label)} \|.*\| ([+-][0-9.]+) % \| ", page, re.MULTILINE)
    )
    return float(found)


def test_residuals_and_tables_have_the_errors_of_the_simulator(published):
    for make in published.SYSTEMS:
        system = make()
        for point in system.points if system.shipped else ():
            name = system.of or system.machine(system.begin, "").name
            found = error(system, point)
            assert found == pytest.approx(machine.load(name).residuals[point.label], abs=0.2)
            assert found == pytest.approx(stated(point.label), abs=0.2)


def test_tables_have_the_errors_of_figures_to_which_nothing_is_fitted(published):
    tests = [
        (system, point)
        for make in published.SYSTEMS
        for system in [make()]
        for point in system.tests
    ]
    assert len(tests) == 7
    for system, point in tests:
        assert point.label not in {other.label for other in system.points}
        assert error(system, point) == pytest.approx(stated(point.label), abs=0.2)
        assert point.label not in loaded(system, point).residuals
    assert max(abs(error(*each)) for each in tests) < 10


def test_bandwidths_of_system_5_are_per_1024_cubed_bytes(published):
    seconds = {point.label: point.published for point in published.tiles().points}
    assert seconds["rccl, 512 MiB"] == pytest.approx(7 * 2**29 / (293 * 2**30))
    assert machine.load("mi325x-8").links[0].gbs == pytest.approx(45.1, rel=0.02)


def test_both_readings_of_the_rows_of_system_2(published):
    each, together = published.steps(), published.steps(rows_of_each=False)
    for system, gathered in ((each, 4096), (together, 1024)):
        plan = system.points[0].plan
        assert plan.buffers["out"].rows == (gathered,) * 4
        assert {point.rows["out"] for point in system.points} == {published.Rows(5120, "float16")}
    assert (each.shipped, together.shipped) == (True, False)
    products = (REPOSITORY / "benchmarks" / "gpu" / "rates.py").read_text()
    assert "(4096, 10240, 5120)" in products


@pytest.mark.parametrize("name", machine.names())
def test_every_collective_is_predicted_on_every_profile(name):
    on = machine.load(name).of_ranks(4)
    for collective in predict.COLLECTIVES:
        few, many = (
            predict.collective_candidates(collective, size, 4, on)[0].seconds
            for size in (8, 1 << 24)
        )
        assert 0 < few <= many
    with pytest.raises(ValueError, match="has no signal latency"):
        predict.collective_candidates("barrier", 0, 4, replace(on, notify_us=0.0))


@pytest.mark.parametrize("name", SEEDS)
def test_the_answer_names_the_source_of_an_assumed_signal_latency(name):
    found = ask("barrier", "--machine", name, "-n", 8)
    on = machine.load(name)
    assert (found["notify_us"], found["notify_source"]) == (on.notify_us, on.notify_source)
    assert on.notify_source
    assert found["rows"][0]["us"] == pytest.approx(on.launch_us + on.notify_us)


def test_an_all_gather_on_the_mesh_has_the_published_bandwidth():
    found = ask("all-gather", "--machine", "mi325x-8", "-n", 8, "--bytes", "512M")
    fastest = found["rows"][0]
    assert fastest["way"] == "push"
    assert 7 * 0.5 / (fastest["us"] * 1e-6) == pytest.approx(293, rel=0.01)


def test_a_product_beside_an_all_gather_as_published():
    found = ask(
        "overlap",
        *("--machine", "h100-nvlink-8", "-n", 8, "--dtype", "float16"),
        *("--shape", "8192x8192x8192", "--bytes", "64M"),
    )
    times = {row["way"]: row["ms"] for row in found["rows"]}
    assert times["sequential"] == pytest.approx(2.96, rel=0.01)
    assert times["overlapped by kernel"] == pytest.approx(2.02, rel=0.01)
    assert times["overlapped by copy engine"] == pytest.approx(1.77, rel=0.01)
    assert times["sequential"] == pytest.approx(times["compute"] + times["communicate"])


def test_one_way_to_overlap_where_a_profile_knows_one():
    found = ask(
        "overlap", "--machine", "mi325x-8", "-n", 4, "--shape", "512x512x512", "--bytes", "1M,2M"
    )
    ways = [row["way"] for row in found["rows"]]
    assert ways == ["compute", "communicate", "sequential", "overlapped"] * 2


def test_groups_beside_each_other_are_simulated_once():
    case = overlap.Beside(16, 64, 64, 64, "float16", 1 << 16)
    on = machine.load("h100-nvlink-8")
    assert [bool(lanes) for lanes in overlap.plan(case, "sequential", on).lanes] == [True] * 8 + [
        False
    ] * 8
    uneven = overlap.Beside(12, 64, 64, 64, "float16", 1 << 16)
    assert all(overlap.plan(uneven, "sequential", on).lanes)


def test_copies_have_the_published_bandwidth_and_cycles(published):
    found = ask("copy", "--machine", "ascend-910b1", "--bytes", "4K:4M:4")
    rows = {(row["way"], row["bytes"]): row for row in found["rows"]}
    assert len(rows) == 4 * 6
    ways = {"TGET": "get", "TGET_ASYNC": "get async"}
    for system, key in (("tget_bandwidth", "gbps"), ("tget_cycles", "cycles")):
        for row in published.published(system):
            predicted = rows[ways[row["variant"]], int(row["bytes"])][key]
            assert predicted == pytest.approx(float(row["value"]), rel=0.08)
    for (way, size), row in rows.items():
        other = rows[way.replace("put", "get"), size]
        assert (row["us"], row["cycles"]) == (other["us"], other["cycles"])


def test_a_copy_takes_the_link_between_the_first_and_the_last_rank():
    near, far = (
        ask("copy", "--machine", "h100-nvlink-8", "-n", ranks, "--bytes", "1M") for ranks in (8, 16)
    )
    assert near["rows"][0]["us"] == pytest.approx(1.048576 / 0.31276 / 1e3 * 1e3, rel=0.02)
    assert far["rows"][0]["us"] == pytest.approx(5 + 1.048576 / 0.05)
    assert near["rows"][0]["cycles"] is None


def test_a_copy_in_shared_memory_needs_no_launch():
    found = ask("copy", "--machine", "cpu", "--bytes", "8M")
    on = machine.load("cpu")
    assert on.launch_us
    assert not found["starts"]
    for row in found["rows"]:
        assert row["us"] == pytest.approx((8 << 20) / on.links[0].gbs / 1e3)
    assert ask("copy", "--machine", "mi325x-8")["starts"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["all-gather", "--shape", "8x8x8"], "--shape: has no effect with a collective"),
        (["barrier", "--bytes", "8"], "--bytes: barrier moves no bytes"),
        (["copy", "--dtype", "float16"], "--dtype: has no effect with copy"),
        (["copy", "-n", 1], "a single rank has no peer"),
        (["overlap", "--algorithm", "push"], "--algorithm: has no effect with overlap"),
        (["overlap", "--dtype", "float64"], "h100-nvlink-8 has product rates for float16"),
        (["all-gather-matmul", "--bytes", "8"], "all-gather-matmul takes --shape"),
        (["all-gather", "--threads", 2], "h100-nvlink-8 has no cores"),
        (["overlap", "--link-latency-us", 3], "add --link-gbps"),
    ],
)
def test_options_that_have_no_effect_are_refused(arguments, text):
    assert text in ask(*arguments, "--machine", "h100-nvlink-8", status=2)


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_products_made_in_peers_memory_are_predicted(operator):
    case, on = (
        predict.workload(operator, 4, (1024, 512, 512), "float16"),
        machine.load("h100-nvlink-8"),
    )

    def names(on):
        return {variant.algorithm for variant in predict.candidates(case, on)}

    assert "put" in names(on)
    assert "put" not in names(on.emulating(10.0, 0.0)) | names(on.over((0, 0, 1, 1)))
    put, push = (
        predict.rank(case, on, name)[0][1]
        for name in ("put", "push" if "push" in names(on) else "two_shot")
    )
    assert 0 < put < 2 * push
    slow = on.with_link(4, gbs=1.0)
    assert predict.rank(case, slow, "put")[0][1] > 0.75 * 1024 * 512 * 4 / 1e9
