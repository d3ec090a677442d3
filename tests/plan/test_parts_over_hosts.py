"""A rank of several hosts plans only what concerns it: its part is equal to that of the whole plan,
and all that ranks must agree on follows from it.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.over_hosts import FUSED, PLAIN, groupings

from weft.engines.program import kinds, moves
from weft.plan.language import reads
from weft.plan.messages import (
    batches,
    gate_ranks,
    incoming,
    is_receive_gate,
    lower_to_messages,
    message_signals,
    part_of_messages,
)
from weft.plan.proof import verify
from weft.schedules.barrier import barrier
from weft.schedules.levels import nested
from weft.schedules.peers import examples

NOT_OVER_HOSTS = {"all_reduce of adjacent ranks", "barrier"}
"""Plans that are not made for hosts, so that of a peer all lanes are planned."""
PLANNERS = FUSED | PLAIN | {"barrier": lambda hosts, pieces: barrier(nested(len(hosts), (hosts,)))}


def sent(plan, rank):
    """The lanes of a rank that it executes itself, and its channels."""
    return {name: lane for name, lane in plan.lanes[rank].items() if not is_receive_gate(name)}


def received(plan, rank):
    """The messages that a rank receives, in their order by channel: the rows, the signals that
    their arrival raises, and the ranks that must have begun the call first.
    """
    return {
        (sender, lane): (
            gate_ranks(plan, sender, lane, rank),
            [
                [(message.copy, message.signals) for message in batch]
                for _, batch, _ in batches(plan, sender, lane, rank)
            ],
        )
        for sender, lane in incoming(plan, rank)
    }


def agreed(plan, hosts):
    """What all ranks must agree on."""
    bound = {
        name: torch.float32 for name, buffer in plan.buffers.items() if buffer.role != "workspace"
    }
    lanes = {name for lanes in plan.lanes for name in lanes}
    copied = {region.buffer for _, i in plan.instructions() for region in reads(i)}
    return (
        {*plan.signal_names(), *message_signals(lanes)},
        plan.shared_buffers(hosts),
        kinds(moves(plan), bound, {}),
        copied,
    )


def check(plan, again, hosts, ranks):
    """`again` is the plan once more, of which no lane was computed."""
    whole = lower_to_messages(plan, hosts)
    for rank in ranks:
        part = part_of_messages(again, hosts, rank)
        assert sent(part, rank) == sent(whole, rank)
        assert received(part, rank) == received(whole, rank)
        assert part.promised(rank) == whole.promised(rank)
        assert part.digest == plan.digest
        near = None if plan.uniform else hosts
        assert agreed(again.common(examples(hosts)), near) == agreed(plan, near)


@settings(max_examples=40)
@given(groupings(9, 5), st.sampled_from([*PLANNERS]), st.integers(1, 3))
def test_the_part_of_each_rank_is_that_of_the_whole_plan(hosts, name, pieces):
    check(*(PLANNERS[name](hosts, pieces) for _ in range(2)), hosts, range(len(hosts)))


@pytest.mark.parametrize("name", [*PLANNERS])
def test_sampled_parts_of_large_worlds(name):
    """Of hosts of equal and of different sizes, and of ranks that take turns over hosts."""
    draw = random.Random(name)
    worlds = [
        tuple(rank // 8 for rank in range(32)),
        tuple(rank % 5 for rank in range(20)),
        tuple(sorted([*draw.choices(range(5), k=17), *range(5)])),
    ]
    for hosts in worlds:
        plan, again = (PLANNERS[name](hosts, 1) for _ in range(2))
        check(plan, again, hosts, draw.sample(range(len(hosts)), 2))


@pytest.mark.parametrize("name", [*PLANNERS])
@pytest.mark.parametrize(
    ("ranks", "lowered"), [(16, 9), pytest.param(32, 12, marks=pytest.mark.slow)]
)
def test_whole_plans_of_several_hosts_are_proved(name, ranks, lowered):
    """As written, and lowered, which has many more lanes."""
    verify(PLANNERS[name](tuple(rank * 4 // ranks for rank in range(ranks)), 1))
    hosts = tuple(rank * 3 // lowered for rank in range(lowered))
    verify(lower_to_messages(PLANNERS[name](hosts, 1), hosts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["barrier", "all_gather push", "all_to_all", "reduce_scatter push"]
)
def test_whole_plans_of_many_ranks_are_proved(name):
    verify(PLANNERS[name](tuple(rank // 16 for rank in range(128)), 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANNERS])
@pytest.mark.parametrize("ranks", [64, 128, 256])
def test_sampled_parts_of_larger_worlds(name, ranks):
    hosts = tuple(rank // 16 for rank in range(ranks))
    plan, again = (PLANNERS[name](hosts, 1) for _ in range(2))
    check(plan, again, hosts, random.Random(name).sample(range(ranks), 4))


@pytest.mark.parametrize("name", sorted(PLANNERS.keys() - NOT_OVER_HOSTS))
@pytest.mark.parametrize("ranks", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_rank_of_many_plans_its_own_part(name, ranks):
    """It plans the lanes of some ranks only, keeps its own, and needs few names."""
    hosts, rank, planned = tuple(rank // 16 for rank in range(ranks)), ranks // 2 + 25, []
    plan = PLANNERS[name](hosts, 1)
    make = plan.lanes.make
    plan.lanes.make = lambda rank: planned.append(rank) or make(rank)
    common, part = plan.common(examples(hosts)), part_of_messages(plan, hosts, rank)
    kept = sum(len(lane) for lanes in part.lanes for lane in lanes.values())
    assert kept < 64 * len(hosts)
    assert len({*planned}) < 32
    few = PLANNERS[name](hosts[:64], 1).common(examples(hosts[:64]))
    assert common.signal_names() == few.signal_names()
