"""A world is used by one thread at a time: a concurrent call of another thread closes it, since
ranks would make calls in different orders.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from support.ranks import start

import weft


def calls_concurrently(world, call):
    """Rank 0 waits in a call of one thread while another thread makes one; rank 1 makes no call
    until the world is closed.
    """
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    calls = {
        "all_reduce": lambda: weft.all_reduce(a),
        "all_reduce_async": lambda: weft.all_reduce_async(a),
        "all_gather_matmul": lambda: weft.all_gather_matmul(a, b),
        "empty": lambda: world.empty(3),
    }
    for each in calls.values():  # from now on the native call cache finds these calls
        each()
        each()
    never = world.signals(1)
    if world.rank:
        with pytest.raises(
            weft.PeerLost, match="failed with WeftError: thread 'first' is in a call"
        ):
            weft.wait(never, 0, ">=", 1)
        return None
    errors = {}

    def make(name):
        try:
            calls["all_gather_matmul" if name == "first" else call]()
        except weft.WeftError as error:
            errors[name] = f"{type(error).__name__}: {error}"

    first = threading.Thread(target=make, args=("first",), name="first")
    call_number = world.executor.calls
    first.start()
    while world.executor.calls == call_number:
        time.sleep(0.001)
    make("second")
    first.join()
    return errors


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce_async", "all_gather_matmul", "empty"])
def test_a_second_thread(call):
    first, second = start(calls_concurrently, 2, call)
    assert first.error is None, first.trace
    assert second.error is None, second.trace
    assert "thread 'first' is in a call on this world" in first.result["second"]
    assert first.result["first"].startswith("WeftError: ")


def calls_from_a_handler(world):
    never = world.signals(1)
    if world.rank:
        with pytest.raises(
            weft.PeerLost, match="a signal handler that interrupts it cannot make another"
        ):
            weft.wait(never, 0, ">=", 1)
        return
    errors = []

    def handler(*_):
        with pytest.raises(
            weft.WeftError, match="a signal handler that interrupts it cannot make another"
        ) as error:
            weft.all_reduce(torch.ones(3))
        errors.append(error)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(weft.WeftError):
        weft.barrier()
    assert errors


def test_a_signal_handler():
    for outcome in start(calls_from_a_handler, 2):
        assert outcome.error is None, outcome.trace


WAITS = {
    "empty": lambda world, counters: world.empty(10),
    "all_reduce": lambda world, counters: weft.all_reduce(torch.ones(3)),
    "barrier": lambda world, counters: weft.barrier(),
    "wait": lambda world, counters: weft.wait(counters, 0, "==", 1),
}


def closes_in_a_handler(world, name):
    """A handler that closes the world ends the wait that it interrupts."""
    counters = world.signals(1)
    if world.rank:
        signal.signal(signal.SIGALRM, lambda *_: world.close())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(weft.WeftError, match=r"rank 1 closed (this|its) world.*, and waited"):
            WAITS[name](world, counters)
    else:
        with pytest.raises(weft.PeerLost, match=r"rank 1 .* closed its world"):
            weft.wait(counters, 0, "==", 1)  # which only rank 1 could end


@pytest.mark.parametrize("name", WAITS)
def test_a_handler_that_closes_the_world_ends_the_wait_that_it_interrupts(name):
    for outcome in start(closes_in_a_handler, 2, name):
        assert outcome.error is None, outcome.trace


def one_thread_at_a_time(world):
    """Threads that do not call at the same time may share a world."""
    for _ in range(3):
        thread = threading.Thread(target=weft.barrier)
        thread.start()
        thread.join()
        weft.barrier()


def test_threads_that_call_one_at_a_time():
    for outcome in start(one_thread_at_a_time, 2):
        assert outcome.error is None, outcome.trace
