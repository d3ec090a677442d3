"""The handler that the variable WEFT_LOG gives the logger ``weft``: its level, on stderr, with the
rank in every line. Without the variable weft has no handler and no level, as a library should.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

VARIABLE = "WEFT_LOG"

rank_here: Callable[[], int | None] = lambda: None  # noqa: E731
"""The rank of this thread, None before it is known; `weft.world` replaces it."""


def configure() -> None:
    """Add the handler at the level of the variable."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(
            "%(asctime)s.%(msecs)03d weft rank %(rank)s %(levelname)s: %(message)s", "%H:%M:%S"
        )
    )
    handler.addFilter(_with_rank)
    log = logging.getLogger("weft")
    log.addHandler(handler)
    log.setLevel(os.environ[VARIABLE].upper())
    log.propagate = False  # else a handler of the program would print each line again


def _with_rank(record: logging.LogRecord) -> bool:
    """Add the rank of the thread that logs to a record."""
    rank = rank_here()
    record.rank = os.environ.get("RANK", "?") if rank is None else rank
    return True
