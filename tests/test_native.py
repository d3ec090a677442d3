"""The native core by itself, and the proof that the data tests depend on it."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What the rest moves data with; the tests of layers, benchmarks and examples rest on these and start slowly.
FLOOR = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "collectives", "onesided", "autograd", "failure")
MOVING = [ROOT / "tests" / f"test_{name}.py" for name in FLOOR]


@pytest.mark.timeout(300)
def test_the_core_on_threads_plainly_and_under_sanitizers():
    done = subprocess.run([ROOT / "native/tests/run.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed") == 3


@pytest.mark.timeout(600)
def test_a_core_that_moves_nothing_fails_every_data_test(tmp_path):
    """Build weft with a copy that does nothing and run tests marked ``data`` on it: none may pass."""
    python = _environment_with(tmp_path, "WEFT_MUTANT_NO_COPY")
    command = [
        python,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "-m",
        "data",
        "--tb=no",
        "-rp",
        *MOVING,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" not in summary, f"these tests do not notice that no data moves:\n{done.stdout}"
    failed = re.search(r"(\d+) failed", summary)
    assert failed is not None, done.stdout + done.stderr
    assert int(failed[1]) >= 30, summary


def _environment_with(folder, option):
    """A virtual environment that sees this one's packages, but has a weft of its own, built with `option`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    (next(folder.glob("venv/lib/python3*/site-packages")) / "parent.pth").write_text(sysconfig.get_path("purelib"))
    build = ["-C", f"cmake.define.{option}=ON", "-C", f"build-dir={folder / 'build'}"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *build, ROOT], check=True)
    return python
