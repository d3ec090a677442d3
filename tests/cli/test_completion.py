"""Completion of words in shells: commands, operators, profiles of machines, algorithms."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from weft.cli import app


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["weft", "doc"], {"doctor"}),
        (["weft", "doctor", "--fl"], {"--flight"}),
        (
            ["weft", "predict", "all-g"],
            {"all-gather", "all-gather-matmul", "all-gather-matmul-reduce-scatter"},
        ),
        (["weft", "predict", "--machine", "h100"], {"h100-nvlink-8", "h100-nvlink-8/nccl"}),
        (["weft", "predict", "matmul-all-reduce", "--algorithm", "p"], {"push", "put"}),
        (["weft", "plan", "show", "all-reduce", "--algorithm", "on"], {"one_shot"}),
        (["weft", "bench", "all-gather-matmul", "--dtype", "b"], {"bfloat16"}),
    ],
)
def test_words_are_completed(words, expected):
    environment = {
        "_WEFT_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(app, prog_name="weft", env=environment)
    assert set(done.output.split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell):
    environment = {"_WEFT_COMPLETE": f"source_{shell}"}
    done = CliRunner().invoke(app, prog_name="weft", env=environment)
    assert f"_WEFT_COMPLETE=complete_{shell}" in done.output
