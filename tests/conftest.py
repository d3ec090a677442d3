"""Set-up of all tests: helpers are importable, new ranks find them loaded, and nothing is written to the user's cache."""

import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("WEFT_CACHE", tempfile.mkdtemp(prefix="weft-test-cache-"))

import ranks  # noqa: F401  (says what the server of new processes loads, before anyone else starts it)

forkserver.ensure_running()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters in no order: by chance, two workers would collect them differently."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(isinstance(given, (set, frozenset)) for given in (*mark.args, *mark.kwargs.values())):
            raise TypeError(f"{metafunc.definition.nodeid} takes its parameters from a set: give a list, which has an order")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest begins first: at the end one process would work on it alone."""
    items.sort(key=lambda item: item.path.name != "test_native.py")
