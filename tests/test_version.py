"""The version of both distributions is that of the tag, and a later development version elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
SOURCES = [
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "native/CMakeLists.txt",
    "weft/version.py",
    "tools/pyproject.toml",
    "tools/README.md",
    "tools/LICENSE",
    ".git_archival.txt",
    ".gitattributes",
    ".gitignore",
]
METADATA = """
import sys, tempfile
from pathlib import Path
from scikit_build_core.build import prepare_metadata_for_build_wheel
folder = Path(tempfile.mkdtemp())
sys.stderr.write((folder / prepare_metadata_for_build_wheel(str(folder)) / "METADATA").read_text())
"""
DEVELOPED = ("0.9.0.dev0", "0.9.0.dev0")


def git(folder, *command):
    alone = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    who = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{
            f"GIT_{role}_{what}": "x"
            for role in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    subprocess.run(
        ["git", "-C", folder, *command], env=alone | who, check=True, stdout=subprocess.DEVNULL
    )


def commit(folder, name):
    (folder / name).touch()
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", name)


def about(folder):
    """The metadata that a build of the sources in a folder has."""
    clean = {name: text for name, text in os.environ.items() if "SETUPTOOLS_SCM" not in name}
    done = subprocess.run(
        [sys.executable, "-c", METADATA],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def versions(folder):
    """The version of weft, and that of the tools, who need a weft of theirs."""
    own = re.search(r"^Version: (.*)$", about(folder), re.M)[1]
    tools = about(folder / "tools")
    version = re.search(r"^Version: (.*)$", tools, re.M)[1]
    assert f"\nRequires-Dist: torch-weft[cli]=={version}\n" in tools
    return own, version


@pytest.fixture
def sources(tmp_path):
    """The files that decide on a version, without git."""
    folder = tmp_path / "sources"
    for name in SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture
def repository(sources):
    """These files in a repository without tags, with one commit."""
    git(sources, "init", "--quiet")
    commit(sources, "first")
    return sources


def test_an_archive_without_git_is_of_the_version_in_development(sources):
    assert versions(sources) == DEVELOPED
    written = (sources / "weft/_version.py").read_text()
    assert written == '__version__ = "0.9.0.dev0"\n'


@pytest.mark.slow
def test_commits_count_where_there_is_no_tag(repository):
    commit(repository, "second")
    assert versions(repository) == ("0.9.0.dev2", "0.9.0.dev2")


def test_a_tag_gives_the_version(repository):
    git(repository, "tag", "v0.9.0")
    assert versions(repository) == ("0.9.0", "0.9.0")


@pytest.mark.slow
def test_after_a_tag_the_next_version_is_developed(repository):
    git(repository, "tag", "v0.9.0")
    commit(repository, "second")
    assert versions(repository) == ("0.9.1.dev1", "0.9.1.dev1")


@pytest.mark.slow
@pytest.mark.parametrize(("tags", "version"), [(["v0.9.0"], "0.9.0"), ([], "0.9.0.dev0")])
def test_an_archive_of_git_has_the_version_of_its_tag(repository, tmp_path, tags, version):
    for tag in tags:
        git(repository, "tag", tag)
    git(repository, "archive", "--output", tmp_path / "archive.tar", "HEAD")
    shutil.unpack_archive(tmp_path / "archive.tar", tmp_path / "archive")
    assert versions(tmp_path / "archive") == (version, version)


def test_the_build_has_written_the_version():
    assert weft.__version__ != "0+unbuilt"


def test_the_version_in_development_has_its_changes_and_its_citation():
    """They name the version that the next tag gives."""
    for name in ("pyproject.toml", "tools/pyproject.toml"):
        text = (ROOT / name).read_text()
        assert re.search(r'^fallback_version = "(.*)"', text, re.M)[1] == DEVELOPED[0]
    next_one = DEVELOPED[0].removesuffix(".dev0")
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == next_one
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == next_one
