"""An operator is one record: the two files of docs/new-operator.md, and no other line of weft, make
an operator that everything else knows.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from support.copied_weft import programs

import weft

DOCUMENT = Path(__file__).parents[2] / "docs/new-operator.md"
FILES = dict(re.findall(r"```py\n# (weft/\S+)\n+(.*?)```", DOCUMENT.read_text(), re.S))


@pytest.fixture
def run(tmp_path):
    """Runs a program of `support.new_operator` with a copy of weft that has the two files."""
    assert not any((Path(weft.__file__).parents[1] / path).exists() for path in FILES)
    return partial(programs(tmp_path, FILES), "new_operator")


def test_it_is_two_files():
    assert [*FILES] == ["weft/schedules/matmul_exchange.py", "weft/ops/matmul_exchange.py"]


SHOWN = {
    "plan": ["matmul_exchange / streamed on 3 ranks", "verified: no race, no deadlock"],
    "predict": ["matmul-exchange on cpu, PREDICTED: 4 ranks", "streamed", "sequential"],
    "bench": ["matmul-exchange: 2 ranks, 256x32x16", "compute", "Verified on every rank"],
    "tune": ["matmul-exchange 256x32x16", "streamed", "Stored: "],
}


@pytest.mark.slow
def test_it_is_public_and_known_to_ranks_and_commands(run):
    """The ranks compare their results with the definition, and repeat calls from the call cache.

    One test, since the program takes long, and each worker that has one of several would run it.
    """
    findings = run("print_findings")
    assert findings["public"]
    for ranks, text in findings["explained"].items():
        assert text.startswith(f"matmul_exchange over {ranks} ranks: ")
        assert "the fastest in the first calls of its class" in text
    for command, shown in SHOWN.items():
        code, printed = findings["printed"][command]
        assert code == 0, printed
        assert [text for text in shown if text not in printed] == []


@pytest.mark.slow
def test_compiled_graphs_have_it(run):
    """It replaces the all-to-alls that its record accepts, those of equal parts along dimension 0."""
    assert run("print_graphs") == [{"matmul_exchange": 1}] * 2
