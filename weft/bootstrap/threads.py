"""Threads beside those of the program."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable


def yield_cores() -> None:
    """Never interrupt threads that compute, from now on in this thread: where all cores are busy it
    waits some milliseconds to be scheduled.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it: then it may interrupt
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # a policy that the user chose stays
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def started(
    fail: Callable[[BaseException], object], target: Callable[..., None], *arguments: object
) -> threading.Thread:
    """A thread that yields cores. `fail` is called with an error that would end it."""

    def run() -> None:
        try:
            yield_cores()
            target(*arguments)
        except BaseException as error:
            fail(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait for threads to end, except for the caller's, until a deadline."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
