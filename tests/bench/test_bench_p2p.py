"""The benchmark of one-sided copies: its rows, the detection of wrong copies, and its picture. No
test asserts a time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.ranks import on_ranks
from typer.testing import CliRunner
from weft_benchmarks.p2p import Buffers, draw
from weft_benchmarks.settings import CopySettings

from weft.cli import app

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
        "0",
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
    assert "On a CPU asynchrony buys the caller's time, not bandwidth." in done.stdout
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
        bench = Buffers(settings, world)
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


def test_results_of_earlier_versions_are_shown():
    file = Path(__file__).parents[2] / "benchmarks/results/amd-epyc-zen3-2-cores/p2p.json"
    shown = CliRunner().invoke(app, ["show", str(file)])
    assert "get async: 0.49 of the bandwidth of get" in shown.output
    assert shown.exit_code == 0


def test_invalid_options_are_refused():
    runner = CliRunner()
    for options, words in [
        (["--sizes", "4Q"], "4Q"),
        (["--ranks", "1"], "--ranks"),
        (["--plot", "x.txt"], "png"),
        (["--sizes", "4K,6"], "6 bytes are no whole number of elements of float32"),
        (["--tile", "7", "--dtype", "bfloat16"], "multiples of 2, or --dtype int8"),
        (["--tile", "1K:4K"], "expected one size"),
    ]:
        outcome = runner.invoke(app, ["bench", "p2p", *options])
        assert outcome.exit_code == 2
        assert words in " ".join(outcome.output.replace("│", " ").split())
