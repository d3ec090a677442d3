"""Set-up of all tests: processes that they start find helpers too, new ranks find all loaded, and
the user's cache is left alone.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_here = Path(__file__).parent
_folders = [_here, *sorted({path.parent for path in _here.rglob("test_*.py")} - {_here})]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _folders), os.environ.get("PYTHONPATH", "")])
if (
    "WEFT_CACHE" not in os.environ
):  # workers take over that of the process that starts them: products are timed once for all
    _cache = tempfile.TemporaryDirectory(prefix="weft-test-cache-", ignore_cleanup_errors=True)
    os.environ["WEFT_CACHE"] = _cache.name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters in no order: by chance, two workers would collect them differently."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(
            isinstance(given, (set, frozenset)) for given in (*mark.args, *mark.kwargs.values())
        ):
            raise TypeError(
                f"{metafunc.definition.nodeid} takes its parameters from a set: give a list, which "
                "has an order"
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of new processes where tests run: with these tests, and the environment as
    it is before any of them.
    """
    if not (session.config.getoption("numprocesses", None) or session.config.option.collectonly):
        from support import (
            ranks,
        )  # takes seconds, which a process that runs no tests need not spend

        modules = {item.module.__name__ for item in session.items}
        # Those that load GPU kernels stay out: a rank says first whether it interprets these.
        ranks.serve(sorted(name for name in modules if not name.startswith("test_kernel")))
        ranks.look_through_less()


@pytest.fixture(params=[True, False], ids=["exchange", "attributes"])
def looked_at(request: pytest.FixtureRequest) -> Iterator[None]:
    """Native code looks at tensors as torch offers it from 2.10 on, and as it did before."""
    from weft import _native  # takes seconds, too
    from weft.checks import PLAIN
    from weft.world import memory

    _native.look_by(PLAIN, memory.LOOK if request.param else None)
    yield
    _native.look_by(PLAIN, memory.LOOK)
