"""The benchmarks that come with weft's repository, and not with its wheel.

They compare weft with other systems, and are the package `weft_benchmarks` in the repository's
folder ``benchmarks``, which is beside the package `weft` where that is installed in place
(``pip install -e``).
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COMMANDS = ("overlap", "p2p", "serving")
"""Those of them that are commands of their own."""

FOLDER = Path(__file__).parents[2] / "benchmarks"
MISSING = (
    "comes with weft's repository and not with its wheel: clone the repository, run "
    '`pip install -e ".[cli]"` in it, and start weft from that environment'
)


def there() -> bool:
    """Whether these benchmarks can be imported here."""
    if (FOLDER / "weft_benchmarks").is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return find_spec("weft_benchmarks") is not None


def module(name: str) -> Any:
    """A module of the package. Raises `ModuleNotFoundError` if it is not there."""
    if not there():
        raise ModuleNotFoundError(f"weft_benchmarks.{name} {MISSING}")
    return import_module(f"weft_benchmarks.{name}")
