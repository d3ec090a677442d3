"""Access to the benchmarks that are in weft's repository, but not in its wheel.

They compare weft with other systems, and are the package `weft_benchmarks` in the repository's
folder ``benchmarks``. It is next to the package `weft` if `weft` is installed in place.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.installation import checkout, in_place

COMMANDS = {
    "overlap": "A product and an all-gather that are independent of each other.",
    "p2p": "One-sided put and get over size.",
    "serving": "A server's stream of steps through a tensor-parallel block.",
}
"""The benchmarks that are commands of ``weft bench``, in words."""

FOLDER = Path(__file__).parents[2] / "benchmarks"
MISSING = (
    f"is in weft's repository and not in its wheel: run {in_place('cli')}"
    f"{'' if checkout() else ', and start weft from that environment'}"
)


def available() -> bool:
    """Whether the package `weft_benchmarks` can be imported."""
    if (FOLDER / "weft_benchmarks").is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return find_spec("weft_benchmarks") is not None


def module(name: str) -> Any:
    """A module of the package. Raises `ModuleNotFoundError` if the package is missing."""
    if not available():
        raise ModuleNotFoundError(f"weft_benchmarks.{name} {MISSING}")
    return import_module(f"weft_benchmarks.{name}")
