"""The reference of the documentation is complete. `make docs` checks links and docstrings."""

import re
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs/reference"
OF_LAUNCHERS = {"WEFT_JOB", "WEFT_REPORTS"}  # set by `weft run` for its ranks, by nobody else


def listed() -> set[str]:
    """The names that the pages of the reference document."""
    pages = "".join(path.read_text() for path in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: weft\.([\w.]+)", pages, re.MULTILINE))


@pytest.mark.parametrize("name", sorted({*weft.__all__} - {"__version__", "huggingface"}))
def test_public_names_are_in_the_reference(name):
    assert name in listed()


def test_pages_have_the_same_name_in_the_navigation_as_on_top():
    """mkdocs takes the title of a page that has no name in the navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert re.findall(r"- (.+): \S+\.md", navigation) == ["Home"]


def test_environment_variables_are_in_the_reference():
    read = {
        name
        for path in (*(ROOT / "weft").rglob("*.py"), *(ROOT / "native").rglob("*.cpp"))
        for name in re.findall(r"\"(WEFT_[A-Z_]+)\"", path.read_text())
    }
    page = (REFERENCE / "environment.md").read_text()
    assert {"WEFT_CACHE", "WEFT_STORES"} <= read
    assert read - OF_LAUNCHERS == {*re.findall(r"^\| `(WEFT_[A-Z_]+)`", page, re.MULTILINE)}
