"""Thresholds by the caches of a core: the defaults on common cores, bounds on others, and equal
ones on all ranks of a world.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.ranks import on_ranks

import weft
from weft.host import placement
from weft.host.topology import Core, Topology
from weft.schedules.levels import SIGNAL_LATENCY, nested
from weft.schedules.thresholds import EAGER_BUFFER_BYTES, Thresholds, agreed
from weft.world import local as local_worlds

KIB = 1 << 10


def sizes(limits):
    return [
        size / KIB
        for size in (
            limits.eager_bytes,
            limits.staged_bytes,
            limits.slot_bytes,
            limits.pushed_bytes,
        )
    ]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (32, 1024, [16, 1024, 512, 256]),
        (48, 2048, [24, 2048, 1024, 512]),
        (32, 512, [16, 512, 256, 128]),
        (128, 3072, [64, 3072, 1536, 768]),
        (256, 16384, [64, 4096, 2048, 1024]),  # bounds
        (4, 64, [4, 256, 128, 64]),
    ],
)
def test_thresholds_follow_from_caches(first, second, found):
    limits = Thresholds(first * KIB, second * KIB)
    assert sizes(limits) == found
    assert limits.eager_bytes <= EAGER_BUFFER_BYTES


def test_a_core_without_known_caches_has_the_defaults():
    assert Thresholds() == Thresholds(32 * KIB, 1024 * KIB)


def test_ranks_agree_on_thresholds_that_suit_all():
    one, other = Thresholds(48 * KIB, 512 * KIB), Thresholds(32 * KIB, 2048 * KIB)
    assert agreed([one, other]) == agreed([other, one]) == Thresholds(32 * KIB, 512 * KIB)
    assert agreed([one]) == one


def test_levels_are_taken_if_they_save_more_than_the_latency():
    latencies = (0.0, SIGNAL_LATENCY, 8.0, 20.0)
    assert [len(nested(16, latency=latency)) for latency in latencies] == [4, 2, 2, 1]


def with_caches_of_its_own():
    """A world in which each rank has different caches."""
    rank = int(os.environ["RANK"])
    caches = [(128 * KIB, 512 * KIB), (48 * KIB, 2048 * KIB), (64 * KIB, 0)][rank]
    placement.host_topology = lambda: Topology(
        tuple(Core((cpu,), 0, 0, 0, caches=caches) for cpu in os.sched_getaffinity(0))
    )
    return weft.init(timeout=20)


def collectives(world):
    """Sizes around the thresholds of the single ranks: all ranks must agree on using the workspace."""
    for count in (5 * KIB, 7 * KIB, 9 * KIB, 17 * KIB, 150 * KIB, 400 * KIB):
        own, symmetric, out = (
            torch.full((count,), float(world.rank)),
            world.empty(count),
            world.empty(world.ranks * count),
        )
        total, parts = (
            sum(range(world.ranks)),
            torch.arange(float(world.ranks)).repeat_interleave(count),
        )
        assert weft.all_reduce(own).eq(total).all()
        assert weft.all_gather(own).equal(parts)
        assert weft.all_gather(symmetric.copy_(own), out=out).equal(parts)
        assert weft.broadcast(own, 1).eq(1).all()
    return world.thresholds, world.placement.levels


def test_ranks_with_different_caches_agree():
    (limits, levels), *others = on_ranks(collectives, 3, context=with_caches_of_its_own)
    assert limits == Thresholds(48 * KIB, 512 * KIB)
    assert others == [(limits, levels)] * 2


def test_eager_buffers_suffice_for_large_caches(monkeypatch):
    limits = Thresholds(256 * KIB)
    monkeypatch.setattr(local_worlds, "thresholds", lambda: limits)

    def sums():
        own = torch.ones(EAGER_BUFFER_BYTES // 4)
        assert weft.init().thresholds == limits
        return [
            weft.all_reduce(own).eq(2).all(),
            weft.reduce_scatter(own).eq(2).all(),
            weft.all_gather(own).eq(1).all(),
        ]

    with weft.local_world(2) as local:
        assert all(all(results) for results in local.run(sums))


def test_ranks_that_are_threads_share_the_thresholds_of_their_process():
    with weft.local_world(2) as local:
        assert local.run(lambda: weft.init().thresholds) == [placement.thresholds()] * 2
