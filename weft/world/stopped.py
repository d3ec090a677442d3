"""The end of a rank by SIGTERM: after its error if it has lost a peer, else at once, with a file of
the flight recorder if WEFT_FLIGHT names a folder.

A launcher sends SIGTERM to the other ranks as soon as one has died, often before they have noticed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from weft.launchers import reports
from weft.world import flight

if TYPE_CHECKING:
    from weft.world.failure import Failure

_NOTICED = 0.5
"""Seconds within which a rank notices the death of a peer, also on a busy machine."""
_RAISED = 5.0
"""Seconds within which an error that has closed a world is reported."""


def report_first(failures: Callable[[], Iterable[Failure]]) -> None:
    """Handle SIGTERM for this process's worlds, given by their `failures`, if ``weft run`` started
    it or WEFT_FLIGHT names a folder, and the program has no handler.
    """
    if (
        not (reports.launched() or flight.has_own_folder())
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends this process at once
        failing = _failing(failures) if reports.launched() else None
        if failing is None:
            for failure in failures():
                if flight.has_own_folder() and failure.closed is None:
                    flight.write(failure, SystemExit(flight.STOPPED), None)
            os.kill(os.getpid(), number)
        elif failing.closed is None and not _in_weft(frame):
            raise failing.reported("")

    def leave_to_system() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=leave_to_system)


def _failing(failures: Callable[[], Iterable[Failure]]) -> Failure | None:
    """That of a world whose error is still to be raised or reported, None if there is none."""
    deadline = time.monotonic() + _NOTICED
    while True:
        for failure in failures():
            if failure.mesh.failure()[0] and time.monotonic() - failure.failed_at < _RAISED:
                return failure
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def _in_weft(frame: FrameType | None) -> bool:
    """Whether a call of weft's, which will raise the error itself, is on a stack."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("weft."):
            return True
        frame = frame.f_back
    return False
