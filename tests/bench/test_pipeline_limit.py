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
    # ten milliseconds besides all passes of a rank, of which one stage's of a piece precede the other's
    assert limit(1, first, second) == pytest.approx(10.0 + 3.0 / 4 + 4.0)
    assert limit(2, first, second) == pytest.approx(10.0 + 3.0 / 8 + 4.0)


@pytest.mark.slow
def test_the_limit_is_measured():
    done = subprocess.run([sys.executable, FILE, "2"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kinds = ["gloo", "weft", "free", "limit"]
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert shown == kinds * 2  # of both schedules
