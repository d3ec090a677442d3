"""Figures that are noise are named so: beside the spread of the runs, or beyond the possible."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from weft_tools.bench import noise, page, tables
from weft_tools.bench.harness import environment
from weft_tools.bench.settings.copies import CopySettings


def time(median, least):
    return {"median": median, "min": least, "p99": 2 * median, "runs": 20}


def result(compute, communicate, sequential, pipelined, **more):
    """A result with these times, each a median and the least time."""
    names = ("compute", "communicate", "sequential", "pipelined")
    times = dict(zip(names, (compute, communicate, sequential, pipelined), strict=True))
    medians = {name: one["median"] for name, one in times.items()}
    hidden = 100 * (1 - (medians["pipelined"] - medians["compute"]) / medians["communicate"])
    limit = max(medians["compute"], medians["communicate"])
    return {
        "benchmark": "all-gather-matmul",
        "algorithm": "push",
        "times_ms": times,
        "speedup": medians["sequential"] / medians["pipelined"],
        "overlap_percent": hidden,
        "limit_ratio": medians["pipelined"] / limit,
        **more,
    }


STEADY = result(time(40, 39.7), time(40, 39.9), time(82, 81), time(44, 43.5))
OVER = result(time(44, 43.6), time(40, 39.9), time(82, 81), time(40, 39.5))
SHORT = result(time(135, 129), time(1.5, 1.3), time(138, 130), time(136, 122))


def test_steady_figures_are_no_noise():
    assert noise.doubts(STEADY) == {}
    shown = {figure.name: figure.value for figure in page.figures(STEADY)}
    assert shown == {"speedup": "1.86x", "limit ratio": "1.10", "overlap": "90 %"}
    assert [*tables.noisy(STEADY)] == []


def test_more_than_is_possible_is_noise():
    assert {*noise.doubts(OVER)} == {"overlap_percent", "limit_ratio"}
    overlap, ratio = (page.figures(OVER), page.figures(OVER))
    shown = {figure.name: figure for figure in overlap}
    assert shown["speedup"].value == "2.05x"
    assert (shown["overlap"].value, shown["limit ratio"].value) == ("noise", "noise")
    assert shown["overlap"].meaning == "110 %: more than all of communicate, which cannot be"
    assert {figure.value for figure in ratio} == {"2.05x", "noise"}
    assert len([*tables.noisy(OVER)]) == 1


def test_an_operator_may_be_faster_than_its_communication_alone():
    """It reads rows in place that communicate copies; independent calls do the same alone."""
    fused = result(time(4, 3.9), time(40, 39.9), time(44, 43), time(20, 19.9))
    assert fused["limit_ratio"] == 0.5
    assert noise.doubts(fused) == {}
    times = fused["times_ms"]
    independent = fused | {"times_ms": {**times, "overlapped": times["pipelined"]}}
    assert {*noise.doubts(independent)} == {"limit_ratio"}


IDLE, LOADED = (
    {"ranks": 2, "machine": {"cores": 2, "threads_per_rank": 1, "waited_for_core_percent": waited}}
    for waited in (1.0, 23.0)
)


def test_there_are_no_ratios_of_a_busy_machine():
    assert tables.ratio_in(IDLE, 741.74).plain == "741.74x"
    assert tables.ratio_in(LOADED, 741.74).plain == "busy"
    assert tables.compared(LOADED, time(80, 79), time(70, 69)).plain == "busy"
    assert not tables.busy(LOADED | {"neighbours": 2}), "that is what was asked for"
    assert not tables.busy(LOADED | {"ranks": 4}), "the ranks wait for each other"
    meanings = {"speedup": "", "overlap_percent": "", "limit_ratio": ""}
    assert {each.value.plain for each in tables.gains(LOADED | SHORT, meanings)} == {"busy"}
    rows = [
        {"operation": "put", "implementation": name, "time_us": {"median": 2.0}}
        for name in ("weft", "gloo")
    ]
    [figure] = page.figures(LOADED | {"rows": rows})
    assert figure.value == "busy"
    assert figure.meaning.startswith("1.00x to 1.00x: measured while other programs had the cores")


def test_differences_below_those_of_the_runs_are_noise():
    assert {*noise.doubts(SHORT)} == {"speedup", "overlap_percent"}
    assert tables.compared(IDLE, time(80, 70), time(78, 69)).plain == "1.0x"
    assert tables.compared(IDLE, time(80, 79), time(70, 69)).plain == "0.88x SLOWER"
    # results of earlier versions, or of one run, have no spread
    assert tables.compared(IDLE, {"median": 8.0}, {"median": 8.0}).plain == "1.00x"


@pytest.mark.parametrize(
    ("median", "least", "cells"),
    [
        (135.44, 129.3, ["135", "129", "271"]),
        (44.217, 43.95, ["44.2", "44.0", "88.4"]),
        (1.0391, 1.0388, ["1.039", "1.039", "2.078"]),
        (2.5, 2.5, ["2.500", "2.500", "5.000"]),
    ],
)
def test_digits_that_are_noise_are_not_shown(median, least, cells):
    assert [*tables.milliseconds(time(median, least))] == cells


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"waited_for_core_percent": 23.4}, ["BUSY MACHINE: rank 0 waited for a core in 23 %"]),
        ({"threads_per_rank": 4}, ["OVERSUBSCRIBED: the ranks have 8 threads in all on 2 core(s)"]),
        ({"threads_per_rank": 4, "waited_for_core_percent": 70}, ["OVERSUBSCRIBED"]),
    ],
)
def test_a_busy_machine_and_too_many_threads_are_noticed(changes, words):
    machine = {"cores": 2, "threads_per_rank": 1} | changes
    found = [note.plain for note in tables.disturbed({"ranks": 2, "machine": machine})]
    assert len(found) == len(words)
    assert all(text.startswith(word) for text, word in zip(found, words, strict=True))
    beside = {"ranks": 2, "neighbours": 1, "machine": machine | {"threads_per_rank": 1}}
    assert [*tables.disturbed(beside)] == [], "as asked for"


def test_cores_of_several_hosts_may_have_the_same_numbers():
    cores = [frozenset(numbers) for numbers in ((0, 1), (1,), (0, 1))]
    world = SimpleNamespace(hosts=(0, 0, 1), cores=cores, device=torch.device("cpu"))
    assert environment(world, CopySettings())["machine"]["cores"] == 4


def test_terminal_and_page_name_noise_alike():
    from weft_tools.bench.report import _figure_table

    console = Console(width=200)
    more = {"streamed_ms": {}, "tflops": 0.12345}
    with console.capture() as shown:
        console.print(_figure_table(OVER | more))
    assert "noise  110 %: more than all of communicate, which cannot be" in shown.get()
    assert "0.123" in shown.get()
