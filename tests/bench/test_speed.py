"""The comparison of two commits: when a call became slower, and that all calls run."""

import io
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speed"
speed = runpy.run_path(str(FOLDER / "__main__.py"), run_name="speed")
GROUPS = runpy.run_path(str(FOLDER / "calls.py"), run_name="calls")["GROUPS"]


def test_groups_are_those_that_can_be_measured():
    assert speed["GROUPS"] == tuple(GROUPS)


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


@pytest.mark.slow
@pytest.mark.parametrize("group", [*GROUPS])
def test_every_group_runs(group):
    weft = Path(sys.executable).with_name("weft")
    command = [weft, "run", "-n", "2", FOLDER / "calls.py", group, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout.splitlines()[-1])
    assert times
    assert min(times.values()) > 0
