"""The operations of a process group of torch.distributed whose ranks are a world of weft."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import PrefixStore, Store

import weft._native as _native
from weft.bootstrap.stores import arrived, leave_together
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.process_group.messages import Messages
from weft.process_group.work_queue import WorkQueue
from weft.uncompiled import uncompiled_methods
from weft.world import World, init_by_store

_log = logging.getLogger("weft")
_READ = 2.0  # seconds in which ranks that wait in a monitored barrier read that it is over


class AbortHooks:
    """What a world calls before an error closes it: the `hooks`, by their numbers.

    Attributes: `kind`, the error by which the world was closed, as torch knows it. The error itself
    would keep the group alive: its frames refer to torch's group, whose references Python's
    collector does not see.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Callable[[], object]] = {}
        self.kind = ErrorType.SUCCESS

    def __call__(self, error: BaseException) -> None:
        known = {PeerTimeout: ErrorType.TIMEOUT, PeerLost: ErrorType.REMOTE_ERROR}
        self.kind = known.get(type(error), ErrorType.COMM_ERROR)
        for hook in [*self.hooks.values()]:
            try:
                hook()
            except Exception:  # the world is to be closed all the same
                _log.exception("an abort hook of a process group failed")


@uncompiled_methods
class Operations:
    """What `backend.cpp` does for torch's process groups. `queue` runs their collectives, and
    `messages` moves their messages; all tensors are on the CPU.

    Attributes: `world`, of the group's ranks, for calls of the group only.
    """

    def __init__(self, world: World, store: Store) -> None:
        self.store = store
        self.rank, self.ranks = world.rank, world.ranks
        self.world = world
        self.world.failure.maker = 'init_process_group("weft") or new_group(backend="weft")'
        self.abort_hooks = self.world.failure.before = AbortHooks()
        self.queue = WorkQueue(f"weft group of {world.ranks}", self.world)
        self.messages = Messages(self.world)
        self.barriers = 0
        self.shrunk = 0  # times that `without` was called
        self.start_recorder: Callable[[], object] = lambda: None
        self.recorder: object = None
        self._dropped = weakref.finalize(self, _drop, self.queue, self.messages)
        self._dropped.atexit = False
        try:
            for progress in (self.queue, self.messages):
                progress.start()
        except BaseException:  # such as Ctrl-C
            self.shutdown()
            raise

    # A barrier that names missing ranks

    def monitored_barrier(self, limit: float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier by the group's store; after `limit` rank 0 names the first missing rank, or
        all.
        """
        seconds = self.world.timeout if limit is None else limit
        rank = self.rank
        deadline = _native.Deadline(seconds)
        store = PrefixStore(f"weft monitored barrier {self.barriers}", self.store)
        self.barriers += 1

        def came(key: str) -> bool:
            found = arrived(store, [key], deadline, lambda: self.world.closed is not None)
            if not found:
                self.world.failure.check()
            return found

        try:
            if rank:
                store.set(str(rank), "")
                if not came("all"):
                    raise PeerTimeout(
                        f"Rank {rank} successfully reached monitoredBarrier, "
                        "but received errors while waiting for send/recv from rank 0"
                    )
            else:
                if not seconds > 0 and self.ranks > 1:
                    raise PeerTimeout(
                        f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:g} ms"
                    )
                missing = (peer for peer in map(str, range(1, self.ranks)) if not came(peer))
                if late := [*itertools.islice(missing, None if wait_all_ranks else 1)]:
                    late_ranks = f"Rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
                    raise PeerTimeout(
                        f"{late_ranks} failed to pass monitoredBarrier in {seconds * 1e3:g} ms"
                    )
                store.set("all", "")
        except dist.DistNetworkError as error:
            raise PeerLost(
                f"rank {rank} lost the store in monitored_barrier; the process that serves it has "
                f"died or left: {error}"
            ) from error
        leave_together(store, self.ranks, _READ)

    # The group

    def record(self) -> None:
        """Start the recorder of calls, now that torch has made the group, until its end."""
        self.recorder = self.start_recorder()

    def set_name(self, name: str, text: str) -> None:
        """Set the group's name and description, which errors show."""
        self.world.failure.group_name = f"{name} {'' if text == 'undefined' else text}".strip()

    def shutdown(self) -> None:
        """Run all issued works, then close the world, as `dist.destroy_process_group` does.

        In a signal handler that interrupts a call on the group, the call and all works fail.
        """
        self._dropped.detach()
        if self.world.failure.forked:
            return
        if call := self.queue.current_call() or self.messages.current_call():
            self.world.failure.fail(
                WeftError(
                    f"rank {self.rank} left the group in a signal handler while it was in {call}"
                )
            )
        _leave(self.queue, self.messages)
        self.recorder = None  # has the group, which has this object

    def abort(self) -> None:
        """Close the world without running issued works; peers get the reason."""
        before = self.abort_hooks.kind
        self.world.failure.fail(WeftError("the group was aborted"))
        self.abort_hooks.kind = before  # to abort is no error
        self.shutdown()

    def leave(self) -> None:
        """Close the world: without error for peers if no work is outstanding."""
        if self.queue.issued or self.queue.running:
            self.abort()
        else:
            self.shutdown()

    def error_type(self) -> ErrorType:
        """Why the world was closed, if by an error."""
        lost = self.world.closed is None and self.world.mesh.failure()[0]  # no call has raised it
        return ErrorType.REMOTE_ERROR if lost else self.abort_hooks.kind

    # Groups of some of its ranks

    def part(self, store: Store, ranks: Sequence[int], timeout: float) -> Operations:
        """The operations of a group of these ranks of this one, in this order; collective among
        them, by a store that serves nothing else.
        """
        numbers = [self.world.global_ranks[rank] for rank in ranks]
        world = init_by_store(store, ranks.index(self.rank), len(ranks), timeout, numbers)
        return Operations(world, store)

    def without(self, excluded: Sequence[int], abort: bool, timeout: float) -> Operations:
        """As `part`, of all but the ranks `excluded`; `abort` this group first, or leave it as it
        is.
        """
        if abort:
            self.abort()
        self.shrunk += 1
        store = PrefixStore(f"weft shrunk {self.shrunk}", self.store)
        ranks = [rank for rank in range(self.ranks) if rank not in excluded]
        return self.part(store, ranks, timeout)


def _leave(queue: WorkQueue, messages: Messages) -> None:
    """Run all issued works, and close the world of a group."""
    queue.close()
    messages.close()
    queue.world.close()


def _drop(queue: WorkQueue, messages: Messages) -> None:
    """Leave a group that its owner has dropped: on its thread, since this one may be anywhere in
    the program.
    """
    if not queue.world.failure.forked:
        queue.ended = partial(_leave, queue, messages)
        queue.deferred.close()
