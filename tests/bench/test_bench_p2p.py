"""The benchmark of one-sided copies: its rows, the detection of wrong copies, and its picture. No
test asserts a time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.interpreter import triton_world
from support.ranks import on_ranks, stream_world
from typer.testing import CliRunner

import weft._native as _native
from weft.cli import app
from weft_tools.bench.copies import HostCopies
from weft_tools.bench.gpu.copies import StreamCopies
from weft_tools.bench.gpu.ticks import DeviceTicks
from weft_tools.bench.p2p import bought, draw
from weft_tools.bench.settings.copies import CopySettings

NAMES = [
    ("put", "weft"),
    ("put", "weft (async)"),
    ("get", "weft"),
    ("get", "weft (async)"),
    ("get", "weft (staged)"),
    ("local", "memcpy"),
    ("local", "torch.copy_"),
]


@pytest.mark.data
def test_rows_and_picture(tmp_path):
    saved, picture = tmp_path / "p2p.json", tmp_path / "p2p.svg"
    options = [
        "--sizes",
        "100,4K",
        "--iterations",
        "2",
        "--warmup",
        "1",
        "--json",
        str(saved),
        "--plot",
        str(picture),
    ]
    done = CliRunner().invoke(app, ["bench", "p2p", *options])
    assert done.exit_code == 0, done.stderr
    result = json.loads(saved.read_text())
    assert (result["benchmark"], result["ranks"], result["verified"]) == ("p2p", 2, True)
    assert [(row["operation"], row["implementation"]) for row in result["rows"]] == 2 * NAMES
    for row in result["rows"]:
        assert row["size_bytes"] in (100, 4096)
        assert row["wrong"] == 0
        assert 0 < row["time_us"]["min"] <= row["time_us"]["median"] <= row["time_us"]["p99"]
        assert row["algbw_gbps"] == row["busbw_gbps"] > 0
        assert 0 < row["transfer_cycles"] < 1e12
        assert 0 < row["cycles"] < 1e12
    assert result["counter"]["name"] in ("time-stamp counter", "virtual counter")
    assert result["counter"]["mhz"] > 1
    assert "get async, 100: " in done.stdout
    assert picture.stat().st_size > 1000
    assert "Verified: every element, bit by bit" in done.stdout
    shown = CliRunner().invoke(app, ["show", str(saved)])
    assert shown.output == done.stdout
    draw(result | {"verified": False}, picture)
    assert "NOT VERIFIED" in picture.read_text()


def wrong_copies(world):
    found = []
    for dtype, size in (("float32", 4096), ("bfloat16", 1000), ("int8", 77)):
        settings = CopySettings(sizes=str(size), dtype=dtype, tile="256")
        bench = HostCopies(settings, world)
        count = size // bench.dtype.itemsize
        for contender in bench.contenders(size):
            assert contender.target.dtype == bench.dtype
            right = bench.verify(contender, 0)
            nothing = bench.verify(contender._replace(call=lambda: None), 0)
            found.append((right.wrong, nothing.wrong == count))
    return found


@pytest.mark.data
def test_a_copy_that_does_nothing_is_wrong_in_every_element():
    for found in on_ranks(wrong_copies, 2):
        assert found == [(0, True)] * 3 * len(NAMES)


def tiles_of_a_staged_get(world):
    bench = HostCopies(CopySettings(sizes="1000", dtype="int8", tile="256"), world)
    [staged] = [one for one in bench.contenders(1000) if one.implementation == "weft (staged)"]
    wrong = bench.verify(staged, 0).wrong
    if world.rank:
        return wrong
    moved = staged.target
    return wrong, torch.equal(bench.tile, torch.cat([moved[768:], moved[744:768]]))


@pytest.mark.data
def test_a_staged_get_goes_through_its_tile():
    first, other = on_ranks(tiles_of_a_staged_get, 2)
    assert first == (0, True)
    assert other == 0


STREAMED = ["copy engine", "copy engine (async)"]


def wrong_on_streams(world):
    bench = StreamCopies(CopySettings(sizes="1000", dtype="bfloat16"), world)
    found = []
    for contender in bench.contenders(1000):
        right = bench.verify(contender, 0)
        nothing = bench.verify(contender._replace(call=lambda: None), 0)
        found.append((contender.implementation, right.wrong, nothing.wrong))
    return found


@pytest.mark.data
def test_copies_on_streams_that_do_nothing_are_wrong():
    for found in on_ranks(wrong_on_streams, 2, context=stream_world):
        assert found == [(name, 0, 500) for name in (*STREAMED, *STREAMED, "torch.copy_")]


@pytest.mark.data
def test_the_kernel_and_the_copy_engine_are_compared_by_the_interpreter(tmp_path):
    pytest.importorskip("triton", "3.6")
    saved, picture = tmp_path / "p2p.json", tmp_path / "p2p.svg"
    sizes = ["--sizes", "1K", "--dtype", "bfloat16", "--iterations", "1", "--warmup", "1"]
    files = ["--json", str(saved), "--plot", str(picture)]
    options = ["--engine", "interpreter", "--comm-sms", "1,3", *sizes, *files]
    done = CliRunner().invoke(app, ["bench", "p2p", *options])
    assert done.exit_code == 0, done.output
    result = json.loads(saved.read_text())
    way = [*((name, None) for name in STREAMED), ("kernel", 1), ("kernel", 3)]
    expected = [(operation, *each) for operation in ("put", "get") for each in way]
    assert [
        (row["operation"], row["implementation"], row["comm_sms"]) for row in result["rows"]
    ] == [
        *expected,
        ("local", "torch.copy_", None),
    ]
    assert result["verified"]
    assert result["counter"] == {"name": "clock of interpreted kernels", "mhz": 1000}
    assert all(row["transfer_cycles"] > 0 < row["cycles"] for row in result["rows"])
    assert "kcycles: 1000 ticks of the clock of interpreted kernels" in done.stdout
    assert "caller: for how long a copy holds the caller's stream" in " ".join(done.stdout.split())
    assert "get 3 SMs" in done.stdout
    assert "The engine interpreter checks results" in done.stdout
    assert "kernel, 3 SMs" in picture.read_text()
    assert CliRunner().invoke(app, ["show", str(saved)]).output == done.stdout


def ticks_of_two_milliseconds(world):
    ticks = DeviceTicks(world.device)

    def work():
        start = _native.now()
        while _native.now() < start + 2_000_000:
            pass

    start = _native.now()
    spent = ticks.spent(work)
    return spent, _native.now() - start


def test_ticks_of_a_device_are_by_the_clock_of_its_kernels():
    pytest.importorskip("triton", "3.6")
    [(spent, elapsed)] = on_ranks(ticks_of_two_milliseconds, 1, context=triton_world)
    assert 2_000_000 <= spent < elapsed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused():
    done = CliRunner().invoke(app, ["bench", "p2p", "--device", "cuda", "--comm-sms", "4"])
    assert done.exit_code == 2
    assert "torch finds no GPU here" in done.output


def test_results_of_earlier_versions_are_shown():
    file = Path(__file__).parents[1] / "fixtures/results/p2p-earlier.json"
    shown = CliRunner().invoke(app, ["show", str(file)])
    sentence = (
        "get async, 4K: 0.49 of the bandwidth of get for 1.80 of its caller's cycles, which buys "
        "nothing; 64M: 1.02 of the bandwidth of get for 0.00 of its caller's cycles, which buys "
        "the caller's time."
    )
    assert sentence in " ".join(shown.output.split())
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    ("bandwidth", "cycles", "what"),
    [
        (0.1, 10.0, "nothing"),
        (1.04, 0.96, "nothing"),
        (0.9, 0.1, "the caller's time"),
        (2.0, 1.5, "bandwidth"),
        (2.0, 0.5, "bandwidth and the caller's time"),
    ],
)
def test_what_asynchrony_buys_follows_from_its_figures(bandwidth, cycles, what):
    assert bought(bandwidth, cycles) == what


def test_invalid_options_are_refused():
    runner = CliRunner()
    for options, words in [
        (["--sizes", "4Q"], "4Q"),
        (["--ranks", "1"], "--ranks"),
        (["--plot", "x.txt"], "png"),
        (["--sizes", "4K,6"], "6 bytes are no whole number of elements of float32"),
        (["--tile", "7", "--dtype", "bfloat16"], "multiples of 2, or another --dtype"),
        (["--tile", "1K:4K"], "expected one size"),
        (["--tile", "4K", "--device", "cuda"], "measured on the cores of a CPU"),
        (["--comm-sms", "4"], "use --device cuda, or --engine interpreter"),
        (["--comm-sms", "4", "--engine", "streams"], "use --device cuda, or --engine interpreter"),
        (["--comm-sms", "0", "--device", "cuda"], "expected positive numbers"),
        (["--engine", "reference"], "one-sided calls have no plan"),
        (["--engine", "triton", "--device", "cuda"], "no product for the engine triton"),
    ]:
        outcome = runner.invoke(app, ["bench", "p2p", *options])
        assert outcome.exit_code == 2
        assert words in " ".join(outcome.output.replace("│", " ").split())
