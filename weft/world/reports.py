"""What a rank that ``weft run`` started says when an exception ends it: a peer's fault, or Ctrl-C, in a line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

from weft.errors import PeerLost

ON = "WEFT_REPORTS"
"""The variable that ``weft run`` sets for its ranks."""


def report_as_launched() -> None:
    """Report exceptions from now on as `weft run` wants them, if that started this rank."""
    if os.environ.get(ON) == "1":
        sys.excepthook = _reporting(sys.excepthook)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _reporting(before: Hook) -> Hook:
    """A hook that prints an exception, in the way of `before` if it is this rank's own, and leaves it to the launcher."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if isinstance(error, PeerLost | KeyboardInterrupt):
            print(f"{kind.__name__}: {error}".removesuffix(": "), file=sys.stderr)
        else:
            before(kind, error, trace)
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)

    return report
