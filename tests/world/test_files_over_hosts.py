"""Files and threads of a rank in a world of several hosts: for ranks on other hosts there are one
connection for control to each, and one for rows to those with which calls exchange messages.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from support.ranks import on_ranks

import weft
from weft.world import door
from weft.world.listener import Listener

HOSTS = 2


@contextlib.contextmanager
def on_two_hosts():
    """The default world of ranks of which the first half claims to be on another host."""
    here = int(os.environ["RANK"]) * HOSTS // int(os.environ["WORLD_SIZE"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "host_identity", lambda: f"host {here}")
        patch.setattr(door, "listen_to_hosts", lambda rank: Listener("127.0.0.1"))
        with weft.init(timeout=20) as world:
            yield world


def kept():
    """The files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def kept_after_calls(world):
    """What this rank keeps in addition to what it had before the first calls, once it has made
    each several times.
    """
    files, threads = kept()
    for _ in range(3):
        a, b = torch.ones(world.ranks, 4), torch.ones(4, 3)
        assert weft.all_reduce(torch.ones(4)).tolist() == [world.ranks] * 4
        weft.all_gather(a)
        weft.all_gather_matmul(a, b)
        weft.matmul_reduce_scatter(a, b)
        weft.matmul_all_reduce(a, b)
        weft.barrier()
    more_files, more_threads = kept()
    return more_files - files, more_threads - threads


@pytest.mark.parametrize("each", [1, 2, 4])
def test_connections_for_rows_do_not_grow_with_the_ranks_of_a_host(each):
    """But for the last rank of a host, to which a barrier of few ranks sends what it has for all."""
    found = on_ranks(kept_after_calls, HOSTS * each, context=on_two_hosts)
    last = {each - 1, 2 * each - 1}
    assert all(
        files <= (max(2, each) if rank in last else 2) for rank, (files, _) in enumerate(found)
    )
    assert all(threads == 0 for _, threads in found)
