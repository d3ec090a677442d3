"""The comparison of two commits: when a call became slower, and that all calls run."""

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "benchmarks"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(FOLDER)
    speed = runpy.run_path(str(FOLDER / "speed.py"), run_name="speed")
GROUPS = speed["GROUPS"]


@pytest.mark.parametrize(
    ("base", "now", "slower"),
    [
        ([10.0, 10.0, 10.0], [10.4, 10.4, 10.4], False),
        ([10.0, 10.0, 10.0], [11.0, 11.0, 11.0], True),
        ([10.0, 11.0, 12.0], [12.0, 11.0, 11.9], False),  # in one round only
        ([10.0, 10.0, 20.0], [11.0, 11.0, 11.0], True),
    ],
)
def test_a_call_is_slower_in_the_median_and_in_most_rounds(base, now, slower):
    row = speed["Row"]("collectives", "all_reduce 8 B", base, now)
    assert row.slower == slower
    printed = io.StringIO()
    Console(width=100, file=printed).print(speed["table"]([row], "0123456789abcdef"))
    assert ("SLOWER" in printed.getvalue()) == slower
    assert "012345678 us" in printed.getvalue()


def test_the_table_of_a_kind_of_processor_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(speed["kept"].__globals__, "KEPT", tmp_path)
    monkeypatch.setattr(speed["cache"], "processor", lambda: "A (R) Processor:25:17")
    rows = [
        speed["Row"]("collectives", "all_reduce 8 B", [10.0], [8.0]),
        speed["Row"]("messages", "weft ring 8 B", [10.0], [20.0]),
    ]
    about = {
        "base": "0123456789abcdef",
        "commit": "fedcba9876543210",
        "changed": True,
        "ranks": 2,
        "date": "2026-11-27T00:00:00+00:00",
        "machine": {"cpu": "A (R) Processor", "cores": 2},
        "versions": {"weft": "0", "torch": "1"},
    }
    file = speed["kept"](rows, about)
    assert file == tmp_path / "a-r-processor-25-17-2-cores.md"
    text = file.read_text()
    assert "`make speed BASE=012345678` at fedcba987 with changes, 2 ranks" in text
    assert "| collectives: all_reduce 8 B | 10.00 | 8.00 | 1.25 |" in text
    assert "| messages: weft ring 8 B | 10.00 | 20.00 | **0.50** |" in text


@pytest.mark.slow
@pytest.mark.parametrize("group", [*GROUPS])
def test_every_group_runs(group):
    weft = Path(sys.executable).with_name("weft")
    command = [weft, "run", "-n", "2", FOLDER / "calls.py", group, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    assert times
    assert min(times.values()) > 0
