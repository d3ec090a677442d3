"""The proof that the tests marked ``data`` depend on data being moved."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import nanobind
import pytest

ROOT = Path(__file__).parents[2]
# The tests of the operations that move data; the tests of layers, benchmarks and examples build on
# these operations, and start slowly.
FLOOR = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "collectives",
    "onesided",
    "autograd",
    "failure",
)
MOVING = sorted(path for name in FLOOR for path in (ROOT / "tests").rglob(f"test_{name}.py"))
# Allocating its memory takes seconds, and its puts are the same as in other tests.
LARGE = "tests/world/test_onesided.py::test_segments_over_2_gib"
# Imported by every Python at its start, before weft is found.
SITECUSTOMIZE = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, *_):
        return spec_from_file_location(name, {core!r}) if name == "weft._native" else None

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.slow
def test_a_core_that_moves_nothing_fails_every_data_test(tmp_path):
    """Build a core whose copies do nothing and run tests marked ``data`` on it: none may pass."""
    core = tmp_path / "core.so"
    build(core, "WEFT_MUTANT_NO_COPY")
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(core=str(core)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    options = [
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "-m",
        "data",
        "--deselect",
        LARGE,
        "--tb=no",
        "-rp",
    ]
    command = [sys.executable, "-m", "pytest", *options, *MOVING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" not in summary, f"these tests do not notice that no data moves:\n{done.stdout}"
    failed = re.search(r"(\d+) failed", summary)
    assert failed is not None, done.stdout + done.stderr
    assert int(failed[1]) >= 30, summary


def build(core: Path, option: str) -> None:
    """Compile the native core with `option`, all sources in one unit, without optimization, which
    saves time.
    """
    folders = [
        sysconfig.get_path("include"),
        nanobind.include_dir(),
        ROOT / "native",
        Path(nanobind.__file__).parent / "ext/robin_map/include",
    ]
    sources = "".join(
        f'#include "{source}"\n'
        for source in sorted((ROOT / "native").glob("*/*.cpp"))
        if source.parent.name != "tests"
    )
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
    ]
    command += [
        f"-D{option}",
        *(f"-I{folder}" for folder in folders),
        "-x",
        "c++",
        "-",
        "-o",
        str(core),
    ]
    command += ["-x", "none", str(Path(nanobind.source_dir()) / "nb_combined.cpp")]
    done = subprocess.run(command, input=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
