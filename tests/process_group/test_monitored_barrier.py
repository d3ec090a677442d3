"""The barrier by a group's store: signal handlers, the end of the store, and its last reader."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.ranks import group, on_ranks, start

import weft
from weft.bootstrap.stores import leave_together
from weft.process_group.worlds import operations_of

SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy
LONG = timedelta(seconds=60)


def within(handler, call):
    """Make a call that a signal handler interrupts."""
    signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    call()


def interrupted(_, kind):
    """It is no part of the group's calls, so the group continues."""
    if dist.get_rank() == 0:

        def stop():
            raise kind("a handler's own")

        with pytest.raises(kind, match="a handler's own"):
            within(stop, lambda: dist.monitored_barrier(timeout=LONG))
    dist.barrier()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_the_exception_of_a_signal_handler_is_raised_at_once(kind):
    on_ranks(interrupted, 2, kind, context=group)


def left(_):
    """A handler that leaves the group ends the wait, too."""
    if dist.get_rank() == 0:
        with pytest.raises(weft.WeftError, match="this world is closed"):
            within(dist.destroy_process_group, lambda: dist.monitored_barrier(timeout=LONG))
        # for the destruction at the end
        dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)


def test_a_signal_handler_leaves_the_group():
    on_ranks(left, 2, context=group)


def ends_with_the_store(_):
    """Rank 0 serves the store, and ends when rank 1 waits."""
    own = operations_of(dist.group.WORLD)
    if dist.get_rank() == 0:
        dist.PrefixStore("weft monitored barrier 0", own.store).wait(["1"])
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost, match="rank 1 lost the store in monitored_barrier"):
        dist.monitored_barrier(timeout=LONG)
    assert time.monotonic() - began < SOON


def test_the_loss_of_the_store_is_no_timeout():
    died, survivor = start(ends_with_the_store, 2, context=group)
    assert died is None
    assert survivor.error is None, survivor.trace


def reads_late(_):
    """Rank 0, with which the store may end, stays until rank 1 has read that all are there."""
    own = operations_of(dist.group.WORLD)
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=LONG)
        own.store.set("rank 0 has left the barrier", "")
        return
    barrier = dist.PrefixStore("weft monitored barrier 0", own.store)
    barrier.set("1", "")
    barrier.wait(["all"])
    with pytest.raises(dist.DistStoreError):
        own.store.wait(["rank 0 has left the barrier"], timedelta(seconds=0.3))
    leave_together(barrier, 2, SOON)
    own.store.wait(["rank 0 has left the barrier"], timedelta(seconds=SOON))


def test_the_rank_with_the_store_leaves_last():
    on_ranks(reads_late, 2, context=group)


def test_all_leave_together():
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(leave_together, store, 2, 60.0)
        store.wait(["readers"], timedelta(seconds=SOON))
        assert not first.done()
        leave_together(store, 2, 60.0)
        first.result(SOON)
    leave_together(dist.HashStore(), 2, 0.05)  # alone, it waits for its limit
