"""Triton's interpreter in place of its compiler, on ranks of tests that have no GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import weft
from weft.world import World


def interpreted() -> None:
    """Use the interpreter from here on; a thread whose kernel waits lets others run soon."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.setswitchinterval(1e-4)


@contextlib.contextmanager
def triton_world(**options: Any) -> Iterator[World]:
    """A world of processes whose products are weft's kernel, interpreted."""
    interpreted()
    with weft.init(timeout=20, products="triton", **options) as world:
        yield world
