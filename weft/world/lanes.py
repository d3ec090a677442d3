"""Threads of a rank that runs on several hosts: each lane is one that runs jobs in their order."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue

import weft._native as _native

Job = Callable[[], None]
_TRANSFERS = "transfers"
_LOOK = 0.05  # seconds between checks whether the lanes have ended


class Lanes:
    """Lanes by name, each a thread from its first job on. `fail` is called with an error that a job
    raises.
    """

    def __init__(self, fail: Callable[[BaseException], object]) -> None:
        self._fail = fail
        self._lanes: dict[str, tuple[threading.Thread, SimpleQueue[Job | None]]] = {}
        self._transfers = threading.BoundedSemaphore(_native.Transfers.max_outstanding)
        self._submitting = threading.Lock()
        self._ended = False

    def submit(self, lane: str, job: Job) -> None:
        """Run a job on the thread of this lane, after its earlier jobs."""
        with self._submitting:
            if lane not in self._lanes:
                queue: SimpleQueue[Job | None] = SimpleQueue()
                self._lanes[lane] = started(self._fail, self._run, queue), queue
            jobs = self._lanes[lane][1]
            jobs.put(job)
            if self._ended:
                jobs.put(None)

    def transfer(self, copy: Job) -> Future[None]:
        """Make a copy in the background, after earlier ones; blocks the caller while as many are
        outstanding as a world may have.
        """
        made: Future[None] = Future()

        def make() -> None:
            try:
                copy()
            except BaseException as error:
                made.set_exception(error)
            else:
                made.set_result(None)
            finally:
                self._transfers.release()

        self._transfers.acquire()
        self.submit(_TRANSFERS, make)
        return made

    def finish_transfers(self) -> None:
        """Return once all copies are made, or the lanes have ended."""
        if _TRANSFERS in self._lanes:
            over = threading.Event()
            self.submit(_TRANSFERS, over.set)
            while not (self._ended or over.wait(_LOOK)):
                pass

    def end(self, deadline: float) -> None:
        """Let all threads end after their jobs."""
        with self._submitting:
            self._ended = True
            lanes = [*self._lanes.values()]
            for _, jobs in lanes:
                jobs.put(None)
        join((thread for thread, _ in lanes), deadline)

    def _run(self, jobs: SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self._fail(error)
            del job  # and all that it retains


def started(
    fail: Callable[[BaseException], object], target: Callable[..., None], *arguments: object
) -> threading.Thread:
    """A thread that does not interrupt threads that compute: where all cores are busy it waits some
    milliseconds to be scheduled. `fail` is called with an error that would end it.
    """

    def run() -> None:
        try:
            with contextlib.suppress(OSError):  # a sandbox may refuse it: then it may interrupt
                if os.sched_getscheduler(0) == os.SCHED_OTHER:  # a policy that the user chose stays
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
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
