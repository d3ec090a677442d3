"""Waits for the keys that ranks put into a store of torch that they share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

import weft._native as _native

_LOOK = 0.01  # seconds between looks into the store


def arrived(
    store: Store,
    keys: list[str],
    deadline: _native.Deadline,
    ended: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether the store gets all these keys before the deadline, and before `ended`. Signal
    handlers run meanwhile. Raises `DistNetworkError` if the store has ended.
    """
    # no `wait`: signal handlers would not run, and it prints each timeout to stderr
    while True:
        began = time.monotonic()
        # in one request: a thousand ranks would make a million of single ones
        if store.check(keys):
            return True
        if ended() or deadline.passed:
            return False
        # a store that has much to do is asked less often
        time.sleep(max(_LOOK, time.monotonic() - began))


def leave_together(store: Store, ranks: int, seconds: float) -> None:
    """Return once so many ranks have called this, after at most `seconds`. The store may end with
    this process, so the others read what is in it before.
    """
    with contextlib.suppress(dist.DistNetworkError):  # the others need it no more
        count_reader(store, ranks)
    wait_for_readers(store, seconds)


def count_reader(store: Store, ranks: int) -> None:
    """Note that this rank, of so many, has read what is in the store."""
    if store.add("readers", 1) == ranks:
        store.set("read", "")


def wait_for_readers(store: Store, seconds: float) -> None:
    """Return once all ranks have read what is in the store, after at most `seconds`."""
    with contextlib.suppress(dist.DistNetworkError):  # the others need it no more
        arrived(store, ["read"], _native.Deadline(seconds))
