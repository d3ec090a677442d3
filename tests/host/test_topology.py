"""Cores, and their assignment to ranks, on machines of every kind, from the sysfs of their kernels."""

from __future__ import annotations

import os

import pytest
from support.sysfs import recorded

from weft.bootstrap.listener import Address
from weft.bootstrap.rendezvous import RankInfo
from weft.host import topology
from weft.host.topology import listed, numbers
from weft.world.placement import groups


@pytest.fixture
def machine(tmp_path):
    return lambda name, groups="": topology.read(recorded(name, tmp_path), groups)


def everything(found):
    return {cpu for core in found.cores for cpu in core.cpus}


def shares(found, ranks, threads, allowed=None):
    assigned = topology.assign(
        found, everything(found) if allowed is None else allowed, ranks, threads
    )
    return assigned if assigned is None else [listed(cpus) for cpus in assigned]


def test_lists_of_numbers():
    assert numbers("0-3,8\n") == {0, 1, 2, 3, 8}
    assert numbers("") == frozenset()
    assert listed([8, 3, 1, 2]) == "1-3,8"
    assert listed([]) == ""


def test_siblings_are_distinguished_from_cores(machine):
    found = machine("xeon")
    assert len(found.cores) == 64
    assert found.cores[40].cpus == (40, 104)
    assert (found.cores[40].package, found.cores[40].node, found.cores[40].cache) == (1, 1, 32)
    assert found.nodes == [0, 1]


def test_each_rank_has_a_node(machine):
    found = machine("xeon")
    assert topology.threads_for(found, everything(found), 2) == 32
    assert shares(found, 2, 32) == ["0-31", "32-63"]
    assert shares(found, 4, 16) == ["0-15", "16-31", "32-47", "48-63"]
    assert shares(found, 2, 1) == ["0-31", "32-63"]  # more cores than threads


def test_ranks_get_smaller_shares_rather_than_two_nodes(machine):
    found = machine("xeon")
    assert topology.threads_for(found, everything(found), 3) == 16
    assert shares(found, 3, 16) == ["0-15", "16-31", "32-63"]
    assert shares(found, 3, 21) == ["0-20", "21-41", "42-63"]  # unless more threads are requested


def test_ranks_are_spread_over_caches(machine):
    found = machine("epyc")
    assert len({core.cache for core in found.cores}) == 8
    assert shares(found, 8, 8) == [
        "0-7",
        "8-15",
        "16-23",
        "24-31",
        "32-39",
        "40-47",
        "48-55",
        "56-63",
    ]
    assert shares(found, 2, 4) == ["0-31", "32-63"]
    assert shares(found, 16, 4)[:3] == ["0-3", "4-7", "8-11"]
    four = machine("epyc-4-nodes")
    assert shares(four, 4, 2) == ["0-15", "16-31", "32-47", "48-63"]
    assert shares(four, 8, 8)[2:4] == ["16-23", "24-31"]


def test_one_thread_per_core_and_every_core_once(machine):
    for name, ranks in (("graviton", 4), ("graviton", 64), ("epyc", 6), ("xeon", 64)):
        found = machine(name)
        threads = topology.threads_for(found, everything(found), ranks)
        assigned = topology.assign(found, everything(found), ranks, threads)
        assert all(len(share) >= threads for share in assigned)
        owners = [
            core for share in assigned for core in found.cores if not share.isdisjoint(core.cpus)
        ]
        assert len(owners) == len(set(owners)) == sum(map(len, assigned))


def test_slow_cores_are_left_alone(machine):
    laptop, phone = machine("laptop"), machine("phone")
    assert [core.fast for core in laptop.cores] == [True] * 6 + [False] * 8
    assert topology.threads_for(laptop, everything(laptop), 2) == 3
    assert shares(laptop, 2, 3) == ["0,2,4", "6,8,10"]
    assert shares(laptop, 2, 7) == ["0,2,4,6,8,10,12", "13-19"]  # too many for the fast cores alone
    assert shares(phone, 2, 2) == ["4-5", "6-7"]
    assert shares(phone, 2, 1, allowed=range(4)) == ["0-1", "2-3"]  # without any other cores


def test_a_container_has_the_cores_of_its_group_and_affinity(machine, tmp_path):
    group = tmp_path / "fs/cgroup/pods/one"
    group.mkdir(parents=True)
    (group / "cpuset.cpus.effective").write_text("30-33,94-97\n")
    found = machine("xeon", "0::/pods/one\n")
    assert found.cpuset == numbers("30-33,94-97")
    assert shares(found, 2, 2, found.cpuset) == ["30-31", "32-33"]
    assert topology.threads_for(found, found.cpuset, 2) == 2
    # a group without a list of cores
    assert machine("xeon", "0::/pods/other\n").cpuset == everything(found)
    old = tmp_path / "fs/cgroup/cpuset/one"
    old.mkdir(parents=True)
    (old / "cpuset.effective_cpus").write_text("7\n")
    assert machine("xeon", "9:name=systemd:/\n4:cpuset:/one\n").cpuset == {7}


def test_more_threads_than_cores(machine):
    found = machine("xeon")
    assert shares(found, 2, 3, numbers("0-2,64-66")) == ["0-1,64", "2,65-66"]  # siblings count
    assert shares(found, 4, 1, numbers("0-1")) == ["0", "1", "0", "1"]  # alternately
    assert shares(found, 3, 1, numbers("0-1")) is None


def test_memory_without_cores(machine):
    found = machine("expander")
    assert found.memory_nodes == (2,)
    assert found.nodes == [0, 1]
    assert shares(found, 2, 4) == ["0-3", "4-7"]


@pytest.mark.parametrize(
    ("name", "cpus", "sizes"),
    [
        ("xeon", "0-127", (48, 1280)),
        ("epyc", "3,70", (32, 512)),
        ("graviton", "0-63", (64, 1024)),
        ("laptop", "0-3", (48, 1280)),
        ("laptop", "12", (32, 512)),  # a quarter of the cache of four cores
        ("laptop", "0-19", (32, 512)),
        ("phone", "0-7", (0, 0)),  # unknown
    ],
)
def test_the_least_caches_of_the_cores_of_a_rank(machine, name, cpus, sizes):
    assert topology.data_caches(machine(name), numbers(cpus)) == tuple(size << 10 for size in sizes)


def test_a_host_without_topology(tmp_path):
    online = tmp_path / "devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-3\n")
    found = topology.read(tmp_path)
    assert [core.cpus for core in found.cores] == [(0,), (1,), (2,), (3,)]
    assert shares(found, 2, 2) == ["0-1", "2-3"]
    assert topology.data_caches(found, {0}) == topology.data_caches(found, ()) == (0, 0)


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("xeon", 16, [8, 16]),
        ("epyc", 32, [4, 32]),
        ("epyc-4-nodes", 32, [4, 8, 32]),
        ("graviton", 16, [16]),
    ],
)
def test_ranks_are_grouped_by_shared_caches_and_packages(machine, name, ranks, sizes):
    found = machine(name)
    localities = [
        topology.locality(found, cpus) for cpus in topology.assign(found, everything(found), ranks)
    ]
    levels = groups(
        [
            RankInfo(1, "host", Address("", 0, b""), frozenset(), 1, locality)
            for locality in localities
        ]
    )
    assert sorted({max(map(level.count, level)) for level in levels}) == sizes
    assert all(level == tuple(sorted(level)) for level in levels)


def test_ranks_are_grouped_by_the_levels_known_of_all(machine):
    found = machine("epyc-4-nodes")
    assert topology.locality(found, numbers("0-7")) == (0, 0, 0)
    assert topology.locality(found, numbers("64,65")) == (0, 0, 0)
    assert topology.locality(found, numbers("0-15")) == (0, 0)
    assert topology.locality(found, everything(found)) == (0,)
    assert topology.locality(machine("xeon"), numbers("0,32")) == ()
    localities = [(0, 0, 0), (0, 0, 8), (0, 1, 16), (0, 1)]
    infos = [
        RankInfo(1, host, Address("", 0, b""), frozenset(), 1, locality)
        for host in ("one", "two")
        for locality in localities
    ]
    assert groups(infos) == (
        (0, 0, 1, 1, 2, 2, 3, 3),
        (0, 0, 0, 0, 1, 1, 1, 1),
        (0, 0, 0, 0, 1, 1, 1, 1),
    )


def test_a_host_without_sysfs(tmp_path):
    """As in some sandboxes: all hardware threads are alike, and may be divided."""
    found = topology.read(tmp_path / "none")
    assert {cpu for core in found.cores for cpu in core.cpus} == {*range(os.cpu_count() or 1)}
    allowed = os.sched_getaffinity(0)
    assert topology.threads_for(found, allowed, 2) >= 1
    assert len(topology.assign(found, allowed, 2 * len(allowed))) == 2 * len(allowed)
