"""Copies between hosts that the caller does not wait for."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import weft._native as _native
from weft.bootstrap.threads import yield_cores

_LOOK = 0.05  # seconds between checks whether copies have ended


class BackgroundCopies:
    """Copies, each by a call, that one thread makes in their order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weft-copies", initializer=yield_cores)
        self._free = threading.BoundedSemaphore(_native.Transfers.max_outstanding)
        self._last: Future[None] | None = None
        self._ended = False

    def submit(self, copy: Callable[[], None]) -> Future[None]:
        """Make a copy after earlier ones; blocks the caller while as many are outstanding as a
        world may have.
        """
        self._free.acquire()
        made = self._last = self._thread.submit(copy)
        made.add_done_callback(lambda _: self._free.release())
        return made

    def finish(self) -> None:
        """Return once all copies are made, or the thread is to end."""
        while not (self._ended or self._last is None or self._last.done()):
            concurrent.futures.wait([self._last], _LOOK)

    def end(self, deadline: float) -> None:
        """Let the thread end after all copies, and wait for them until a deadline."""
        self._ended = True
        self._thread.shutdown(wait=False)
        if self._last is not None:
            concurrent.futures.wait([self._last], max(0.0, deadline - time.monotonic()))
