"""Hosts of many cores: link figures by number of ranks and threads, and collectives that
synchronize flat or by levels.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from weft import predict
from weft.cli import app
from weft.schedules.barrier import barrier
from weft.schedules.levels import flat, nested
from weft.schedules.thresholds import Thresholds
from weft_tools.predict import machine
from weft_tools.predict.machine import LinkRate
from weft_tools.predict.simulator import seconds

HOSTS = ("epyc-9654-2s", "graviton4-2s", "xeon-6985p-2s")


def test_figures_follow_from_ranks_and_threads():
    epyc = machine.load("epyc-9654-2s")
    shared_cache, package, all_ = epyc.of_ranks(
        96, 1
    ).links  # 4 ranks on 8 cores that share a cache, 48 on a package
    assert (shared_cache.reach, package.reach, all_.reach) == (4, 48, None)
    assert shared_cache.gbs == 30.0
    assert all_.gbs == pytest.approx(204.8 / 48)  # the bandwidth shared by 48 ranks
    few = epyc.of_ranks(2, 64)
    assert [link.reach for link in few.links] == [None]
    assert few.memory_gbs == pytest.approx(368.6 / 2)
    assert few.products["float32"].tflops == pytest.approx(
        64 * epyc.of_ranks(2, 1).products["float32"].tflops
    )
    assert epyc.of_ranks(2, 4).reduce_gbs == pytest.approx(100.0)  # four cores do not use all of it
    assert epyc.of_ranks(8).groups(8) == ((0, 0, 0, 0, 1, 1, 1, 1),)
    with pytest.raises(ValueError, match="has 192 cores, too few for 6 ranks of 64 threads"):
        epyc.of_ranks(6, 64)
    cpu = machine.load("cpu")
    assert cpu.of_ranks(128, 64) is cpu


def test_a_notify_blocks_its_lane_until_it_owns_the_cache_line():
    on = replace(
        machine.load("cpu"),
        links=(LinkRate(8.0, reach=3, line_us=0.1), LinkRate(8.0, line_us=0.4)),
        launch_us=1.0,
        notify_us=0.05,
    )
    # the second counter is raised, then seen, and fetched
    shared_cache = 1.0 + 2 * 0.1 + 0.05 + 0.1
    assert seconds(barrier(flat(3)), on, {}) == pytest.approx(shared_cache * 1e-6)
    levels = ((0, 0, 0, 1, 1, 1), *flat(6))
    assert seconds(barrier(levels), on, {}) == pytest.approx(
        (shared_cache + 0.4 + 0.05 + 0.4) * 1e-6
    )


@pytest.mark.parametrize("name", HOSTS)
def test_levels_are_predicted_to_be_faster_where_ranks_are_many(name):
    host = machine.load(name)
    for collective in ("barrier", "all_reduce"):
        assert [
            each.name for each in predict.collective_candidates(collective, 8, 2, host.of_ranks(2))
        ] == ["flat"]
        for ranks in (16, 32):
            first, second = predict.collective_candidates(
                collective, 8, ranks, host.of_ranks(ranks)
            )
            assert (first.name, second.name) == ("levels", "flat")
            assert first.notifies < second.notifies == ranks - 1
    assert {
        each.name
        for each in predict.collective_candidates("all_reduce", 1 << 20, 4, host.of_ranks(4))
    } == {
        "one_shot",
        "two_shot",
        "ring",
    }


def test_predictions_use_the_thresholds_of_a_machine():
    def names(collective, size, thresholds):
        return {
            each.name
            for each in predict.collective_candidates(
                collective, size, 16, replace(machine.load(HOSTS[0]), thresholds=thresholds)
            )
        }

    default, large = Thresholds(), Thresholds(first_level=64 << 10)
    assert (
        names("all_reduce", 16 << 10, default)
        == names("all_reduce", 32 << 10, large)
        == {"flat", "levels"}
    )
    assert "two_shot" in names("all_reduce", 17 << 10, default) & names(
        "all_reduce", 33 << 10, large
    )
    assert names("all_gather", 64 << 10, default) == {"flat", "levels"}


def test_levels_are_taken_while_they_save_signals():
    """On these machines no other signal latency, in notifies, gives levels that are clearly faster."""
    for name in HOSTS:
        for ranks in (8, 12, 24, 48):
            on = machine.load(name).of_ranks(ranks, 1)
            times = {
                levels: seconds(barrier(levels), on, {})
                for levels in {
                    nested(ranks, on.groups(ranks), latency) for latency in (0, 1, 3, 9, 99)
                }
            }
            assert times[nested(ranks, on.groups(ranks))] < 1.35 * min(times.values())


def test_the_command_prints_a_table(tmp_path):
    def ask(*words):
        return CliRunner().invoke(app, ["predict", *words, "--json", str(tmp_path / "found.json")])

    assert (
        ask("all-reduce", "--machine", "graviton4-2s", "-n", "12", "--bytes", "8,64K").exit_code
        == 0
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["bytes"], row["way"]) for row in rows][:2] == [(8, "levels"), (8, "flat")]
    assert {row["bytes"] for row in rows} == {8, 65536}
    assert ask("barrier", "--machine", "xeon-6985p-2s", "-n", "9").exit_code == 0
    fused = ask(
        "all-gather-matmul", "--machine", "xeon-6985p-2s", "-n", "2", "--shape", "64x512x512"
    )
    assert fused.exit_code == 0
    for wrong in (["--threads", "64", "-n", "6"], ["--sweep", "ranks=2:8"]):
        assert ask("all-reduce", "--machine", "graviton4-2s", *wrong).exit_code == 2
