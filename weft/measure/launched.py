"""Measurements on new ranks of this host, which Ctrl-C ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def on_ranks(
    measure: Callable[..., Found], ranks: int, *args: Any, threads: int | None = None
) -> Found:
    """The result of rank 0 of ``measure(*args)`` on `ranks` new ranks, see `weft.launch`."""
    from weft.launchers.launcher import launch

    found: Found = launch(_measure, ranks, measure, *args, threads=threads)[0]
    return found


def _measure(measure: Callable[..., Found], *args: Any) -> Found:
    # Python would end only after the product that runs, which may take long
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return measure(*args)
