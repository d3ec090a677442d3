"""Asynchronous operations of a process group: `Work` objects, and the queue that runs a group's
collectives in the order in which they were issued.

A synchronous collective runs on its caller's thread, after all that were issued before it. An
asynchronous one runs on the thread that waits for it, or, if none does soon, on the group's
progress thread. A group runs one collective at a time, even if several threads issue them, such as
autograd's.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import torch

import weft._native as _native
from weft.bootstrap.rendezvous import time_left
from weft.errors import PeerTimeout, WeftError
from weft.uncompiled import uncompiled_methods
from weft.world import World

_log = logging.getLogger("weft")
Done = Callable[[BaseException | None], object]
"""A function of a work's error."""


@uncompiled_methods
class Work:
    """An asynchronous operation; `progress` runs it, and the callbacks of its futures."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self.done = False
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[], object]] = []

    def end(self, error: BaseException | None = None) -> None:
        """Mark the work as done, or as failed with `error`."""
        if error is not None:
            _log.debug("an asynchronous operation failed", exc_info=error)
            self.error = without_frames(error)
        self.done = True
        with callbacks_lock:
            callbacks = self.callbacks
            self.callbacks = []
        for call in callbacks:
            call()

    def wait(self, seconds: float | None = None) -> None:
        """Return once the work is done. Raises its error, and `PeerTimeout` after `seconds`, which
        leaves the work outstanding; None for no limit.
        """
        if not self.is_completed():
            self._advance(seconds)
            if not self.is_completed():
                raise PeerTimeout(f"the operation is not done, and timed out after {seconds:g} s")
        if error := self.exception():
            raise error

    def is_completed(self) -> bool:
        """Whether the work is done or failed."""
        return self.done

    def exception(self) -> BaseException | None:
        """A new instance of the error of a failed work."""
        return None if self.error is None else without_frames(self.error)

    def source_rank(self) -> int:
        """The rank that a message was received from; -1 of other works."""
        return -1

    def complete(self, done: Done) -> None:
        """Call `done` once the work is done: on a callback thread, or here if it is done now."""
        progress, depth = self.progress, getattr(_thread, "callback_depth", 0)

        def call() -> None:
            done(self.exception())

        if progress is None or not self.add_callback(lambda: progress.call(call, depth)):
            call()

    def add_callback(self, call: Callable[[], object]) -> bool:
        """Run `call` once the work is done, which is to be soon; False if it is done already."""
        assert self.progress is not None
        self.progress.check()
        with callbacks_lock:
            if self.done:
                return False
            self.callbacks.append(call)
        self.progress.deferred.hurry()  # no thread is about to wait for it
        return True

    def _advance(self, seconds: float | None) -> None:
        """Run the work, or wait until it is done, for at most `seconds`."""
        if self.progress is not None:
            self.progress.advance(self, seconds)


def without_frames(error: BaseException) -> BaseException:
    """A copy without the frames in which it was raised. They would keep their group alive: they
    refer to torch's works, whose references to weft's Python's collector does not see.
    """
    try:
        return copy.copy(error)
    except Exception:  # a class, such as of a signal handler's exception, that cannot be copied
        return WeftError(f"{type(error).__name__}: {error}")


DONE = Work()
"""That of a call which is complete when it returns."""
DONE.done = True

callbacks_lock = threading.RLock()  # a signal handler may interrupt its owner
_thread = threading.local()  # `callback_depth`: 0, or one more than that of the callback thread


@uncompiled_methods
class CombinedWork(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self.works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def exception(self) -> BaseException | None:
        return next((error for work in self.works if (error := work.exception())), None)

    def complete(self, done: Done) -> None:
        left = len(self.works)

        def one_is_done(_: BaseException | None = None) -> None:
            nonlocal left
            with callbacks_lock:
                left -= 1
                last = left <= 0
            if last:
                done(self.exception())

        for work in self.works:
            work.complete(one_is_done)
        if not self.works:
            one_is_done()

    def _advance(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        for each in self.works:
            each.wait(None if deadline is None else time_left(deadline).total_seconds())


class Progress(ABC):
    """Progress of works: on the threads that wait for them, and on a progress thread for works that
    no thread waits for soon.

    Callbacks of futures run on callback threads, in the order in which works end, which is the same
    on every rank. A callback may issue works and wait for their futures: nested callbacks run on
    the next callback thread, since on this one they would deadlock.
    """

    def __init__(self, name: str, world: World) -> None:
        self.world = world
        self.deferred = _native.DeferredWork()
        self.callback_threads: list[ThreadPoolExecutor] = []
        self.callback_threads_lock = threading.RLock()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.ended: Callable[[], object] = lambda: None  # called by the progress thread at its end

    @abstractmethod
    def advance(self, work: Work, seconds: float | None) -> None:
        """Run `work`, unless another thread does; for at most `seconds`."""

    @abstractmethod
    def run_pending(self) -> None:
        """Run works that no thread waits for."""

    @abstractmethod
    def current_call(self) -> str:
        """The name of the call that this thread is running, or ""; not empty in a signal handler
        that interrupts the call.
        """

    def check(self) -> None:
        """Raise `WeftError` in a forked child, and in a signal handler that interrupts a call."""
        self.world.failure.check_process()
        if call := self.current_call():
            raise WeftError(
                f"called from a signal handler while rank {self.world.rank} was in {call}, which "
                "must end first: a handler may raise an exception, call destroy_process_group(), "
                "or set a flag for later"
            )

    def start(self) -> None:
        """Start the progress thread; called last in making a group, as `close` must end it."""
        self.thread.start()
        _running.add(self)

    def call(self, callback: Callable[[], object], depth: int) -> None:
        """Call a callback on callback thread `depth`."""
        with self.callback_threads_lock:
            while len(self.callback_threads) <= depth:
                following = len(self.callback_threads) + 1
                self.callback_threads.append(
                    ThreadPoolExecutor(
                        1, "weft futures", setattr, (_thread, "callback_depth", following)
                    )
                )
        try:
            self.callback_threads[depth].submit(callback)
        except RuntimeError:  # the interpreter is ending, and starts no threads
            callback()

    def close(self) -> None:
        """End the threads, after the callbacks of finished works."""
        self.deferred.close()
        own = self.thread is threading.current_thread()
        # in a signal handler the thread may wait for the interrupted call; it ends after that
        if self.thread.is_alive() and not (own or self.current_call()):
            self.thread.join()
        for thread in self.callback_threads:
            thread.shutdown(wait=False)

    def _run(self) -> None:
        _native.set_team_size(1)  # it runs concurrently with the computation of its callers
        while self.deferred.due():
            try:
                self.run_pending()
            except BaseException as error:  # its works have it, but the next may be outstanding
                self.world.failure.fail(error, in_background=True)
        _running.discard(self)
        self.ended()


_LOOK = 0.1  # seconds between looks at a time limit
_ERRORS_OF_CALLS = (RuntimeError, ValueError, TypeError)  # weft's own errors are RuntimeErrors

_running: set[Progress] = set()  # instances with a progress thread
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter: a return from native code to an ended interpreter
    aborts the process.
    """
    for progress in list(_running):
        progress.close()


@uncompiled_methods
class WorkQueue(Progress):
    """A queue that runs a group's collectives one at a time, in the order of issue."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.lock = threading.RLock()  # held by the thread that runs a collective
        self.is_mine: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.running: Callable[..., object] | None = None
        self.waiting = set[int]()  # the threads that wait with a limit
        self.issued: deque[tuple[Work, Callable[..., object], tuple[Any, ...]]] = deque()
        self.closed = False

    def run(self, call: Callable[..., object], *args: Any) -> None:
        """Run ``call(*args)`` after all issued works, and return when it is done."""
        if self.running is None and not self.issued and self.lock.acquire(blocking=False):
            try:
                self.running = call
                call(*args)
            except _ERRORS_OF_CALLS as error:
                self.world.failure.reject(error)
                raise
            finally:
                self.running = None
                self.lock.release()
        else:
            self.check()
            self.issue(call, *args).wait()

    def issue(self, call: Callable[..., object], *args: Any) -> Work:
        """Append ``call(*args)`` to the queue and return at once."""
        self.world.failure.check_process()
        if self.closed:
            self.world.failure.check()
        work = Work(self)
        self.issued.append((work, call, args))
        self.deferred.issue()
        return work

    def advance(self, work: Work, seconds: float | None) -> None:
        """Run the queue up to `work`, unless another thread does; with a limit only wait, as a
        collective cannot be cut short.
        """
        self.check()
        if seconds is None:
            with self.lock:
                while not work.done:
                    self._run_next()
            return
        ended, deadline, thread = threading.Event(), _native.Deadline(seconds), get_ident()
        try:
            if work.add_callback(ended.set):
                self.waiting.add(thread)
                while not ended.wait(max(0.0, min(_LOOK, deadline.left))) and not deadline.passed:
                    pass
        except BaseException as error:  # of a signal handler
            self.world.failure.fail(error)
            raise
        finally:
            self.waiting.discard(thread)

    def run_pending(self) -> None:
        while self.issued:
            with self.lock:
                if self.issued:
                    self._run_next()

    def current_call(self) -> str:
        mine = self.is_mine() or get_ident() in self.waiting
        return getattr(self.running, "__name__", "a collective") if mine else ""

    def close(self) -> None:
        """Run all issued works, and end the threads."""
        self.closed = True
        with self.lock:
            while self.issued:
                self._run_next()
        super().close()

    def _run_next(self) -> None:
        """Run the work that was issued first.

        An error of its call becomes the work's. Any other exception was raised by a signal handler:
        it ends the work, is raised here, and closes the world, as peers may have run the work.
        """
        work, self.running, args = self.issued.popleft()
        self.deferred.begin()
        try:
            with torch.no_grad():  # autograd may make results require a gradient meanwhile
                self.running(*args)
        except BaseException as error:
            work.end(error)
            if not isinstance(error, _ERRORS_OF_CALLS):
                self.world.failure.fail(error)
                raise
            self.world.failure.reject(error)
        else:
            work.end()
        finally:
            self.running = None
