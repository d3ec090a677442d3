"""gloo, for the operations of a process group that weft leaves to it: messages between hosts, and
sums of sparse tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import WeftError
from weft.process_group.work_queue import NO_LIMIT, Done, Work, callbacks_lock
from weft.uncompiled import uncompiled_methods
from weft.world import World

_DETECTION = 1.0  # seconds within which the world detects a lost peer
_ENDING = 1.0  # seconds for threads to end after their connections


class Gloo:
    """A group of gloo beside a group of weft's, of the same ranks."""

    def __init__(self, world: World, store: Store) -> None:
        self.world = world
        self.group: Any = dist.ProcessGroupGloo(
            PrefixStore("weft gloo", store),
            world.rank,
            world.ranks,
            timeout=timedelta(seconds=world.timeout),
        )
        self.waiting: set[GlooWork] = set()
        _open.add(self)

    def issue(self, operation: str, tensor: Tensor, *args: Any) -> GlooWork:
        """Begin an operation, which raises if a peer is already lost."""
        try:
            work = getattr(self.group, operation)([tensor], *args)
        except RuntimeError as error:
            raise self.cause(error) from None
        return GlooWork(self, work, tensor, operation != "recv_anysource")

    def cause(self, error: RuntimeError) -> BaseException:
        """The error of a lost peer if that is why gloo lost a connection, else `error`."""
        deadline = time.monotonic() + _DETECTION
        while time.monotonic() < deadline:
            if self.world.mesh.failure()[0]:
                return self.world.failure("for a message")
            time.sleep(0.01)
        return error

    def close(self) -> None:
        """End the threads that wait for messages; their works fail."""
        left = [*self.waiting]
        if not left:
            return
        rank, ranks = self.world.rank, self.world.ranks
        for work in left:
            work.end(WeftError(f"rank {rank} left the group before the message was complete"))
        with contextlib.suppress(RuntimeError):
            # one wait beyond its limit ends gloo's connections, and with them all other waits
            # except for any source, for which nothing comes any more
            while True:
                beyond = self.group.recv([torch.empty(1, device="cpu")], (rank + 1) % ranks, 0)
                beyond.wait(timedelta(milliseconds=1))
        deadline = time.monotonic() + _ENDING
        for work in left:
            if work.ends_with_connections and work.thread is not None:
                work.thread.join(max(0.0, deadline - time.monotonic()))


_open: WeakSet[Gloo] = WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter, as those of `work_queue`."""
    for each in [*_open]:
        each.close()


@uncompiled_methods
class GlooWork(Work):
    """A work of gloo.

    gloo's messages have no futures, only one thread may wait for a message, and a limit of the wait
    would end the connection. So a thread of its own waits for a work that has a future, or is
    waited for with a limit.
    """

    def __init__(
        self, gloo: Gloo, work: dist.Work, tensor: Tensor, ends_with_connections: bool
    ) -> None:
        super().__init__([tensor])
        self.gloo = gloo
        self.work = work
        self.ends_with_connections = ends_with_connections
        self.awaited = self.ending = False  # by a thread
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.done or self.work.is_completed()

    def complete(self, done: Done) -> None:
        def call() -> None:
            done(self.exception(), list(self.tensors))

        with callbacks_lock:
            if not self.done:
                self._start_waiting()
                self.callbacks.append(call)
                return
        call()

    def end(self, error: BaseException | None = None) -> None:
        with callbacks_lock:
            if self.ending:
                return
            self.ending = True
        super().end(error)
        self.ended.set()

    def _advance(self, seconds: float | None) -> None:
        with callbacks_lock:
            if seconds is not None:
                self._start_waiting()
            others = self.awaited
            self.awaited = True
        if others:
            self.ended.wait(seconds)
        else:
            self._wait()

    def _start_waiting(self) -> None:
        """Let a thread wait for the work, unless one does."""
        if self.awaited:
            return
        self.thread = threading.Thread(target=self._run, name="weft message", daemon=True)
        self.gloo.waiting.add(self)
        try:
            self.thread.start()
        except RuntimeError:  # there are too many
            self.gloo.waiting.discard(self)
            raise
        self.awaited = True

    def _run(self) -> None:
        try:
            self._wait()
        finally:
            self.gloo.waiting.discard(self)

    def _wait(self) -> None:
        try:
            self.work.wait(NO_LIMIT)
        except RuntimeError as error:
            if not self.done:
                self.end(self.gloo.cause(error))
        except BaseException as error:  # of a signal handler
            self.end(error)
            raise
        else:
            with contextlib.suppress(RuntimeError):  # only a receive has a source
                self.source = self.work._source_rank()
            self.end()
