"""What a destroyed group leaves behind, in a program that keeps it."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.claimed_hosts import claiming
from support.process_resources import resources
from support.ranks import group, on_ranks

import weft


def held(before):
    """The threads and files in addition to those `before`, once threads had time to end; memory
    that is mapped lives as long as its tensors.
    """
    deadline = time.monotonic() + 10
    while True:
        now = resources()
        found = [each for kind in ("threads", "files") for each in {*now[kind]} - {*before[kind]}]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def used():
    made = dist.new_group()
    dist.all_reduce(torch.ones(3), group=made)
    dist.all_reduce(torch.ones(3), group=made, async_op=True).wait()
    return made


def kept(_):
    for _ in range(2):  # what a process, and the default group, open once
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group(used())
        dist.barrier()
    before, groups = resources(), [used() for _ in range(3)]
    assert len(resources()["files"]) > len(before["files"])
    for each in groups:
        dist.destroy_process_group(each)
    left = held(before)
    assert not left, left
    for each in groups:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(3), group=each)
    dist.barrier()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_destroyed_group_keeps_no_files_and_threads(hosts):
    on_ranks(kept, 2, context=partial(claiming, hosts, group))


def kept_world(world):
    with weft.init(dist.group.WORLD, timeout=20) as first:
        weft.barrier(world=first)
    before, worlds = resources(), [weft.init(dist.group.WORLD, timeout=20) for _ in range(2)]
    tensors = [each.empty(4).fill_(1) for each in worlds]
    for each in worlds:
        weft.barrier(world=each)
        each.close()
    left = held(before)
    assert not left, left
    assert all(tensor.sum() == 4 for tensor in tensors), "memory lives on"
    weft.barrier(world=world)


def test_a_closed_world_keeps_no_files_and_threads():
    on_ranks(kept_world, 2)
