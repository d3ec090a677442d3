"""The limit of a pipeline, from the times of its stages."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


def test_the_limit_has_the_passes_for_which_a_stage_waits():
    limit = runpy.run_path(str(FILE), run_name="pipeline")["limit"]
    first = {"own": 13.0, "forward": 1.0, "backward": 2.0}
    second = {"own": 20.0, "forward": 1.5, "backward": 2.5}
    # one millisecond besides passes; a forward pass, four pairs of the second stage, a backward pass
    assert limit(first, second) == pytest.approx(1.0 + 1.0 + 4 * 4.0 + 2.0)


@pytest.mark.slow
def test_the_limit_is_measured():
    done = subprocess.run([sys.executable, FILE, "2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "gloo",
        "weft",
        "free",
        "limit",
    ]
