"""The public interface is the one that is listed: changes of it are deliberate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import api

import weft

LISTED = api.LISTED.read_text().splitlines()


def test_the_interface_is_the_listed_one():
    """A name that is gone, or a signature that has changed, breaks programs: CONTRIBUTING says
    when that may be. `make api` lists the interface anew.
    """
    assert api.interface().splitlines() == LISTED


@pytest.mark.parametrize("name", sorted({*weft.__all__} - {"__version__", "huggingface", "nn"}))
def test_every_public_name_is_listed(name):
    beginnings = (f"class weft.{name}(", f"weft.{name}(")
    assert any(line.startswith(beginnings) for line in LISTED)


def test_a_changed_default_is_a_changed_line():
    def before(x: int, *, op: str = "sum") -> None: ...

    def after(x: int, *, op: str = "max") -> None: ...

    assert api.signature(before) == "(x: int, *, op: str = 'sum') -> None"
    assert api.signature(after) != api.signature(before)


@pytest.mark.slow
def test_every_process_lists_the_same():
    command = [sys.executable, "-c", "from support import api; print(api.interface(), end='')"]
    tests = Path(__file__).parent
    listed = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=100)
    assert listed.stdout.splitlines() == LISTED
