"""Link ranks of hosts: whoever they are, all ranks learn who leaves and who is lost, and reach each
other.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from support.claimed_hosts import two_hosts
from support.loopback import LIMIT
from support.on_hosts.losses import error_of
from support.ranks import start

import weft
from weft._native import link_ranks
from weft.world.network import first_links

SOON = 5.0  # seconds; survivors take milliseconds, and the machine may be busy
EACH = 3  # ranks of a host


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2, 0, 1), (0, 0, 0, 1, 1, 2, 3, 3)])
def test_every_two_hosts_have_one_link(hosts):
    ends = Counter(
        frozenset([rank, peer])
        for rank in range(len(hosts))
        for host, peer in first_links(hosts, rank).items()
        if hosts[peer] == host
    )
    assert set(ends.values()) == {2}
    assert sorted(sorted(hosts[rank] for rank in pair) for pair in ends) == [
        [*pair] for pair in itertools.combinations(sorted({*hosts}), 2)
    ]


def test_ranks_of_a_host_share_its_links_evenly():
    hosts = [host for host in range(64) for _ in range(16)]
    links = [len(first_links(hosts, rank)) for rank in range(len(hosts))]
    assert {*links} == {3, 4}


def test_all_ranks_of_a_host_are_link_ranks_in_turn():
    hosts = (0, 1, 0, 1, 0)
    for there in range(5):
        assert sorted(link_ranks(hosts, 0, there)) == [0, 2, 4]


def wait_until(true):
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def have_left(worlds, gone):
    return all(world.mesh.left(rank) for world in worlds for rank in gone)


def reaches(worlds, memory, rank, peer):
    """A rank gets what a peer has, by a connection that is made for it."""
    got = torch.zeros(2)
    weft.get(got, memory[rank], peer)
    assert got.tolist() == [peer] * 2


def close_on_threads(worlds, ranks):
    threads = [threading.Thread(target=worlds[rank].close) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def filled():
    world = weft.init()
    part = world.empty(2)
    part.fill_(float(world.rank))
    weft.barrier()
    return part


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_leave_are_replaced_as_link_ranks(seed):
    """Of three hosts, one by one or two at once, in any order: each time all others learn of it, and
    two that had no connection reach each other.
    """
    order = random.Random(seed).sample(range(3 * EACH), 3 * EACH)
    hosts = [rank % 3 for rank in range(3 * EACH)]
    with weft.local_world(3 * EACH, hosts=hosts, timeout=LIMIT) as local:
        memory, worlds = local.run(filled), local.worlds
        while len(order) > 2:
            gone, order = order[: 1 + seed % 2], order[1 + seed % 2 :]
            close_on_threads(worlds, gone)
            wait_until(partial(have_left, [worlds[rank] for rank in order], gone))
            assert all(worlds[rank].closed is None for rank in order)
            one = order[0]
            for other in order[1:]:
                if hosts[other] != hosts[one]:
                    reaches(worlds, memory, one, other)
                    break
        assert [worlds[rank].mesh.failure()[0] for rank in order] == [""] * len(order)


def test_a_failure_reaches_other_hosts_after_the_first_link_ranks_have_left():
    hosts = [0, 0, 0, 1, 1, 1]
    with weft.local_world(6, hosts=hosts, timeout=LIMIT) as local:
        worlds = local.worlds
        for gone in (link_ranks(hosts, 0, 1)[0], link_ranks(hosts, 1, 0)[0]):
            close_on_threads(worlds, [gone])
        left = [rank for rank in range(6) if worlds[rank].closed is None]
        assert len(left) == 4
        worlds[left[0]].failure.fail(KeyError("enough"))
        for rank in left[1:]:
            wait_until(lambda world=worlds[rank]: world.mesh.failure()[0])
            assert worlds[rank].mesh.failure()[:2] == ("KeyError", left[0])


def killed(world, victim, folder):
    weft.barrier()
    (folder / f"ready{world.rank}").touch()
    if world.rank == victim:
        while len([*folder.iterdir()]) < world.ranks:  # others may still be in the barrier
            time.sleep(0.001)
        (folder / "death").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    name, words, _ = error_of(weft.barrier)
    return name, words, time.time()


@pytest.mark.parametrize("victim", range(4))
def test_any_rank_that_dies_is_named_on_all_hosts(victim, tmp_path):
    outcomes = start(killed, 4, victim, tmp_path, context=two_hosts)
    death = float((tmp_path / "death").read_text())
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome is not None, rank
            assert outcome.error is None, outcome
            name, words, when = outcome.result
            assert name == "PeerLost", words
            assert words.startswith(f"rank {victim} (pid "), words
            assert when - death < SOON


def killed_after_farewell(world, folder):
    """The first link ranks of both hosts leave, then the last rank dies."""
    hosts = [*world.hosts]
    leavers = {link_ranks(hosts, here, 1 - here)[0] for here in (0, 1)}
    victim = max({*range(world.ranks)} - leavers)
    weft.barrier()
    if world.rank in leavers:
        world.close()
        return None
    while not all(world.mesh.left(each) for each in leavers):
        time.sleep(0.001)
    (folder / f"ready{world.rank}").touch()
    if world.rank == victim:
        while len([*folder.iterdir()]) < world.ranks - 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    while not world.mesh.failure()[0]:
        time.sleep(0.001)
    return world.mesh.failure()[:2], victim


def test_a_death_is_known_after_the_first_link_ranks_have_left(tmp_path):
    outcomes = start(killed_after_farewell, 6, tmp_path, context=two_hosts)
    found = [each.result for each in outcomes if each is not None and each.result is not None]
    assert len(found) == 3, outcomes
    assert all(failure == ("PeerLost", victim) for failure, victim in found)
