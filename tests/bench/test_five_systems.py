"""The page on five systems: its tables, and the pictures of all pages, come from commands."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = [
    ROOT / "benchmarks/results" / f"{machine}.csv"
    for machine in ("intel-xeon-amx-2-cores", "amd-epyc-zen4-2-cores")
]


@pytest.fixture(scope="module")
def five_systems():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("five_systems")


def test_the_page_has_the_tables_of_the_kept_results(five_systems):
    page = five_systems.PAGE.read_text()
    made = five_systems.tables(KEPT)
    assert five_systems.with_tables(page, made) == page
    made[4][0] = made[4][0].replace("8.1", "8.2")
    assert five_systems.with_tables(page, made) == page.replace("| 8.1 | 6.4", "| 8.2 | 6.4")


def test_a_missing_result_is_named(five_systems):
    with pytest.raises(SystemExit, match=r"no result copies in .*: name the tables with all"):
        five_systems.tables(KEPT[:1])


def test_published_bandwidths_are_in_the_unit_of_weft(five_systems):
    [gathers] = five_systems.tables(KEPT)[4]
    assert "| 2 MiB | 148, 98, 118 |" in gathers  # 138, 91, 110 GiB/s


def test_every_picture_of_the_pages_is_drawn_by_one_command():
    program = (ROOT / "benchmarks/images.sh").read_text()
    drawn = {*re.findall(r"\$images/([\w-]+\.\w+)", program)}
    assert drawn == {file.name for file in (ROOT / "docs/images").iterdir()}
