"""The benchmark of serving: its stream of steps, its figures, the detection of wrong results, and
its picture. No test asserts a time.
"""

from __future__ import annotations

import json

import pytest
import torch
from support.ranks import beside_gloo, on_ranks
from typer.testing import CliRunner

import weft.nn
from weft.cli import app
from weft_tools.bench.serving import ALONE, IMPLEMENTATIONS, TORCH, WEFT, Serving, draw, stream
from weft_tools.bench.settings.serving import ServingSettings

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
    assert [*result["ways"]] == [*IMPLEMENTATIONS]
    tokens = [step["decode"] + step["prefill"] for step in result["steps"]]
    assert len(set(tokens)) == 4
    for figures in result["ways"].values():
        assert figures["wrong"] == 0
        assert len(figures["steps_us"]) == 4
        assert figures["tokens_per_s"] == pytest.approx(
            sum(tokens) / (1e-6 * sum(figures["steps_us"]))
        )
        assert (
            0
            < figures["time_us"]["min"]
            <= figures["time_us"]["median"]
            <= figures["time_us"]["p99"]
            == max(figures["steps_us"])
        )
    assert picture.stat().st_size > 1000
    assert "Verified: float64" in done.stdout
    draw(result | {"verified": False}, picture)
    assert "NOT VERIFIED" in picture.read_text()


def test_steps_have_different_numbers_of_tokens():
    settings = ServingSettings(decode=7, prefill=20, warmup=3, steps=23)
    steps = stream(settings)
    assert sorted(map(sum, steps)) == [*range(2, 28)]
    assert all(1 <= step.decode <= 7 and 1 <= step.prefill <= 20 for step in steps)
    assert stream(settings) == steps
    assert stream(ServingSettings(decode=7, prefill=20, warmup=3, steps=23, seed=1)) != steps


def wrong_implementations(world):
    threads, found = torch.get_num_threads(), {}
    with torch.no_grad():
        bench = Serving(ServingSettings(**SMALL, dtype="bfloat16"), world)
        for name in IMPLEMENTATIONS:
            right = bench.verify(name, 0).wrong
            if name != ALONE and world.rank == 1:  # the sums then lack the products of rank 1
                bench.implementations[name].down.weight.to_local().zero_()
                if name == WEFT:
                    weft.nn.freeze(bench.implementations[name])
            elif name == ALONE and world.rank == 0:
                bench.implementations[name] = lambda x: x
            found[name] = right, bench.verify(name, 1).wrong
        bench.made = {TORCH: torch.ones(2, 2), WEFT: torch.tensor([[1, 1.5], [torch.nan, 1]])}
        bench.compare_results()
    assert torch.get_num_threads() == threads
    return found, bench.mismatches


@pytest.mark.data
def test_wrong_results_are_detected():
    for found, mismatches in on_ranks(wrong_implementations, 2, context=beside_gloo):
        assert [right for right, _ in found.values()] == [0, 0, 0]
        assert all(wrong > 10 for _, wrong in found.values())
        assert mismatches == {ALONE: 0, TORCH: 0, WEFT: 2}


def test_invalid_options_are_refused():
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
