"""Plans over blocks are right plans over rows, for any sizes bound to them, and engines bind as the
reference does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.ranks import on_ranks, start, world

from weft.engines import engine
from weft.engines.host import HostProgram
from weft.engines.reference import run
from weft.errors import PlanError
from weft.plan import Buffer, Copy, Plan, Region
from weft.plan.binding import bind, sizes, split
from weft.plan.language import ANY_BLOCK, LANES
from weft.plan.proof import problems, verify

seeds = st.integers(0, 2**32 - 1)


@st.composite
def bound_plans(draw: st.DrawFn) -> Plan:
    """Any plan over blocks, some of them without rows, as a plan over rows."""
    plan = draw(plans.any_plan(st.integers(1, 5)))
    rows = draw(st.lists(st.integers(0, 9), min_size=len(plan.pieces), max_size=len(plan.pieces)))
    return bind(replace(plan, rows_multiple=draw(st.integers(1, 4))), rows)


@settings(max_examples=50)
@given(bound_plans())
def test_every_bound_plan_is_proved(plan):
    verify(plan)


def test_pieces_differ_by_one_block_at_most():
    assert [split(7, 3), split(2, 4), split(0, 2)] == [[3, 2, 2], [1, 1, 0, 0], [0, 0]]
    assert [split(70, 3, 16), split(15, 2, 16), split(32, 4, 16)] == [
        [32, 16, 22],
        [0, 15],
        [16, 16, 0, 0],
    ]
    plan = plans.all_gather(2, 2, "pull")
    assert sizes(plan, (5, 0)) == [3, 2, 0, 0]
    with pytest.raises(PlanError, match="has 2 shards, but 3 sizes were given"):
        bind(plan, (1, 2, 3))


def test_an_engine_refuses_blocks_of_no_shard():
    buffers = {"a": Buffer.of("input", [range(1, 2)]), "out": Buffer.of("output", [range(1, 2)])}
    plan = Plan(
        "test",
        "x",
        buffers,
        ({"compute": (Copy(Region(0, "a", 0, 1), Region(0, "out", 0, 1)),)},),
        pieces=(1,),
    )
    with (
        world() as alone,
        pytest.raises(PlanError, match="blocks of shards that the plan does not have"),
    ):
        plans.execute_unproved(alone, plan, {name: torch.zeros(1, 1) for name in buffers}, [1])


def copied(
    src: Region,
    dst: Region,
    blocks: tuple[range | tuple[int, ...], ...],
    more: tuple[Copy, ...] = (),
) -> list[str]:
    """The complaints about a plan of one rank, whose buffers `a`, `room` and `out` have these
    blocks.
    """
    a, room, out = blocks
    buffers = {
        "a": Buffer.of("input", [a]),
        "room": Buffer.of("workspace", [room]),
        "out": Buffer.of("workspace", [out]),
    }
    return problems(
        Plan("test", "x", buffers, ({"compute": (Copy(src, dst), *more)},), pieces=(2,))
    )


def test_operands_have_the_same_blocks():
    a, out, room = Region(0, "a", 0, 1), Region(0, "out", 0, 1), Region(0, "room", 0, 1)
    swapped = copied(a, out, (range(2), range(2), (1, 0)))
    assert any("the blocks differ" in problem for problem in swapped)
    assert any(
        "the number of rows is not defined" in problem
        for problem in copied(room, room, (range(2), (ANY_BLOCK,), range(2)))
    )
    torn = (
        Copy(Region(0, "a", 0, 2), Region(0, "room", 0, 2)),
        Copy(Region(0, "a", 1, 2), Region(0, "room", 1, 2)),
    )
    found = copied(torn[0].src, torn[0].dst, (range(2), (ANY_BLOCK,) * 2, range(2)), torn[1:])
    assert any("share a slot, but begin at different blocks" in problem for problem in found)


def executed(world, seed, mutant):
    """Every schedule's plan over blocks, executed with two sets of sizes, twice with each, compared
    with the reference.
    """
    choose, own, wrong = random.Random(seed), engine(world), 0
    every = [
        (plan, index)
        for plan, index in product(plans.every(world.ranks, 4), range(2))
        if choose.random() < 0.5 and {*plan.lanes[0]} <= {*LANES}
    ]
    numbers = HostProgram._lay_out
    if mutant:
        numbers = _reversed
    with mock.patch.object(HostProgram, "_lay_out", numbers):
        for plan, _ in every:
            plan = replace(plan, rows_multiple=choose.randrange(1, 5), launch=None)
            rows = [choose.randrange(0, 12) * choose.randrange(0, 2) for _ in plan.pieces]
            for _ in range(2):  # the second time with new tensors of the same sizes
                call = plans.call(bind(plan, rows), choose.randrange(1 << 30))
                (wanted,) = run(call)
                tensors = {
                    name: placed(world, plan, call, name)
                    for name, buffer in plan.buffers.items()
                    if buffer.given
                }
                weights = call.weights[world.rank]
                own.execute(plan, tensors, {name: weights[name] for name in weights}, rows=rows)
                found = {name: tensors[name] for name in wanted[world.rank]}
                wrong += not plans.equal([found], [wanted[world.rank]])
    return wrong, len(every)


def _reversed(program):
    """A mutant: the blocks of workspaces are bound in the opposite order."""
    kept = program.plan
    turned = {
        name: replace(buffer, blocks=tuple(tuple(blocks)[::-1] for blocks in buffer.blocks))
        if buffer.role == "workspace"
        else buffer
        for name, buffer in kept.buffers.items()
    }
    program.plan = replace(kept, buffers=turned)
    _lay_out(program)
    program.plan = kept


_lay_out = HostProgram._lay_out


def placed(world, plan, call, name):
    """The tensor of a buffer on this rank, in symmetric memory if peers access it; outputs are NaN."""
    buffer, rank = call.plan.buffers[name], world.rank
    columns = plans.COLUMNS
    shared = any(
        region.buffer == name and region.rank != r
        for r, lanes in enumerate(plan.lanes)
        for lane in lanes.values()
        for i in lane
        for region in (
            *getattr(i, "srcs", ()),
            *([i.src] if hasattr(i, "src") else []),
            *([i.dst] if hasattr(i, "dst") else []),
        )
    )
    most = max(buffer.rows)
    tensor = (
        world.empty(most, columns, dtype=torch.float64)
        if shared
        else torch.empty(most, columns, dtype=torch.float64)
    )
    tensor = tensor.fill_(torch.nan)[: buffer.rows[rank]]
    return tensor.copy_(call.inputs[rank][name]) if buffer.role == "input" else tensor


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_engines_bind_as_the_reference_does(ranks):
    for wrong, of in on_ranks(executed, ranks, 7, False):
        assert (wrong, of > 30) == (0, True)


def test_a_mutant_of_the_binding_is_detected():
    outcomes = start(executed, 2, 7, True)
    assert any(
        outcome is None or outcome.error is not None or outcome.result[0] for outcome in outcomes
    )
