"""Reports of uncaught exceptions, with hints. In ranks that ``weft run`` started: no traceback for
the fault of a peer or Ctrl-C, the user's part of it for an error of weft's, and all of it at level
DEBUG of the logger ``weft``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import sys
from collections.abc import Callable
from types import TracebackType

import weft.errors as errors
from weft.errors import MismatchError, PeerLost, WeftError
from weft.launchers import hints

ON = "WEFT_REPORTS"
"""The variable that ``weft run`` sets for its ranks."""

_log = logging.getLogger("weft")
_PEER_ENDS = 2.0
"""Seconds for which a rank that lost a peer waits for the end of its process."""


def launched() -> bool:
    """Whether `weft run` started this rank."""
    return os.environ.get(ON) == "1"


def report_uncaught() -> None:
    """Install the report of uncaught exceptions, with all of the above if `weft run` started this
    rank, else with hints only.
    """
    hook = _hinting(sys.excepthook)
    sys.excepthook = _of_rank(_reporting(hook) if launched() else hook)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _of_rank(before: Hook) -> Hook:
    """The hook `before`, the lines of which begin with the rank if a launcher started it, as torch
    has it in a program with a process group.
    """

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _rank() < 0 or getattr(sys.excepthook, "__module__", "") == _TORCH:
            before(kind, error, trace)
            return
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            before(kind, error, trace)
        lines = printed.getvalue().splitlines()
        text = "\n".join(f"[rank{_rank()}]: {line}" if line else "" for line in lines)
        sys.stderr.write(text + "\n")  # at once, since other ranks write there, too

    return report


_TORCH = "torch.distributed.distributed_c10d"
"""The module of torch's hook, which `init_process_group` installs."""


def _hinting(before: Hook) -> Hook:
    """The hook `before` with hints in the message."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        hints.add(error, error.__traceback__ or trace)
        before(kind, error, trace)

    return report


def _reporting(before: Hook) -> Hook:
    """A hook that prints an exception, by the hook `before` if it is this rank's own, and records
    it for the launcher.
    """

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        error = _of_callback(error) or error
        if isinstance(error, PeerLost | KeyboardInterrupt) or _reported_by_peer(error):
            print(f"{type(error).__name__}: {_short(error)}".removesuffix(": "), file=sys.stderr)
        else:
            if _raised_by_weft(error, trace) and not _log.isEnabledFor(logging.DEBUG):
                hints.add(error, trace)
                trace = _of_the_user(trace)
            before(type(error), error.with_traceback(trace), trace)
        if isinstance(error, PeerLost) and error.pid:
            _wait_for_end_of(error.pid)
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)

    return report


def _of_callback(error: BaseException) -> WeftError | None:
    """The error of weft's that torch reports as the text of another, which has the frames of a
    thread of weft's, None if it is no such text: DDP waits for collectives in C++.
    """
    found = _CALLBACK.match(str(error)) if type(error) is RuntimeError else None
    return getattr(errors, found[1])(found[2]) if found else None


_CALLBACK = re.compile(
    r"Got the following error when running the callback: "
    r"(PeerLost|PeerTimeout|MismatchError): (.*?)(?:\n\nAt:\n.*)?\Z",
    re.DOTALL,
)


def _short(error: BaseException) -> str:
    """The message of an error, as far as no other rank prints it."""
    if not isinstance(error, WeftError) or error.reporter in (-1, _rank()):
        return str(error)
    if isinstance(error, MismatchError):
        return f"as on rank {error.reporter}"
    return "\n".join(str(error).splitlines()[:2])


def _reported_by_peer(error: BaseException) -> bool:
    """Whether a peer reports the same error in full."""
    return isinstance(error, MismatchError) and error.reporter not in (-1, _rank())


def _rank() -> int:
    return int(os.environ.get("RANK", "-1"))


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


def _raised_by_weft(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether an error is due to a mistake in the use of weft."""
    if not isinstance(error, ValueError | TypeError):
        return isinstance(error, WeftError)
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("weft.")


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback before it enters weft, without torch's calls of modules."""
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    if trace is None or name.startswith("weft."):
        return None
    if name == "torch.nn.modules.module":
        return _of_the_user(trace.tb_next)
    return TracebackType(
        _of_the_user(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno
    )
