"""The benchmark of one-sided copies: its rows, the detection of wrong copies, and its picture. No
test asserts a time.
"""

from __future__ import annotations

import json

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
        assert row["cycles"] is None or row["cycles"] > 0
    assert picture.stat().st_size > 1000
    assert "Verified: every byte" in done.stdout
    draw(result | {"verified": False}, picture)
    assert "NOT VERIFIED" in picture.read_text()


def wrong_copies(world):
    bench = Buffers(CopySettings(sizes="1000"), world)
    found = []
    for contender in bench.contenders(1000):
        right = bench.verify(contender, 0)
        nothing = bench.verify(contender._replace(call=lambda: None), 0)
        found.append((right.wrong, nothing.wrong))
    return found


@pytest.mark.data
def test_a_copy_that_does_nothing_is_wrong_in_every_byte():
    for found in on_ranks(wrong_copies, 2):
        assert found == [(0, 1000)] * len(NAMES)


def test_invalid_options_are_refused():
    runner = CliRunner()
    for options, words in [
        (["--sizes", "4Q"], "4Q"),
        (["--ranks", "1"], "--ranks"),
        (["--plot", "x.txt"], "png"),
    ]:
        outcome = runner.invoke(app, ["bench", "p2p", *options])
        assert outcome.exit_code == 2
        assert words in outcome.output
