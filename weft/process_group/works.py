"""Work that torch is handed for what is under way, and the order in which a group's collectives are
carried out.

A collective that is called synchronously runs on its caller's thread, unless others are still to be
carried out before it; one that is not is carried out by who comes to wait for it, or, where nobody
comes soon, by a thread of the group. Either way a group carries out one at a time, in the order in
which they were issued, whatever threads issue them: those of autograd, for instance.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft._native as _native
from weft.errors import PeerTimeout, WeftError
from weft.world import World
from weft.world.rendezvous import time_left

_NO_LIMIT = timedelta(0)  # what torch's native code says for none


class Work(dist.Work):
    """What was begun, and the `tensors` that it fills.

    Its `carrier` does it, and calls what futures have to call then.
    """

    def __init__(self, tensors: Sequence[Tensor], carrier: Carrier | None = None) -> None:
        super().__init__()
        self.tensors, self.carrier = tensors, carrier
        self.over, self.source = False, -1
        self.error: BaseException | None = None
        self.told: list[Callable[[], object]] = []  # called when it is over

    def end(self, error: BaseException | None = None) -> None:
        """Note that it is done, or why it could not be."""
        self.error = error
        self.over = True
        with _telling:
            told, self.told = self.told, []
        for tell in told:
            tell()

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """True once it is done; raises what went wrong, and `PeerTimeout` after `timeout`, which
        harms nothing.
        """
        if not self.over:
            seconds = timeout.total_seconds()
            self._help(seconds if seconds > 0 else None)
            if not self.over:
                raise PeerTimeout(f"what was waited for is not done after {seconds:g} s")
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        return self.over

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self.over and self.error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything has."""
        return self.error

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return list(self.tensors)

    def source_rank(self) -> int:
        """The rank that a message was received from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is done when this is, with its tensors as the value; an error is one of the
        same text.
        """
        done: torch.futures.Future[Any] = torch.futures.Future()
        made = done.then(self._value)  # so that native code, too, sees an exception for what it is
        carrier, line = self.carrier, getattr(_here, "line", 0)
        if carrier is None or not self.tells(lambda: carrier.tell(line, done)):
            done.set_result(None)
        return made

    def tells(self, call: Callable[[], object]) -> bool:
        """Have this called once it is over, which is to be soon; False if it is over already."""
        assert self.carrier is not None
        self.carrier.check()
        with _telling:
            if self.over:
                return False
            self.told.append(call)
        self.carrier.backlog.hurry()  # who waits to be told does not carry the work out
        return True

    def _help(self, seconds: float | None) -> None:
        """Do it, or wait until it is done, for at most so many seconds."""
        if self.carrier is not None:
            self.carrier.help(self, seconds)

    def _value(self, _: object) -> list[Tensor]:
        if self.error is not None:
            raise self.error
        return list(self.tensors)


_telling = threading.RLock()  # a signal handler may come between
_here = threading.local()  # `line`: that of futures that are asked for on this thread


class Several(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self.works = works

    def _help(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        for each in self.works:
            each.wait(_NO_LIMIT if deadline is None else time_left(deadline))
        self.end()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        whole = torch.futures.collect_all([work.get_future() for work in self.works])
        return whole.then(
            lambda futures: [tensor for future in futures.value() for tensor in future.value()]
        )


class Borrowed(Work):
    """A work of another backend; `cause` makes of its error the one to raise."""

    def __init__(
        self,
        work: dist.Work,
        tensors: Sequence[Tensor],
        cause: Callable[[RuntimeError], BaseException],
    ) -> None:
        super().__init__(tensors)
        self.work, self.cause = work, cause

    def is_completed(self) -> bool:
        return self.over or self.work.is_completed()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()  # what carries messages gives no futures
        return super().get_future()

    def _help(self, seconds: float | None) -> None:
        try:
            self.work.wait(_NO_LIMIT if seconds is None else timedelta(seconds=seconds))
        except RuntimeError as error:
            self.end(self.cause(error))
        else:
            with contextlib.suppress(RuntimeError):  # it is no receive
                self.source = self.work._source_rank()
            self.end()


class Carrier(ABC):
    """Carries works out on the threads that come to wait for them, and on one of its own those for
    which nobody comes soon.

    Futures call back on other threads, the lines, in the order in which their works end, as on
    every rank. What is called may begin works of the group, and wait for their futures: these are
    told in the next line, since in this one they would be behind who waits for them.
    """

    def __init__(self, name: str, world: World) -> None:
        self.world, self.backlog = world, _native.Backlog()
        self.lines: list[ThreadPoolExecutor] = []
        self.lining = threading.RLock()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def help(self, work: Work, seconds: float | None) -> None:
        """Carry `work` out, unless another thread does; for at most so many seconds, if they are
        given.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Carry out what nobody does."""

    @abstractmethod
    def doing(self) -> str:
        """What this very thread is carrying out, or nothing; if it is, a signal handler asks, which
        has interrupted it.
        """

    def check(self) -> None:
        """Raise `WeftError` in a forked child, and for a call of a signal handler that would wait
        for what it interrupts.
        """
        self.world.check_process()
        if doing := self.doing():
            raise WeftError(
                f"called from a signal handler while rank {self.world.rank} was in {doing}, which "
                "has to end first: a handler may "
                "raise an exception, call destroy_process_group(), or note the signal for later"
            )

    def start(self) -> None:
        """Start the thread; once nothing can go wrong any more with making the group, and before a
        signal handler can end it.
        """
        self.thread.start()
        _running.add(self)

    def tell(self, line: int, future: torch.futures.Future[Any]) -> None:
        """Complete a future in a line."""
        with self.lining:
            while len(self.lines) <= line:
                self.lines.append(
                    ThreadPoolExecutor(
                        1, "weft futures", setattr, (_here, "line", len(self.lines) + 1)
                    )
                )
        try:
            self.lines[line].submit(future.set_result, None)
        except RuntimeError:  # this process is about to end, and starts nothing any more
            future.set_result(None)

    def close(self) -> None:
        """End the threads, once they have called what there is to call."""
        self.backlog.close()
        if (
            self.thread.ident is not None and not self.doing()
        ):  # for which the thread may be waiting; it ends after that
            self.thread.join()  # it may still tell
        for line in self.lines:
            line.shutdown(wait=False)

    def _run(self) -> None:
        _native.set_team_size(1)  # what it carries out is beside what its callers compute
        while self.backlog.due():
            self.take_over()
        _running.discard(self)


_OF_CALLS = (RuntimeError, ValueError, TypeError)  # weft's own errors are of the first kind

_running: set[Carrier] = set()  # those whose thread has not ended
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _close_all() -> None:
    """Let no thread come back from native code to an interpreter that has ended, which aborts the
    process.
    """
    for carrier in list(_running):
        carrier.close()


class Order(Carrier):
    """Carries out a group's collectives one at a time, in the order in which they are issued."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self.turn = threading.RLock()  # of the thread that carries out
        self.mine: Callable[[], bool] = self.turn._is_owned  # type: ignore[attr-defined]
        self.call: Callable[..., object] | None = None  # that is carried out
        self.issued: deque[tuple[Work, Callable[..., object], tuple[Any, ...]]] = deque()
        self.closed = False

    def now(self, call: Callable[..., object], *args: Any) -> None:
        """Carry out ``call(*args)`` after all that was issued before, and return when it is done."""
        if self.call is None and not self.issued and self.turn.acquire(blocking=False):
            try:
                self.call = call
                call(*args)
            finally:
                self.call = None
                self.turn.release()
        else:
            self.check()
            self.later((), call, *args).wait()

    def later(self, tensors: Sequence[Tensor], call: Callable[..., object], *args: Any) -> Work:
        """Issue ``call(*args)``, which fills `tensors`, and return at once."""
        self.world.check_process()
        if self.closed:
            self.world.check()
        work = Work(tensors, self)
        self.issued.append((work, call, args))
        self.backlog.issue()
        return work

    def help(self, work: Work, seconds: float | None) -> None:
        """Carry out what was issued up to `work`, unless another thread does; with a limit, only
        wait for the thread that does.
        """
        self.check()
        if seconds is None:
            with self.turn:
                while not work.over:
                    self._next()
            return
        ended = threading.Event()
        if work.tells(ended.set):
            ended.wait(seconds)

    def take_over(self) -> None:
        while self.issued:
            with self.turn:
                if self.issued:
                    self._next()

    def doing(self) -> str:
        return getattr(self.call, "__name__", "a collective") if self.mine() else ""

    def close(self) -> None:
        """Carry out what was issued, and end the threads."""
        self.closed = True
        with self.turn:
            while self.issued:
                self._next()
        super().close()

    def _next(self) -> None:
        """Carry out what was issued first.

        What a call raises is the work's error. Anything else is what a signal handler has raised:
        it ends that work, whichever is waited for, and closes the world, since peers may have
        carried the work out.
        """
        work, self.call, args = self.issued.popleft()
        self.backlog.begin()
        try:
            self.call(*args)
        except BaseException as error:
            work.end(error)
            if not isinstance(error, _OF_CALLS):
                self.world.fail(error)
                raise
        else:
            work.end()
        finally:
            self.call = None
