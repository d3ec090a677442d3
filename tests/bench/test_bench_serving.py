"""The benchmark of serving: its stream, its figures, that it notices what is wrong, its picture. No
test asserts a time.
"""

from __future__ import annotations

import json

import pytest
import torch
from support.ranks import on_ranks
from typer.testing import CliRunner
from weft_benchmarks.serving import ALONE, TORCH, WAYS, WEFT, Serving, draw, stream
from weft_benchmarks.settings import ServingSettings

from weft.cli import app

SMALL = {"hidden": 16, "intermediate": 24, "decode": 3, "prefill": 5, "warmup": 1, "steps": 4}


@pytest.mark.data
@pytest.mark.slow
def test_figures_and_picture(tmp_path):
    saved, picture = tmp_path / "serving.json", tmp_path / "serving.svg"
    options = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    done = CliRunner().invoke(
        app, ["bench", "serving", *options, "--json", str(saved), "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.stderr
    result = json.loads(saved.read_text())
    assert (result["benchmark"], result["ranks"], result["hidden"], result["verified"]) == (
        "serving",
        2,
        16,
        True,
    )
    assert [*result["ways"]] == [*WAYS]
    tokens = [step["decode"] + step["prefill"] for step in result["steps"]]
    assert len(set(tokens)) == 4
    for way in result["ways"].values():
        assert way["wrong"] == 0
        assert len(way["steps_us"]) == 4
        assert way["tokens_per_s"] == pytest.approx(sum(tokens) / (1e-6 * sum(way["steps_us"])))
        assert (
            0
            < way["time_us"]["min"]
            <= way["time_us"]["median"]
            <= way["time_us"]["p99"]
            == max(way["steps_us"])
        )
    assert picture.stat().st_size > 1000
    assert "Verified: float64" in done.stdout
    draw(result | {"verified": False}, picture)
    assert "NOT VERIFIED" in picture.read_text()


def test_every_step_has_another_number_of_tokens():
    settings = ServingSettings(decode=7, prefill=20, warmup=3, steps=23)
    steps = stream(settings)
    assert sorted(map(sum, steps)) == [*range(2, 28)]
    assert all(1 <= step.decode <= 7 and 1 <= step.prefill <= 20 for step in steps)
    assert stream(settings) == steps
    assert stream(ServingSettings(decode=7, prefill=20, warmup=3, steps=23, seed=1)) != steps


def wrong_ways(world):
    threads, found = torch.get_num_threads(), {}
    with torch.no_grad():
        bench = Serving(ServingSettings(**SMALL, dtype="bfloat16"), world)
        for way in WAYS:
            right = bench.verify(way, 0).wrong
            if way != ALONE and world.rank == 1:  # whose products are then missing in the sums
                bench.ways[way].down.weight.to_local().zero_()
            elif way == ALONE and world.rank == 0:
                bench.ways[way] = lambda x: x
            found[way] = right, bench.verify(way, 1).wrong
        bench.made = {TORCH: torch.ones(2, 2), WEFT: torch.tensor([[1, 1.5], [torch.nan, 1]])}
        bench.agree()
    assert torch.get_num_threads() == threads
    return found, bench.apart


@pytest.mark.data
def test_wrong_results_are_noticed():
    for found, apart in on_ranks(wrong_ways, 2):
        assert [right for right, _ in found.values()] == [0, 0, 0]
        assert all(wrong > 10 for _, wrong in found.values())
        assert apart == {ALONE: 0, TORCH: 0, WEFT: 2}


def test_bad_options():
    runner = CliRunner()
    for options, words in [
        (["--hidden", "7"], "multiple of 2"),
        (["--intermediate", "9"], "multiple of 2"),
        (
            ["--decode", "2", "--prefill", "3", "--warmup", "1", "--steps", "4"],
            "4 numbers of tokens",
        ),
        (["--ranks", "1"], "--ranks"),
        (["--dtype", "float16"], "--dtype"),
    ]:
        outcome = runner.invoke(app, ["bench", "serving", *options])
        assert outcome.exit_code == 2
        assert words in " ".join(outcome.output.replace("│", " ").split())
