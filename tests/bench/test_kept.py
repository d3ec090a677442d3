"""The table of a machine's results: a line for each case, whose figures are read back."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/fixtures/results"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from kept import load

    return load


def test_every_kind_of_result_has_its_medians_in_the_table(load, tmp_path):
    files = [RESULTS / f"{name}.json" for name in ("streaming", "beside", "gather", "vllm")]
    files.append(RESULTS / "p2p-earlier.json")
    program = [sys.executable, ROOT / "benchmarks/kept.py", *files]
    table = tmp_path / "machine.csv"
    table.write_text(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    kept = load(table)
    assert [*kept] == [file.stem for file in files]
    assert kept["streaming"]["all-gather-matmul"]["speedup"] == 1.8437
    assert kept["beside"]["overlap"]["overlapped"] == 18.185
    assert kept["gather"]["all_gather weft (plain) in place 8388608"]["time_us"] > 0
    assert kept["vllm"]["llama eager weft"]["token_ms 1 median"] > 0
    assert kept["p2p-earlier"]["get weft 4096"].keys() == {"time_us", "algbw_gbps", "cycles"}
