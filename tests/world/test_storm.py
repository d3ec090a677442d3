"""A short storm, with fixed seeds: every kind of fault, in shared memory and between hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import WHY_NOT


@pytest.mark.parametrize(
    ("places", "trials"), [("shared", 8), pytest.param("hosts", 2, marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT))]
)
def test_a_short_storm(places, trials):
    """Ranks are forked from a process of its own, which has no threads."""
    command = [sys.executable, Path(__file__).parents[1] / "storm.py", "--seed", "0", "--trials", str(trials), "--places", places]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{trials} trials from seed 0 on" in done.stdout
