"""Set-up of all tests: started processes find the helpers, new ranks have all modules imported, the
user's cache is left alone, and slow tests have a longer time limit.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

_here = Path(__file__).parent
_folders = [_here, *sorted({path.parent for path in _here.rglob("test_*.py")} - {_here})]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _folders), os.environ.get("PYTHONPATH", "")])
# Workers inherit the cache of the process that starts them: products are timed once for all.
if "WEFT_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="weft-test-cache-", ignore_cleanup_errors=True)
    os.environ["WEFT_CACHE"] = _cache.name
    # compiled for all sessions, since that takes half a minute
    _compiled = _here.parent / "build" / "torch"
    _compiled.mkdir(parents=True, exist_ok=True)
    Path(_cache.name, "torch").symlink_to(_compiled)

for _name in ("COLUMNS", "LINES"):  # readline sets them in the process that starts workers
    os.environ.pop(_name, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("untimed", deadline=None)  # the machine may be busy
settings.load_profile("untimed")

SLOW = 600  # seconds that a slow test may take, a multiple of what it does on idle cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters from a set, whose order differs between workers."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(
            isinstance(values, (set, frozenset)) for values in (*mark.args, *mark.kwargs.values())
        ):
            raise TypeError(
                f"{metafunc.definition.nodeid} takes its parameters from a set: give a list, which "
                "has an order"
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of new processes where tests run, with the modules of these tests and the
    environment of before the first test.
    """
    if not (session.config.getoption("numprocesses", None) or session.config.option.collectonly):
        # importing torch takes seconds, needless without tests
        from support import (
            ranks,
        )

        modules = {item.module.__name__ for item in session.items}
        # Modules that import GPU kernels are not preloaded: a rank first chooses whether to
        # interpret them.
        ranks.serve(sorted(name for name in modules if not name.startswith("test_kernel")))
        ranks.collect_less_often()
        if any("process_group" in item.nodeid for item in session.items):
            # here, since tests have time limits
            from weft.process_group import compiled

            compiled.backend()


@pytest.fixture(params=[True, False], ids=["exchange", "attributes"])
def tensor_access(request: pytest.FixtureRequest) -> Iterator[None]:
    """Native code reads tensors by the exchange API of torch 2.10 and later, and by attributes."""
    from weft import _native
    from weft.checks import LOOK, PLAIN

    _native.set_tensor_access(PLAIN, LOOK if request.param else None)
    yield
    _native.set_tensor_access(PLAIN, LOOK)
