"""Files and threads of a rank in a world of several hosts: all that it has open, in worlds of real
processes, and so in one of 1,024 ranks on 64 hosts.
"""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from support.claimed_hosts import claiming, two_hosts
from support.ranks import group, on_ranks

import weft
from weft.process_group import worlds
from weft.world.network import first_links

HOSTS = 2
FEW = 40  # files of a rank that depend on nothing: of Python, torch, a test, a world
SETTLED = 10.0  # seconds in which surplus connections are closed, on a busy machine too
ENOUGH = 160  # files of a rank, of 1,024 on 64 hosts


def files_of(hosts, rank, rows):
    """The most files of a rank that exchanges rows with so many ranks elsewhere."""
    of_its_host = sum(host == hosts[rank] for host in hosts) - 1
    return FEW + 2 * of_its_host + len(first_links(hosts, rank)) + rows


def kept():
    """The files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def for_rows(rank, each):
    """The most connections for rows of one of two hosts' ranks: more of the last rank of a host, to
    which a barrier of few ranks sends what it has for all.
    """
    return each if each > 2 and rank % each == each - 1 else 2


def kept_after_calls(world, each):
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
    # one of two connections that ranks have made at once is closed a moment later
    deadline = time.monotonic() + SETTLED
    while kept()[0] > files + for_rows(world.rank, each) and time.monotonic() < deadline:
        time.sleep(0.001)
    more_files, more_threads = kept()
    weft.barrier()  # before any rank leaves
    return more_files - files, more_threads - threads


@pytest.mark.parametrize("each", [1, 2, 4])
def test_connections_for_rows_do_not_grow_with_the_ranks_of_a_host(each):
    found = on_ranks(kept_after_calls, HOSTS * each, each, context=two_hosts)
    assert all(files <= for_rows(rank, each) for rank, (files, _) in enumerate(found)), found
    assert all(threads == 0 for _, threads in found)


def all_kept(group):
    """All files of this rank, before and after one-sided calls to the rank of its place on the next
    host; the group makes its world without gloo, which would connect all ranks.
    """
    world = worlds.find(group)
    rows = weft.all_gather(torch.full((1, 4), float(world.rank)), world=world)
    assert rows[:, 0].tolist() == [*range(world.ranks)]
    part = world.empty(4)
    part.fill_(float(world.rank))
    weft.barrier(world=world)
    before, _ = kept()
    peer = (world.rank + world.ranks // world.hosts.number) % world.ranks
    for _ in range(3):
        got = torch.zeros(4)
        weft.get(got, part, peer)
        assert got.tolist() == [peer] * 4
    weft.barrier(world=world)
    return before, kept()[0]


@pytest.mark.parametrize(("number", "each"), [(2, 4), (4, 2)])
def test_all_files_of_a_rank(number, each):
    """Its own and those of its host's ranks, of the lines that it carries, of rows, and then of its
    one-sided calls. Rank 0 serves the store of the rendezvous as well, and a barrier of few ranks
    is one of all with all.
    """
    hosts = [host for host in range(number) for _ in range(each)]
    found = on_ranks(all_kept, number * each, context=partial(claiming, number, group))
    for rank, (before, after) in enumerate(found):
        last = rank % each == each - 1
        rows = (number - 1) * (each if last else 1)
        store = 2 * len(hosts) * (rank == 0)
        assert before <= files_of(hosts, rank, rows) + store, rank
        assert after - before <= 2, rank  # to the next host, and from the one before


def test_a_thousand_ranks_need_few_files():
    """By the plans a rank exchanges rows with one rank of each other host:
    tests/plan/test_connections_over_hosts.py.
    """
    hosts = [host for host in range(64) for _ in range(16)]
    assert max(files_of(hosts, rank, 63) for rank in range(len(hosts))) <= ENOUGH
