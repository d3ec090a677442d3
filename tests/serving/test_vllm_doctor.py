"""Findings of `weft doctor --vllm` in environments with and without vLLM, and with faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.vllm_client import BIN, ROOT, needs_vllm
from test_vllm_plugin import PLATFORM, described, modules

from weft import installation
from weft.doctor import vllm as doctor

START = "from weft.cli import app; app(['doctor', '--vllm'])"


def report(*folders, python=sys.executable, **environ):
    """The exit status and the lines of the command, with these folders first on its path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(python), "-c", START],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environ | {"PYTHONPATH": path},
    )
    return done.returncode, done.stdout.splitlines()


def wrong(lines):
    """The problems among a report's lines."""
    return [line.removeprefix("wrong: ") for line in lines if line.startswith("wrong: ")]


@pytest.mark.slow
def test_an_environment_without_vllm(tmp_path):
    status, lines = report(tmp_path)
    assert status == 1
    [problem] = wrong(lines)
    install = installation.command("vllm")
    assert problem.startswith(f"there is no vLLM: {install} --extra-index-url ")


def fake(folder, *, on_cpus=True, version="0.99.0+cpu", source=PLATFORM):
    """A package vllm that has a platform, and no more."""
    described(folder, "vllm", version)
    modules(folder, {"vllm": "", "vllm.platforms": source.format(on_cpus=on_cpus)})


@pytest.mark.slow
def test_a_version_that_does_not_fit(tmp_path):
    fake(tmp_path)
    status, lines = report(tmp_path)
    assert status == 1
    assert wrong(lines)[-1] == (
        "vLLM 0.99.0+cpu does not fit the plug-in: No module named 'vllm.distributed'; weft is "
        "tested with vLLM 0.32"
    )


def test_a_build_for_gpus_with_a_library_of_another_torch(tmp_path):
    fake(tmp_path, on_cpus=False, version="0.32.0")
    described(tmp_path, "torchvision", "0.1.0")
    fault = "raise RuntimeError('operator torchvision::nms does not exist')"
    modules(tmp_path, {"torchvision": fault})
    status, lines = report(tmp_path)
    assert status == 1
    *_, vision, build = wrong(lines)
    assert vision.startswith("torchvision 0.1.0 does not fit torch ")
    assert "(operator torchvision::nms does not exist): pip install " in vision
    assert build.startswith("vllm 0.32.0 does not run on CPUs here, and weft's plug-in is for CPUs")


@pytest.mark.slow
def test_a_vllm_that_cannot_be_imported(tmp_path):
    fake(tmp_path, source="raise OSError('libnuma.so.1: no such file')")
    status, lines = report(tmp_path)
    assert status == 1
    assert "vLLM cannot be imported: OSError: libnuma.so.1: no such file" in wrong(lines)


@pytest.mark.slow
def test_a_vllm_whose_imports_fail(tmp_path):
    fake(tmp_path)
    modules(tmp_path, {"vllm.distributed": "raise RuntimeError('no operator torchvision::nms')"})
    status, lines = report(tmp_path)
    assert status == 1
    assert wrong(lines)[-1] == "vLLM cannot be imported: RuntimeError: no operator torchvision::nms"


@pytest.mark.parametrize(
    ("found", "environ", "here", "problem"),
    [
        (True, {}, "found, selected: VLLM_PLUGINS=unset", ""),
        (True, {"VLLM_PLUGINS": "lora,weft"}, "found, selected: VLLM_PLUGINS=lora,weft", ""),
        (True, {"VLLM_PLUGINS": ""}, "found, not selected", "VLLM_PLUGINS leaves weft out: unset"),
        (True, {"VLLM_PLUGINS": "weft2"}, "found, not selected", "VLLM_PLUGINS leaves weft out"),
        (False, {}, "not found", "weft is installed without its entry points: install it again"),
    ],
)
def test_the_plug_in_is_found_and_selected(found, environ, here, problem):
    finding = doctor.plugin(found, environ)
    assert finding.here.startswith(here)
    assert finding.problem.startswith(problem)
    assert bool(finding.problem) == bool(problem)


@pytest.mark.parametrize(
    ("value", "here", "problem"),
    [
        (None, "layers", ""),
        ("communicator", "communicator", ""),
        ("off", "off", "WEFT_VLLM=off leaves all to vLLM: unset it"),
        ("on", "on", "WEFT_VLLM is off, communicator or layers; got 'on'"),
    ],
)
def test_what_is_to_run_on_weft(value, here, problem):
    environ = {"WEFT_VLLM": value} if value else {}
    assert doctor.selected(environ) == ("WEFT_VLLM", here, problem)


@pytest.mark.parametrize(
    ("value", "here", "problem"),
    [
        (None, '1 here, cores 0-3; for more ranks give a list, such as "0-1|2-3"', ""),
        ("0-1|2-3", "cores 0-3, 2 rank(s)", ""),
        ("0|1|2", "cores 0-3, 3 rank(s)", ""),
        (
            "0-1|1-2",
            "2 rank(s)",
            "0-1|1-2 gives core(s) 1 to several ranks: give cores of 0-3, as ",
        ),
        ("0-1|4-7", "2 rank(s)", "0-1|4-7 has core(s) 4-7, which this process may not use: give "),
        ("0-1|", "2 rank(s)", "0-1| is no list of cores for each rank: give cores of 0-3, as in "),
        ("all", "1 rank(s)", "all is no list of cores for each rank: give cores of 0-3, as in "),
        ("nobind", "OMP_NUM_THREADS=unset, cores 0-3", "nobind lets each rank compute on all "),
    ],
)
def test_threads_of_ranks(value, here, problem):
    environ = {"VLLM_CPU_OMP_THREADS_BIND": value} if value else {}
    finding = doctor.threads(environ, range(4), 1)
    assert finding.here.endswith(here)
    assert problem in finding.problem
    assert bool(finding.problem) == bool(problem)


def test_threads_that_are_counted_need_no_list():
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}
    assert not doctor.threads(environ, range(4), 1).problem
    assert '"0"' in doctor.threads({}, [0], 1).here


def test_shared_memory_of_a_container():
    assert not doctor.shared_memory(4 << 30, 3 << 30).problem
    assert doctor.shared_memory(64 << 20, 64 << 20).problem.startswith(
        "/dev/shm has 64 MiB, 64 MiB of them free; ranks need 512 MiB or more: give the container"
    )


@pytest.mark.slow
@needs_vllm
def test_a_vllm_that_runs_on_weft():
    core = next((ROOT / "weft").glob("_native*.so"), None)
    status, lines = report(
        *[ROOT] * bool(core), python=BIN / "python", VLLM_CPU_OMP_THREADS_BIND="0"
    )
    assert status == 0, lines
    assert lines[-1] == "Nothing is wrong: vLLM's ranks run on weft."
