"""The native core's own tests, in a program of their own."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_core_on_threads_plainly_and_under_sanitizers():
    done = subprocess.run([ROOT / "native/tests/run.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 3
