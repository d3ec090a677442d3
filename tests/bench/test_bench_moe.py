"""The benchmark of a mixture of experts: what tokens choose, its figures and pictures, and the
detection of wrong results. No test asserts a time.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft_tools.bench import mixtures, moe, page, repeat, views
from weft_tools.bench.settings.moe import MoeSettings

SMALL = MoeSettings(tokens=40, experts=3, top=2, width=8, inner=12, baseline="none")
ROUTINGS = ("uniform", "zipf", "hot", "empty")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_choose_different_experts(routing):
    settings = replace(SMALL, tokens=1000, routing=routing)
    chosen = mixtures.choices(settings, 2)
    assert chosen.shape == (2, 1000, 2)
    assert (chosen[..., 0] != chosen[..., 1]).all()
    counts = chosen.flatten().bincount(minlength=6)
    assert counts.sum() == 4000
    if routing == "uniform":
        assert counts.min() > 500
    elif routing == "zipf":  # the first experts of both ranks are chosen most
        assert counts[0] > counts[3] > counts[1] > counts[5] > 0
    elif routing == "hot":
        assert counts[0] == 2000
        assert counts[1:].min() > 250
    else:
        assert counts[1::2].sum() == 0
        assert counts[::2].min() > 1000
    assert torch.equal(mixtures.choices(settings, 2), chosen)
    assert not torch.equal(mixtures.choices(replace(settings, seed=1), 2), chosen)


def test_the_only_expert_is_hot():
    settings = replace(SMALL, experts=1, top=1, routing="hot")
    assert mixtures.choices(settings, 2).eq(0).all()


@pytest.mark.data
@pytest.mark.parametrize(
    ("more", "baseline"),
    [
        (["--routing", "empty"], ["gloo"]),
        (["--routing", "hot", "--link-gbps", "auto"], []),
        (["--replicated", "--dtype", "bfloat16"], ["gloo"]),
    ],
    ids=["own tokens", "over a link", "replicated"],
)
def test_figures_and_pictures(more, baseline, tmp_path):
    sizes = "--tokens 40 --experts 3 --width 8 --inner 12 --warmup 1 --iterations 2 --threads 1"
    files = {name: tmp_path / name for name in ("result.json", "times.svg", "lanes.svg")}
    saved, picture, lanes = map(str, files.values())
    written = ["--json", saved, "--plot", picture, "--timeline", lanes]
    done = CliRunner().invoke(app, ["bench", "moe", *sizes.split(), *more, *written])
    assert done.exit_code == 0, done.stderr
    result = json.loads(files["result.json"].read_text())
    assert (result["benchmark"], result["ranks"], result["verified"]) == ("moe", 2, True)
    assert [*result["times_ms"]] == ["compute", "communicate", "sequential", "overlapped"]
    assert [*result["baselines_ms"]] == baseline
    assert {*result["wrong"]} == {*result["times_ms"], *baseline}
    assert bool(result["link"]) == ("--link-gbps" in more)
    assert sum(result["chosen"]) == (80 if "--replicated" in more else 160)
    assert {*result["hidden_percent"]} == {"sequential", "overlapped"}
    assert "Verified: on every rank" in done.stdout
    for name in ("times.svg", "lanes.svg"):
        assert "<svg" in files[name].read_text()
    assert "overlapped" in files["lanes.svg"].read_text()
    shown = page.section(result, "result.json")
    assert shown.name == "moe"
    assert shown.limit is not None
    command = repeat.command(result)
    assert command.startswith("weft bench moe")
    assert all(word in command for word in more)


class Late(moe.OwnTokens):
    """A layer that leaves out the last choice of each token."""

    def prepare(self):
        super().prepare()
        self.scores = self.scores.clone()
        self.scores[:, -1] = 0


class Partial(moe.Replicated):
    """A layer that leaves out an expert."""

    def prepare(self):
        super().prepare()
        self.packed = weft.pack_experts(self.packed.gate_up[:2], self.packed.down[:2])


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (moe.OwnTokens, set()),
        (moe.Replicated, set()),
        (Late, {"sequential", "overlapped"}),
        (Partial, {"compute", "sequential", "overlapped"}),
    ],
)
def test_wrong_results_are_detected(layer, wrong):
    with torch.no_grad(), weft.init() as world:
        made = layer(SMALL, world)
        _, checks = views.verify(made, world, lambda: None)
    assert {name for name, check in checks.items() if check.wrong} == wrong
    assert all(check.max_error <= check.bound for check in checks.values() if not check.wrong)


def test_invalid_options_are_refused():
    for options, words in [
        (["--top", "9"], "choose among 8 experts"),
        (["--routing", "empty", "--experts", "1", "--top", "2"], "choose among 1 experts"),
        (["--routing", "warm"], "--routing"),
        (["--ranks", "1"], "--ranks"),
        (["--baseline", "nccl"], "use none, gloo"),
        (["--baseline", "gloo", "--link-gbps", "auto"], "does not pass the emulated link"),
    ]:
        outcome = CliRunner().invoke(app, ["bench", "moe", *options], terminal_width=500)
        assert outcome.exit_code == 2
        assert words in " ".join(outcome.output.replace("│", " ").split())
