"""The benchmark of vLLM: its checkpoints and figures, and its shortest form with vLLM itself. No
test asserts a time.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from dataclasses import asdict

import pytest
import torch
from rich.console import Console
from support.vllm_client import BIN, ROOT, needs_vllm

from weft_tools.bench.harness import host
from weft_tools.bench.vllm import __main__ as main
from weft_tools.bench.vllm import measure, models, picture, tables
from weft_tools.bench.vllm.engines import Answer, Engine


def run(*arguments):
    """The finished command in the environment of vLLM."""
    return subprocess.run(
        [BIN / "python", "-m", "weft_tools.bench.vllm", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")},
    )


@pytest.mark.data
@pytest.mark.slow
@needs_vllm
def test_the_same_tokens_on_every_variant(tmp_path):
    saved, picture = tmp_path / "vllm.json", tmp_path / "vllm.png"
    done = run("--short", "--neighbours", "0,1", "--json", saved, "--plot", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(saved.read_text())
    assert result["benchmark"] == "vllm"
    assert result["verified"]
    assert [row["variant"] for row in result["rows"]] == [
        "one-process",
        "shared-memory",
        "weft-communicator",
        "weft",
    ]
    for row in result["rows"]:
        assert row["same_tokens"] == row["compared_tokens"] == 8 * 33
        assert [*row["prefill_ms"]] == ["512"]
        assert [*row["first_ms"]] == [*row["token_ms"]] == [*row["tokens_per_s"]] == ["1", "8"]
        assert [*row["neighbours_ms"]] == ["0", "1"]
        assert all(0 < time["median"] <= time["p99"] for time in row["token_ms"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {"vllm", "weft", "torch"} <= {*result["versions"]}
    assert "Verified" in done.stdout


def result(neighbours=(0, 2)):
    """A made-up result: figures of variant v of model m are those of the first times a factor."""
    settings = measure.Settings(models=("llama", "mixtral"), neighbours=neighbours)
    rows = [
        {
            "model": model,
            "mode": mode,
            "variant": variant,
            "prefill_ms": {str(n): n / speed for n in settings.prefill},
            "first_ms": {str(n): 10 * n / speed for n in settings.batches},
            "token_ms": {
                str(n): {"median": 8 / speed, "p99": 90 / speed, "runs": 9}
                for n in settings.batches
            },
            "tokens_per_s": {str(n): 125 * n * speed for n in settings.batches},
            "neighbours_ms": {
                str(n): {"median": 8 * (1 + n) / speed, "p99": 1234.5 / speed, "runs": 9}
                for n in neighbours
                if model == "llama"
            },
            "same_tokens": 264,
            "compared_tokens": 264,
            "shared_top": 0.97,
        }
        for model in settings.models
        for mode in settings.modes
        for variant, speed in zip(settings.variants, (0.75, 0.5, 1.0, 1.25, 1.5), strict=True)
    ]
    return {
        "benchmark": "vllm",
        "ranks": 2,
        "rows": rows,
        "verified": True,
        "options": asdict(settings),
        "machine": host(2, 1),
        "versions": {"vllm": "0.32.0", "weft": "0.1.0"},
    }


def printed(found):
    console = Console(file=io.StringIO(), width=80)
    tables.print_tables(found, console)
    return console.file.getvalue()


def test_tables_line_up():
    text = printed(result())
    lines = [line for line in text.splitlines() if "1.25x" in line]
    assert len(lines) == 3 * 4 + 2, (
        "all kinds of figures for each model and mode, one for the first model"
    )
    by_table = [[place.end() for place in re.finditer("1.25x", line)] for line in lines]
    assert by_table[:4] == [by_table[0]] * 4
    assert [len(places) for places in by_table[::4]] == [5, 6, 3, 4]
    assert "8.0  1.00x" in text
    assert "NOT" not in text


def test_other_tokens_are_wrong_results():
    found = result()
    found["rows"][3]["same_tokens"] -= 1
    found["verified"] = all(map(measure.verified, found["rows"]))
    text = printed(found)
    assert "NOT VERIFIED" in text
    assert "weft-communicator WRONG" in text


def test_engines_that_end_are_not_verified(monkeypatch, tmp_path):
    def rows(model, mode, *_):
        if mode == "compiled":
            raise RuntimeError("an engine ended")
        return [row for row in result()["rows"] if (row["model"], row["mode"]) == (model, mode)]

    monkeypatch.setattr(models, "save", lambda model, folder: model)
    monkeypatch.setattr(measure, "_rows", rows)
    monkeypatch.setattr(measure, "version", lambda package: "0")
    found = measure.measure(measure.Settings(models=("llama",)), tmp_path)
    assert found["failed"] == {"llama, compiled": "an engine ended"}
    assert not found["verified"]
    assert "NOT VERIFIED" not in printed(found), "of the rows that are shown"


def test_an_engine_that_has_ended_says_why(tmp_path):
    engine = Engine({}, {}, tmp_path / "engine.log")
    engine.end()  # without a model it ends by itself
    with pytest.raises(RuntimeError, match=r"an engine ended:\n(.*\n)+.*Error"):
        engine.generate([[1]], tokens=1)


@pytest.mark.parametrize("neighbours", [(), (0, 2)])
def test_picture(tmp_path, neighbours):
    picture.draw(result(neighbours), tmp_path / "vllm.svg")
    text = (tmp_path / "vllm.svg").read_text()
    assert "NOT VERIFIED" not in text
    picture.draw(result(neighbours) | {"verified": False}, tmp_path / "vllm.svg")
    assert "NOT VERIFIED" in (tmp_path / "vllm.svg").read_text()


def test_only_steps_with_every_sequence_count():
    """A batch that begins with one sequence, whose second joins two steps later."""
    late = Answer([], [[1, 2, 4, 7, 11, 16], [4, 7, 11, 16, 22, 29]], [])
    assert measure._between(late) == [4, 5]
    assert measure._first(late) == 4


def test_likeliest_tokens_are_compared():
    expected = Answer([[1, 2]], [], [[[1, 5, 6, 7], [2, 8, 9, 3]]])
    other = Answer([[1, 4]], [], [[[1, 5, 6, 7], [4, 2, 1, 3]]])
    assert measure._compared(other, expected) == {
        "same_tokens": 1,
        "compared_tokens": 2,
        "shared_top": 0.75,
    }


def test_int8_weights_are_those_of_bfloat16():
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    plain = dict(models.tensors(models.MODELS["llama"] | small))
    int8 = dict(models.tensors(models.MODELS["llama-int8"] | small))
    assert {*int8} == {*plain, *(f"{name}_scale" for name in plain if "_proj" in name)}
    for name, weight in plain.items():
        again = int8[name].float() * int8.get(f"{name}_scale", 1)
        torch.testing.assert_close(
            again,
            weight.float(),
            rtol=0,
            atol=float(int8.get(f"{name}_scale", torch.zeros(1)).max()) / 1.9,
        )


def test_every_token_has_a_successor_of_its_own():
    tensors = dict(models.tensors(models.MODELS["llama"] | {"num_hidden_layers": 0}))
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    first, second = (embedding[:50].float() @ head.float().t()).topk(2).values.t()
    assert (first > 4 * second).all()
    successors = (embedding[:50].float() @ head.float().t()).argmax(dim=1)
    assert len({*successors.tolist()}) == 50


def test_names_are_checked():
    assert main.some(["eager", "compiled"])("compiled,eager") == ("compiled", "eager")
    with pytest.raises(ValueError, match="no 'fast': use some of eager,compiled"):
        main.some(["eager", "compiled"])("eager,fast")
    assert main.counts("0,12") == (0, 12)
    with pytest.raises(ValueError, match="0,1,2"):
        main.counts("1,-1")
