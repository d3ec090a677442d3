"""The examples in the docstrings of the public names, each run as a reader would type it."""

from __future__ import annotations

import doctest
import io

import pytest
import torch

import weft

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# __version__ is a string; the docstrings of the packages are run with the documents' snippets
WITHOUT = {"__version__", "huggingface", "nn"}
SLOW = {"enable_async_tp", "launch"}  # import Inductor; start processes


@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in sorted({*weft.__all__} - WITHOUT)
    ],
)
def test_examples_of(name, monkeypatch):
    # a reader's process has one, which ends with it
    monkeypatch.setattr("weft.world.registry.default", None)
    finder = doctest.DocTestFinder(recurse=False)
    [found] = finder.find(getattr(weft, name), name, globs={"torch": torch, "weft": weft})
    assert found.examples, f"{name} has no example"
    assert "\nExamples:\n" in weft_docstring(name), f"{name} has no section Examples"
    told = io.StringIO()
    assert not doctest.DocTestRunner(optionflags=OPTIONS).run(found, out=told.write).failed, (
        told.getvalue()
    )


def weft_docstring(name):
    """The docstring of a public name, without its indentation."""
    return "\n".join(line.strip() for line in getattr(weft, name).__doc__.splitlines())
