"""Machine profiles, the selection of the fastest variant, and the output
of the commands.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
import torch
from support.caches import own_cache
from support.ranks import on_ranks
from typer.testing import CliRunner

import weft
from weft import cache, predict
from weft.cli import app
from weft.engines import engine
from weft.measure import tune
from weft.ops import stored
from weft.schedules.thresholds import Thresholds
from weft.schedules.workload import Variant
from weft_tools import calibrate
from weft_tools.predict import answers as answering
from weft_tools.predict import machine
from weft_tools.predict.forecast import forecast
from weft_tools.predict.interpolation import RateGrid
from weft_tools.predict.machine import LinkRate, ProductRate


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def calibrated(**figures):
    """Make this a calibrated machine: the profile cpu, with other figures."""
    machine.remember({**asdict(replace(machine.load("cpu"), **figures)), "name": "this"})


def command(*arguments, status=0):
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("name", machine.names())
def test_every_profile_can_be_read(name):
    found = machine.load(name)
    assert found.name == name
    assert found.source
    assert (
        predict.time(
            predict.workload(
                "all_gather_matmul", 4, (64, 64, 64), next(iter(found.products)).split()[0]
            ),
            Variant("push", 4),
            found,
        )
        > 0
    )


@pytest.mark.parametrize("ranks", [4, 8])
def test_interleaving_is_predicted_to_win_on_concurrent_links(ranks):
    on, case = (
        machine.load("ascend-910b1"),
        predict.workload("all_gather_matmul", ranks, (8192, 4096, 4096), "float16"),
    )
    found = {
        (variant.algorithm, variant.order): seconds
        for variant, seconds in forecast(case, on).variants
    }
    assert 0.05 < 1 - found["push", "interleaved"] / found["push", "peer"] < 0.3


def test_free_communication_is_not_overlapped():
    on = machine.load("ascend-910b1")
    few = forecast(
        predict.workload("all_gather_matmul", 2, (2, 4096, 4096), "float16"),
        replace(on, links=(LinkRate(1e9),), notify_us=0.0),
    )
    assert few.variants[0][0].algorithm == "sequential"


@pytest.mark.slow
def test_a_better_machine_is_never_slower():
    on = machine.load("h100-nvlink-8")
    for operator in predict.OPERATORS:
        case = predict.workload(operator, 8, (4096, 8192, 3584), "bfloat16")
        saved = predict.savings(case, forecast(case, on).variants[0][0], on)
        assert [value for _, value in saved] == sorted((value for _, value in saved), reverse=True)
        assert saved[-1][1] > -0.02


def test_a_thousand_ranks_over_two_kinds_of_links():
    on, variant = machine.load("h100-nvlink-8"), Variant("push")
    case = predict.workload("all_gather_matmul", 1024, (8192, 1024, 1024), "bfloat16")
    assert predict.planned(case, variant, on) == 8
    assert predict.time(case, variant, on) > predict.compute(case, on)


def test_the_command_prints_sentences():
    printed = command(
        "predict",
        "all-gather-matmul",
        "--machine",
        "ascend-910b1",
        "--ranks",
        4,
        "--shape",
        "8192x4096x4096",
        "--dtype",
        "float16",
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
        assert word in printed
    both = command(
        "predict",
        "mlp",
        "--machine",
        "h100-nvlink-8",
        "-n",
        8,
        "--shape",
        "8192x8192x28672",
        "--link",
        200,
    )
    assert "8192x8192x7168" in both
    assert "8192x3584x8192" in both
    assert "Together" in both


def test_the_default_machine_is_this_one():
    base = ["predict", "all-gather-matmul", "--shape", "64x64x64"]
    printed = command(*base)
    assert "not calibrated, so the profile cpu is taken; weft calibrate" in printed
    assert "on cpu, PREDICTED" in printed
    calibrated()
    printed = command(*base)
    assert "calibrated" not in printed
    assert "on this, PREDICTED" in printed


def test_files(tmp_path):
    base = [
        "predict",
        "matmul-reduce-scatter",
        "--machine",
        "ascend-950",
        "--shape",
        "256x512x512",
    ]
    command(
        *base,
        "-n",
        4,
        "--json",
        tmp_path / "a.json",
        "--trace",
        tmp_path / "a.trace",
        "--timeline",
        tmp_path / "a.svg",
    )
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["speedup"] == pytest.approx(
        found["times_ms"]["sequential"] / found["times_ms"]["pipelined"]
    )
    assert min(entry["ms"] for entry in found["ways"]) == found["times_ms"]["pipelined"]
    assert json.loads((tmp_path / "a.trace").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "a.svg").read_text()
    command(
        *base, "--sweep", "ranks=2:8", "--json", tmp_path / "b.json", "--plot", tmp_path / "b.svg"
    )
    swept = json.loads((tmp_path / "b.json").read_text())
    assert [result["ranks"] for result in swept["results"]] == swept["values"] == [2, 4, 8]
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert "16" in command(*base, "-n", 4, "--sweep", "link=4:16:2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--machine", "abacus"], "there is no machine 'abacus'; there are ascend-910b1"),
        (["--machine", "../cpu"], "there is no machine"),
        (["--machine", "ascend-950/x"], "there is no machine"),
        (["--shape", "8x8"], "three positive numbers"),
        (["--shape", "0x8x8"], "three positive numbers"),
        (["--dtype", "float64"], "float16"),
        (["--algorithm", "two_shot"], "direct, push, pull, ring, sequential"),
        (["--algorithm", "direct"], "cannot be done on ascend-950"),
        (["--sweep", "color=1:2"], "ranks=2:64"),
        (["--sweep", "ranks=8:2"], "increasing"),
        (["--plot", "x.png"], "--timeline"),
    ],
)
def test_invalid_arguments_are_refused(arguments, text):
    options = (
        [*arguments] if arguments[0] == "--machine" else ["--machine", "ascend-950", *arguments]
    )
    assert text in " ".join(
        command("predict", "all-gather-matmul", *options, status=2).replace("│", " ").split()
    )


def test_products_are_fitted_without_negative_times():
    sizes = [(1, 256, 64), (8, 64, 64), (64, 512, 512), (512, 64, 1024)]
    rows = [
        [1 / t, k * n / t, m * k * n / t]
        for m, k, n in sizes
        for t in [3 + 2 * k * n + 5 * m * k * n]
    ]
    assert calibrate.least_squares(rows) == pytest.approx([3, 2, 5])
    rows = [
        [1 / t, k * n / t, m * k * n / t] for m, k, n in sizes for t in [m * k * n - 0.5 * k * n]
    ]
    assert min(calibrate.least_squares(rows)) == 0


def test_interpolation_between_measurements():
    grid = RateGrid(((1, 4), (10, 1000)), (1, 100, 2, 200))
    points = (1, 10), (4, 1000), (1, 100), (2, 100), (9, 5), (0.5, 5000)
    assert [grid.at(*point) for point in points] == pytest.approx([1, 200, 10, 10 * 2**0.5, 2, 100])


def test_ranks_without_rows_are_predicted_by_measured_products():
    factors = RateGrid(((1, 64), (64, 1 << 20)), (2, 1, 2, 1))
    calibrated(products={"float32": ProductRate(1.0, 10.0, 5.0, factors)})
    mine = machine.load("this")
    assert mine.product(0, 64, 64, "float32", True) == 0 < mine.product(1, 64, 64, "float32", True)
    assert "4 ranks, 2x64x64" in command(
        "predict", "all-gather-matmul", "-n", 4, "--shape", "2x64x64"
    )


@pytest.mark.parametrize(
    ("times", "slower"),
    [
        ((10, 4, 14), 2),  # both share a core until the shorter one ends
        ((10, 4, 10), 1),  # neither slows the other down
        ((10, 4, 9), 1),
        ((10, 4, 12), 1.5),
        ((10, 4, 100), 4),  # something else was going on
    ],
)
def test_interference_from_times(times, slower):
    assert calibrate.slowdown(*times) == pytest.approx(slower)


def test_profiles_without_thresholds_have_the_defaults():
    calibrated(thresholds=Thresholds(48 << 10, 2 << 20))
    profile = machine.calibrated()
    assert machine.load("this").thresholds == Thresholds(48 << 10, 2 << 20)
    del profile["thresholds"]
    assert machine.from_dict(profile).thresholds == Thresholds()


def test_unknown_thresholds_of_a_profile_are_ignored():
    """Other versions store further ones."""
    calibrated(thresholds=Thresholds(48 << 10, 2 << 20))
    profile = machine.calibrated()
    profile["thresholds"]["hop"] = 4.5
    assert machine.from_dict(profile).thresholds == Thresholds(48 << 10, 2 << 20)


def measured(world, directory):
    own_cache(directory)
    calibrate._PASSES, calibrate._ROWS, calibrate._WIDTHS, calibrate._COPIED = (
        2,
        (1, 8),
        (64, 128),
        (1, 16),
    )
    calibrate.ITEMSIZE = {"float32": 4}
    profile = calibrate.measure(1)
    cases = [predict.workload(operator, 2, (8, 16, 8), "float32") for operator in predict.OPERATORS]
    requests = [
        tune.TuningCase(case, predict.candidates(case, machine.load("cpu")), None) for case in cases
    ]
    slow = machine.load("cpu").emulating(1.0, 20.0)
    requests.append(tune.TuningCase(cases[0], predict.candidates(cases[0], slow), (1.0, 20.0)))
    times = tune.measure(requests, 1, 1)
    a, b, found = world.empty(4, 16).fill_(1), weft.pack(torch.ones(16, 8)), []
    for variant in (None, Variant("ring", 3)):
        if variant:  # rank 0 alone needs it
            if world.rank == 0:
                name = stored.key(cases[0], engine(world).setting)
                stored.remember(name, stored.Measured(variant, 1.0))
            engine(world).selections.clear()
            engine(world).calls.clear()
        assert torch.equal(weft.all_gather_matmul(a, b, world=world), torch.full((8, 8), 16.0))
        found += [each.variant.algorithm for each in engine(world).selections.values()]
    return (
        profile,
        [variants for _, variants, _ in requests],
        [each.times for each in times],
        found,
    )


def test_this_machine_is_measured(tmp_path):
    (profile, requested, answers, chosen), others = on_ranks(measured, 2, tmp_path / "of ranks")
    assert chosen == others[-1]
    assert chosen[0] != "ring" == chosen[1]
    machine.remember(json.loads(json.dumps(profile)))
    mine = machine.load("this")
    assert machine.names()[0] == "this"
    assert mine.in_place
    assert (
        min(
            mine.memory_gbs,
            mine.reduce_gbs,
            mine.links[0].gbs,
            mine.products["float32 packed"].tflops,
        )
        > 0
    )
    assert {"float32 1x64x64", "memory 16", "64 signals", "call"} <= profile["spread"].keys()
    assert all(
        {*variants} <= {answer.variant for answer in found}
        for variants, found in zip(requested, answers, strict=True)
    )
    assert all(0 < answer.least <= answer.median for found in answers for answer in found)


def beside_others(world, directory):
    own_cache(directory)
    case = predict.workload("all_gather_matmul", 2, (8, 16, 8), "float32")
    found = []
    for waited in (lambda: 0, time.monotonic_ns):  # never, and all the time
        tune.waited_for_core = waited
        found += tune.measure([tune.TuningCase(case, [Variant("push")])], 1, 1)
    return [each.busy for each in found], world.placement.oversubscribed


def test_what_is_tuned_beside_other_programs_is_marked(tmp_path):
    (busy, oversubscribed), _ = on_ranks(beside_others, 2, tmp_path / "of ranks")
    assert busy == [False, not oversubscribed]
    times = [tune.VariantTime(Variant("push"), 2.0, 1.0)]
    for marked in (True, False):
        tune._remembered([tune.CaseTimes(times, "a class", 1, marked)])
        assert stored.find("a class").busy == marked


def test_a_tuned_variant_is_found_for_its_setting_and_machine_only(monkeypatch):
    case = predict.workload("matmul_reduce_scatter", 2, (64, 64, 64), "float32")
    measured, processor = stored.Measured(Variant("ring", 4), 1.5), cache.processor()
    name = stored.key(case, "1 thread")
    assert stored.find(name) is None
    stored.remember(name, measured)
    assert stored.find(name) == measured
    assert stored.find(stored.key(case, "2 threads")) is None
    monkeypatch.setattr(cache, "processor", lambda: "another that shares the cache directory")
    assert stored.find(name) is None
    assert "this" not in machine.names()
    monkeypatch.setattr(cache, "processor", lambda: processor)
    assert stored.find(name) == measured


def test_the_link_between_hosts_is_an_option(tmp_path):
    requested = [
        "predict",
        "matmul-all-reduce",
        "--ranks",
        4,
        "--hosts",
        2,
        "--shape",
        "512x256x256",
    ]
    for gbs in ("0.125", "12.5"):
        assert "4 ranks on 2 hosts" in command(
            *requested, "--machine", "cpu", "--link", gbs, "--json", tmp_path / gbs
        )
    slow, fast = (json.loads((tmp_path / gbs).read_text()) for gbs in ("0.125", "12.5"))
    assert (slow["hosts"], fast["hosts"]) == (2, 2)
    assert slow["times_ms"]["communicate"] > 2 * fast["times_ms"]["communicate"]
    # without the algorithms that read rows of peers
    assert {entry["algorithm"] for entry in slow["ways"]} == {
        "two_shot",
        "ring",
        "sequential",
    }
    assert "divided evenly over 3 hosts" in command(*requested, "--hosts", 3, status=2)
    assert "has no link to other hosts" in command(
        *requested, "--machine", "ascend-910b1", "--dtype", "float16", status=2
    )
    assert "use --link" in command(*requested, "--link-gbps", 1, status=2)


def test_faster_transfers_are_told_from_overlap():
    """The speedup of 2.5 is a ring in place of a push; 5 % of it is hidden."""
    result = {
        "predicted": "all-gather-matmul",
        "machine": "cluster",
        "algorithm": "ring",
        "pieces": 2,
        "order": "peer",
        "times_ms": {"compute": 1.0, "communicate": 20.0, "sequential": 50.0, "pipelined": 20.0},
        "speedup": 2.5,
        "limit_ratio": 1.0,
        "ways": [{}],
        "saved_percent": {},
        "measured_on": 0,
        "ranks": 16,
    }
    [line] = answering.words(result)
    assert line.startswith("Ring takes 20.000 ms instead of 50.000, 2.50 times as fast: 2.38 times")
    assert line.endswith("1.05 times by overlap.")
    [line] = answering.words(result | {"times_ms": result["times_ms"] | {"communicate": 49.0}})
    assert line.startswith("Overlap helps: ring takes")


def test_times_that_contradict_each_other_are_named():
    """Of a measured profile; communicate alone also copies a rank's own rows."""
    case = predict.workload("all_gather_matmul", 2, (64, 1024, 512), "float16")
    published = answering.answer(case, machine.load("h100-nvlink-8"))
    assert published["limit_ratio"] < 0.6
    times = published["times_ms"]
    short = published | {"times_ms": times | {"compute": 2 * times["pipelined"]}}
    for result, named in (
        (published, False),
        (published | {"machine": "this"}, False),
        (short, False),
        (short | {"machine": "this"}, True),
    ):
        assert ("measure it again by weft calibrate" in " ".join(answering.words(result))) == named
