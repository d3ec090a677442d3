"""Every schedule, with any choices and sizes, is proved and computes its operator."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans

from weft.engines.reference import run
from weft.plan import Compute, Copy, Notify, Plan, Signal, Wait, accesses, reads
from weft.plan.proof import verify
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.all_reduce import all_reduce
from weft.schedules.lanes import enter, leave, products_alone, tidy
from weft.schedules.operators import OPERATORS
from weft.schedules.peers import after, before, in_order
from weft.schedules.workload import Request
from weft_tools.bench.ablation import own_rows_last, split_arrivals

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60)
@given(plans.any_plan())
def test_is_proved(plan):
    verify(plan)


@settings(max_examples=30)
@given(plans.bound_plan(), seeds)
def test_computes_its_operator_in_any_interleaving(plan, seed):
    calls = [plans.call(plan, seed + i) for i in range(3)]
    for order in (None, random.Random(seed)):
        for call, outputs in zip(calls, run(*calls, order=order), strict=True):
            assert plans.equal(outputs, plans.expected(call))


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_products_alone_are_those_of_the_plan(operator):
    """They are cut as in the plan, wait for nothing, and are proved to be the products of all rows
    that a rank multiplies.
    """
    for algorithm, ranks, pieces in product(operator.algorithms, (1, 2, 3), (1, 4)):
        plan = operator.plan(Request(ranks, pieces, algorithm))
        alone = products_alone(plan, operator.exchanges)
        verify(alone)
        products = [i for _, i in plan.instructions() if isinstance(i, Compute)]
        found = [i for _, i in alone.instructions()]
        assert [i.dst.rows for i in found] == [i.dst.rows for i in products]
        assert {type(i) for i in found} == {Compute}


@st.composite
def successions(
    draw: st.DrawFn, make: Callable[..., st.SearchStrategy[Plan]], length: int
) -> list[Plan]:
    """Plans of different operators and pieces, or sizes, for the same ranks."""
    ranks = st.just(draw(st.integers(1, 5)))
    return [draw(make(ranks)) for _ in range(length)]


@settings(max_examples=60)
@given(successions(plans.any_plan, 3))
def test_any_three_may_follow_one_another(three):
    verify(*three)


@settings(max_examples=25)
@given(successions(plans.bound_plan, 5), seeds)
def test_any_five_compute_their_operators_in_one_workspace(five, seed):
    calls = [plans.call(plan, seed + i) for i, plan in enumerate(five)]
    for call, outputs in zip(calls, run(*calls, order=random.Random(seed)), strict=True):
        assert plans.equal(outputs, plans.expected(call))


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_two_may_follow_each_other(ranks):
    pairs = [*product(plans.every(ranks, 2), plans.every(ranks, 1))]
    for one, other in random.Random(1).sample(pairs, 250):
        verify(one, other)
        verify(other, one)


@settings(max_examples=30)
@given(plans.any_plan())
def test_no_redundant_instructions(plan):
    """No region without blocks, and no repeated wait of a lane for the same count."""
    for lanes in plan.lanes:
        for lane in lanes.values():
            assert tidy(lane) == lane
            assert all(region.rows for instruction in lane for region in accesses(instruction))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_transfer_is_larger_than_a_piece(algorithm):
    plan = all_gather_matmul(Request(3, 4, algorithm))
    between = [
        i
        for lanes in plan.lanes
        for lane in lanes.values()
        for i in lane
        if isinstance(i, Copy) and i.src.rank != i.dst.rank
    ]
    assert all(copy.src.rows == 1 for copy in between)
    assert bool(between) == (algorithm != "direct")


@pytest.mark.parametrize("algorithm", ["direct", "pull", "push", "ring"])
def test_own_rows_are_multiplied_without_waiting(algorithm):
    plan = all_gather_matmul(Request(3, 2, algorithm, symmetric=True))
    for r, lanes in enumerate(plan.lanes):
        first = next(i for i in lanes["compute"] if isinstance(i, Wait | Compute))
        assert isinstance(first, Compute)
        assert first.srcs[0].rank == r


def test_own_rows_can_be_multiplied_last():
    plan = own_rows_last(all_gather_matmul(Request(3, 2, "direct")))
    for r, lanes in enumerate(plan.lanes):
        assert [i.srcs[0].rank for i in lanes["compute"] if isinstance(i, Compute)] == [
            *after(r, 3),
            r,
        ]


@pytest.mark.parametrize("joined", [True, False])
def test_products_of_adjacent_arrivals_are_joined(joined):
    plan = all_gather_matmul(Request(2, 8, "push"))
    plan = plan if joined else split_arrivals(plan)
    products = [i.dst.rows for i in plan.lanes[0]["compute"] if isinstance(i, Compute)]
    assert products == ([8, 4, 2, 1, 1] if joined else [8] + [1] * 8)


def test_a_ring_sends_to_adjacent_ranks_only():
    plan = all_gather(5, 2, "ring", symmetric_gathered=True)
    for r, lanes in enumerate(plan.lanes):
        spoken_to = {i.rank for i in lanes["compute"] if isinstance(i, Notify)}
        put_to = {i.dst.rank for i in lanes["compute"] if isinstance(i, Copy)}
        assert spoken_to <= {(r - 1) % 5, (r + 1) % 5}
        assert put_to <= {r, (r + 1) % 5}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_rank_is_the_first_target_of_two_ranks(ranks):
    for r in range(ranks):
        assert sorted([r, *after(r, ranks)]) == sorted([r, *before(r, ranks)]) == [*range(ranks)]
    for step in range(ranks - 1):
        assert len({after(r, ranks)[step] for r in range(ranks)}) == ranks
        assert all(before(after(r, ranks)[step], ranks)[step] == r for r in range(ranks))


def test_all_ranks_enter_and_leave():
    assert enter(1, 3) == [Wait(Signal("free", 2), 0), Wait(Signal("free", 0), 0)]
    assert leave(1, 3) == [Notify(0, Signal("free", 1)), Notify(2, Signal("free", 1))]


def test_pieces_go_peer_after_peer_or_interleaved():
    assert in_order("peer", [2, 0], 2) == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert in_order("interleaved", [2, 0], 2) == [(2, 0), (0, 0), (2, 1), (0, 1)]


def test_tidying_removes_redundant_waits():
    this, that = Signal("this", 0), Signal("that", 0)
    lane = [
        Wait(this, 1),
        Wait(this, 2),
        Notify(0, this),
        Wait(this, 1),
        Wait(that, 0),
        Wait(this, 3),
    ]
    assert tidy(lane) == (Wait(this, 2), Notify(0, this), Wait(that, 0), Wait(this, 3))


def test_peers_need_not_wait_for_a_ranks_own_copies():
    lane = all_gather(2, 2, "pull").lanes[0]["compute"]
    staged = [
        at for at, done in enumerate(lane) if isinstance(done, Copy) and done.dst.buffer == "staged"
    ]
    assert len(staged) == 2
    for at in staged:
        notified, kept = lane[at + 1 : at + 3]
        assert isinstance(notified, Notify)
        assert isinstance(kept, Copy)
        assert (notified.rank, kept.src, kept.dst.buffer) == (1, lane[at].src, "gathered")


def test_gathered_sums_are_read_by_peers_alone():
    """Non-temporal stores are possible: a store to a line in a peer's cache would wait for that
    core.
    """
    plan = all_reduce(3, 2, "two_shot", symmetric_a=True)
    readers = {
        (rank, region.rank)
        for rank, i in plan.instructions()
        for region in reads(i)
        if region.buffer == "reduced"
    }
    assert readers == {(rank, peer) for rank, peer in product(range(3), repeat=2) if rank != peer}
