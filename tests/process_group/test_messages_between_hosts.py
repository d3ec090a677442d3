"""Messages of groups whose ranks are on several hosts: their works have futures and time limits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.claimed_hosts import claiming
from support.hosts import hosts, needs_hosts
from support.ranks import free_port, group, on_ranks

import weft

two_hosts = partial(claiming, 2, partial(group, "weft", 20.0))
NAME = "weft message"


def threads():
    return [each for each in threading.enumerate() if each.name == NAME]


def futures(any_source):
    """Rank by rank: a future before the message is sent, which a callback sends on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    place, there = torch.zeros(1000), torch.arange(1000.0) + rank
    received = dist.irecv(place, None if any_source else before)
    future = received.get_future().then(lambda f: f.value()[0] + 1)
    sent = dist.isend(there, following)
    [same] = sent.get_future().wait()
    assert same.data_ptr() == there.data_ptr()
    assert torch.equal(future.wait(), torch.arange(1000.0) + before + 1)
    received.wait()
    sent.wait()
    assert received.is_completed()
    if any_source:
        assert received._source_rank() == before
    [again] = received.get_future().wait()  # of a message that has come
    assert torch.equal(again, place)


def both_ways(_):
    for any_source in False, True:
        futures(any_source)


@pytest.mark.data
def test_a_future_does_not_wait_for_its_message():
    on_ranks(both_ways, 2, context=two_hosts)


@needs_hosts
@pytest.mark.data
@pytest.mark.slow
def test_futures_between_real_hosts():
    with hosts(2) as net:
        net.start(Path(__file__), 2)
        ended = net.finish()
    assert [code for code, _ in ended] == [0, 0], ended


def limited(_):
    peer, place = 1 - dist.get_rank(), torch.zeros(3)
    work = dist.irecv(place, peer)
    for _ in range(2):
        with pytest.raises(weft.PeerTimeout, match=r"timed out after 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
    dist.barrier()
    dist.send(torch.ones(3), peer)
    work.wait()
    assert place.tolist() == [1.0] * 3


def test_a_message_that_is_late_may_be_waited_for_again():
    on_ranks(limited, 2, context=two_hosts)


def ahead(_):
    """A message behind the rows of a call that its receiver makes afterwards."""
    peer, x, large = 1 - dist.get_rank(), torch.ones(100_000), torch.full((100_000,), 7.0)
    for size in 3, len(large):
        if peer:
            work = dist.all_reduce(x, async_op=True)
            work.get_future()  # so that another thread makes the call
            time.sleep(0.1)
            sent = dist.isend(large[:size], peer)
            work.wait()
            sent.wait()
        else:
            place = torch.zeros(size)
            dist.recv(place, peer)
            assert torch.equal(place, large[:size])
            dist.all_reduce(x)
    assert x.eq(4.0).all()


@pytest.mark.data
def test_a_message_passes_the_rows_of_a_later_call():
    on_ranks(ahead, 2, context=two_hosts)


def left_behind(_):
    peer = 1 - dist.get_rank()
    inner = dist.new_group()
    works = [dist.irecv(torch.zeros(3), each, group=inner) for each in (peer, None)]
    left = [work.get_future() for work in works]
    dist.barrier()
    dist.destroy_process_group(inner)
    for future in left:
        with pytest.raises(RuntimeError, match="left the group before the message was complete"):
            future.wait()
    named = [each for each in threads() if each.is_alive()]
    assert len(named) <= 1, "for any source gloo has no other end than its limit"
    dist.barrier()


def test_the_end_of_a_group_ends_its_messages():
    on_ranks(left_behind, 2, context=two_hosts)


PROGRAM = """
import sys, torch, torch.distributed as dist
from test_messages_between_hosts import two_hosts
with two_hosts():
    sources = 1 - dist.get_rank(), None
    works = [dist.irecv(torch.zeros(3), source, tag=tag) for tag, source in enumerate(sources)]
    kept = [work.get_future() for work in works]
    dist.barrier()
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "dist.destroy_process_group = print", "sys.exit()"])
def test_a_program_ends_with_outstanding_futures(end):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(end=end)],
            env=os.environ | address | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [each.wait(60) for each in started] == [0, 0]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("weft")
    both_ways(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
