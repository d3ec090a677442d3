"""Background threads of ranks on several hosts: an error that would end one closes the world, and a
sandbox may refuse what they ask of the scheduler.
"""

from __future__ import annotations

import os
import time
from itertools import chain, repeat
from unittest import mock

import pytest
import torch

import weft
from weft.bootstrap import threads
from weft.world.network import Network


def refused(*_):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("function", ["sched_setscheduler", "sched_getscheduler"])
def test_a_scheduler_that_refuses(monkeypatch, function):
    """As systemd's filter ``~@resources`` does, and sandboxes."""
    monkeypatch.setattr(os, function, refused)
    with weft.local_world(2, hosts=(0, 1), timeout=10) as local:
        assert local.run(lambda: weft.all_reduce(torch.ones(2)).tolist()) == [[2.0, 2.0]] * 2


def test_an_error_that_ends_a_thread_is_reported():
    errors = []

    def divide(by):
        return 1 // by

    thread = threads.started(errors.append, divide, 0)
    thread.join(10)
    assert isinstance(errors[0], ZeroDivisionError)


def test_an_error_of_the_networks_thread_closes_the_world():
    """Both ranks raise an error that names it, long before their time limit."""

    def call():
        world, start = weft.init(), time.monotonic()
        world.network.drop(0)  # wakes the thread
        with pytest.raises(weft.WeftError, match=r"ZeroDivisionError: nothing dropped"):
            for _ in range(1000):
                weft.all_reduce(torch.ones(2))
                if world.rank:
                    time.sleep(0.01)
        return time.monotonic() - start

    once = chain([ZeroDivisionError("nothing dropped")], repeat(None))
    failing = mock.patch.object(Network, "_report_dropped", side_effect=once)
    with weft.local_world(2, hosts=(0, 1), timeout=60) as local, failing:
        assert max(local.run(call)) < 30
