"""Thresholds by the caches of a core: the usual ones on usual cores, bounds on others, and the same
on all ranks, whatever each has.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.ranks import on_ranks

import weft
from weft import cache
from weft.schedules.levels import nested
from weft.schedules.thresholds import EAGER_BUFFER_BYTES, Thresholds, agreed
from weft.world import placement
from weft.world.topology import Core, Topology

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
def test_what_follows_from_caches(first, second, found):
    limits = Thresholds(first * KIB, second * KIB)
    assert sizes(limits) == found
    assert limits.eager_bytes <= EAGER_BUFFER_BYTES


def test_a_core_of_which_nothing_is_known_has_the_usual_ones():
    assert Thresholds() == Thresholds(32 * KIB, 1024 * KIB, 3.0)


def test_agreed_is_what_suits_all():
    one, other = Thresholds(48 * KIB, 512 * KIB, 2.0), Thresholds(32 * KIB, 2048 * KIB, 4.0)
    assert agreed([one, other]) == agreed([other, one]) == Thresholds(32 * KIB, 512 * KIB, 4.0)
    assert agreed([one]) == one


def test_levels_are_taken_where_they_save_more_than_a_hop():
    latencies = (0.0, Thresholds.hop, 8.0, 20.0)
    assert [len(nested(16, latency=latency)) for latency in latencies] == [4, 2, 2, 1]


def with_caches_of_its_own():
    """A world in which each rank has other caches than the others, and has measured another hop."""
    rank = int(os.environ["RANK"])
    near = [(128 * KIB, 512 * KIB), (48 * KIB, 2048 * KIB), (64 * KIB, 0)][rank]
    placement.host_topology = lambda: Topology(
        tuple(Core((cpu,), 0, 0, 0, caches=near) for cpu in os.sched_getaffinity(0))
    )
    cache.stored = lambda name, fits: [{"thresholds": {"hop": 7.5}}, None, None][rank]
    return weft.init(timeout=20)


def collectives(world):
    """Sizes around the thresholds that ranks would have by themselves: each takes a workspace or
    none, as all others must.
    """
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
    return world.thresholds, world.levels


def test_ranks_with_different_caches_agree():
    (limits, levels), *others = on_ranks(collectives, 3, context=with_caches_of_its_own)
    assert limits == Thresholds(48 * KIB, 512 * KIB, 7.5)
    assert others == [(limits, levels)] * 2


def test_eager_buffers_have_room_for_what_large_caches_allow():
    def sums(limits):
        world, own = weft.init(), torch.ones(EAGER_BUFFER_BYTES // 4)
        world.thresholds = limits
        return [
            weft.all_reduce(own).eq(2).all(),
            weft.reduce_scatter(own).eq(2).all(),
            weft.all_gather(own).eq(1).all(),
        ]

    with weft.local_world(2) as local:
        assert all(all(sums) for sums in local.run(sums, Thresholds(256 * KIB)))


def test_ranks_that_are_threads_have_those_of_their_process():
    with weft.local_world(2) as local:
        assert local.run(lambda: weft.init().thresholds) == [placement.thresholds()] * 2
