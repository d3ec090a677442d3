"""Reports of uncaught exceptions in ranks that ``weft run`` started: no traceback for the fault of
a peer or Ctrl-C, the user's part of it for an error of weft's, and all of it at level DEBUG of the
logger ``weft``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Callable
from types import TracebackType

from weft.errors import MismatchError, PeerLost, WeftError

ON = "WEFT_REPORTS"
"""The variable that ``weft run`` sets for its ranks."""

_PEER_ENDS = 2.0
"""Seconds for which a rank that lost a peer waits for the end of its process."""


def report_as_launched() -> None:
    """Install the report of uncaught exceptions, if `weft run` started this rank."""
    if os.environ.get(ON) == "1":
        sys.excepthook = _reporting(sys.excepthook)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _reporting(before: Hook) -> Hook:
    """A hook that prints an exception, by the hook `before` if it is this rank's own, and records
    it for the launcher.
    """

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if isinstance(error, PeerLost | KeyboardInterrupt) or _reported_by_peer(error):
            print(f"{kind.__name__}: {error}".removesuffix(": "), file=sys.stderr)
        else:
            if isinstance(error, WeftError) and not logging.getLogger("weft").isEnabledFor(
                logging.DEBUG
            ):
                trace = _of_the_user(trace)
            before(kind, error.with_traceback(trace), trace)
        if isinstance(error, PeerLost) and error.pid:
            _wait_for_end_of(error.pid)
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)

    return report


def _wait_for_end_of(pid: int) -> None:
    """Let a process end first, as the launcher ends the others with the first rank that has failed,
    and would then not see how this one ended.
    """
    with contextlib.suppress(OSError):  # it has ended
        process = os.pidfd_open(pid)
        try:
            select.select([process], [], [], _PEER_ENDS)
        finally:
            os.close(process)


def _reported_by_peer(error: BaseException) -> bool:
    """Whether a peer reports the same error, with this rank's call."""
    return isinstance(error, MismatchError) and os.environ.get("RANK", "") in [
        str(rank) for rank in error.ranks[1:]
    ]


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback before it enters weft."""
    if trace is None or str(trace.tb_frame.f_globals.get("__name__")).startswith("weft."):
        return None
    return TracebackType(
        _of_the_user(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno
    )
