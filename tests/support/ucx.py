"""UCX for tests: the library, the package libucx-cu12 or another one that is installed, and the
variables with which ranks use it over TCP.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def folders() -> list[Path]:
    """The folders of the package libucx, if it is installed."""
    package = importlib.util.find_spec("libucx")
    return [*map(Path, (package and package.submodule_search_locations) or ())]


def by_ucx(device: str) -> dict[str, str]:
    """The variables of ranks whose rows go by UCX, over TCP, on a network device."""
    libraries = ":".join([*(str(each / "lib") for each in folders()), *_given()])
    return {
        "WEFT_TRANSPORT": "ucx",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": device,
        "LD_LIBRARY_PATH": libraries,
    }


def _given() -> list[str]:
    return [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []


@functools.cache
def _why_not() -> str:
    """Why there is no UCX here; empty if there is."""
    program = "import weft._native as native; native.ucx_resources()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | by_ucx("lo"),
        capture_output=True,
        text=True,
    )
    return done.stderr.strip().rpartition("\n")[2]


needs_ucx = pytest.mark.skipif(
    bool(_why_not()), reason=f"no UCX, as of the package libucx-cu12: {_why_not()}"
)


def _transports(*of_ucx: pytest.MarkDecorator) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "environment",
        [
            pytest.param({}, id="tcp"),
            pytest.param(by_ucx("eth0"), id="ucx", marks=[needs_ucx, *of_ucx]),
        ],
    )


transports = _transports()
by_ucx_slowly = _transports(pytest.mark.slow)
