"""The tables that `make docs` makes from the source."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generator(request, monkeypatch):
    """The module of this name in .ci/."""
    spec = importlib.util.spec_from_file_location(request.param, ROOT / f".ci/{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("generator", ["constants"], indirect=True)
def test_constants_are_listed_with_machine_and_gain(generator):
    source = '''
A = 1 << 4
"""Rows of a piece.

Measured on a 2-core machine: twice
as fast.
"""
B = 2
"""Bytes of a format."""
C = 3
'''
    [constant] = generator.of_python("a.py", source)
    assert constant == (
        "a.py",
        "A",
        "1 << 4",
        "Rows of a piece.",
        "a 2-core machine",
        "twice as fast.",
    )
    source = """
// The most rows.
// Measured on a 2-core machine: twice as fast.
constexpr size_t kA = size_t{8} << 10;
// bytes of a format
constexpr int kB = 2;
"""
    [constant] = generator.of_native("a.hpp", source)
    assert constant == (
        "a.hpp",
        "kA",
        "8 << 10",
        "The most rows.",
        "a 2-core machine",
        "twice as fast.",
    )
    assert {"SHARED_SLOTS", "kShared"} <= {constant.name for constant in generator.constants()}


@pytest.mark.parametrize("generator", ["error_index"], indirect=True)
def test_errors_are_listed_by_class(generator):
    source = """
raise PeerLost(f"rank {rank} failed" if rank else "none")
raise ValueError("a wrong " f"{name}: " + text)
raise error
"""
    assert [*generator.of_module("a.py", source, {"PeerLost"})] == [
        ("PeerLost", "a.py", "rank … failed"),
        ("PeerLost", "a.py", "none"),
        ("ValueError", "a.py", "a wrong …: …"),
    ]
    assert {"PlanError", "PeerTimeout", "ValueError"} <= {
        error.kind for error in generator.errors()
    }
    page = "| `no text of weft has this message` | | |\n| `there is no lane …` | | |\n"
    assert generator.outdated(page) == ["no text of weft has this message"]
