"""Workflows, the conda recipe and the image say the same as pyproject.toml does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from weft_tools.predict.machine import tomllib

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RECIPE = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # conda-forge's


def project(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def bounds(requirements):
    """The names with their bounds, without markers."""
    plain = (re.sub(r"\s+", "", each.partition(";")[0]) for each in requirements)
    found = (re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", each) for each in plain)
    return {NAMES.get(each[1], each[1]): each[2] for each in found}


def run_requirements(output):
    return bounds(each for each in output["requirements"]["run"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_the_hash_of_a_commit(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each)


def test_all_workflows_pin_an_action_alike():
    pins = {use for path in WORKFLOWS for use in re.findall(r"uses: (.*)", path.read_text())}
    actions = [pin.partition("@")[0] for pin in pins]
    assert len(actions) == len({*actions})


def test_ci_runs_the_oldest_and_the_newest_torch_and_python():
    about = project(".")["project"]
    pythons = [each.rpartition(" ")[2] for each in about["classifiers"] if ":: 3." in each]
    torches = re.findall(r'"(\d+\.\d+\.\d+)"', (ROOT / ".ci/backends.py").read_text())
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    ends = jobs["ends"]["strategy"]["matrix"]["include"]
    assert ends == [
        {
            "python": pythons[0],
            "torch": min(torches, key=lambda text: [*map(int, text.split("."))]),
        },
        {
            "python": pythons[-1],
            "torch": max(torches, key=lambda text: [*map(int, text.split("."))]),
        },
    ]
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    for job in ("wheels", "try", "try-musl"):
        assert release[job]["strategy"]["matrix"]["python"] == pythons
    assert pythons[0] == about["requires-python"].removeprefix(">=")


def test_the_recipe_needs_what_the_projects_need():
    library, tools = RECIPE["outputs"]
    about = project(".")["project"]
    needed = bounds(about["dependencies"] + about["optional-dependencies"]["cli"])
    compiler = {"python": "", "cxx-compiler": ""}
    assert run_requirements(library) == needed | compiler
    [template] = [each for each in project("tools")["tool"]["dynamic-metadata"] if "result" in each]
    needed = bounds(template["result"]) | {"torch-weft": "==${{version}}", "python": ">=3.10"}
    assert run_requirements(tools) == needed
    for output, folder in ((library, "."), (tools, "tools")):
        requires = bounds(project(folder)["build-system"]["requires"])
        assert requires.items() <= bounds(output["requirements"]["host"]).items()


def test_the_recipe_is_of_the_version_in_development():
    tool = project(".")["tool"]["setuptools_scm"]
    assert f"{RECIPE['context']['version']}.dev0" == tool["fallback_version"]
