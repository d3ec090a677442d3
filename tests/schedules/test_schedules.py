"""Every schedule, of any sizes and choices, is proved and computes what its operator means."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans

from weft.engines.reference import run
from weft.plan import Copy, Matmul, Notify, Plan, Signal, Wait, accesses
from weft.plan.proof import verify
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.common import after, before, chunks, enter, leave, offsets, tidy

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=120, deadline=None)
@given(plans.any_plan())
def test_is_proved(plan):
    verify(plan)


@settings(max_examples=60, deadline=None)
@given(plans.any_plan(), seeds)
def test_computes_its_operator_however_lanes_interleave(plan, seed):
    calls = [plans.call(plan, seed + i) for i in range(3)]
    for order in (None, random.Random(seed)):
        for call, outputs in zip(calls, run(*calls, order=order), strict=True):
            assert plans.equal(outputs, plans.expected(call))


@st.composite
def successions(draw: st.DrawFn, length: int, max_ranks: int) -> list[Plan]:
    """Plans of different operators and sizes for the same ranks."""
    ranks = draw(st.integers(1, max_ranks))
    rows = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)
    return [draw(plans.any_plan(rows)) for _ in range(length)]


@settings(max_examples=120, deadline=None)
@given(successions(3, max_ranks=5))
def test_any_three_may_follow_one_another(three):
    verify(*three)


@settings(max_examples=50, deadline=None)
@given(successions(5, max_ranks=5), seeds)
def test_any_five_compute_their_operators_in_one_workspace(five, seed):
    calls = [plans.call(plan, seed + i) for i, plan in enumerate(five)]
    for call, outputs in zip(calls, run(*calls, order=random.Random(seed)), strict=True):
        assert plans.equal(outputs, plans.expected(call))


@pytest.mark.parametrize(("rows", "others"), [((2, 1), (1, 0)), ((0, 2, 1), (2, 0, 0))], ids=str)
def test_any_two_may_follow_each_other(rows, others):
    pairs = [*product(plans.every(rows, 1), plans.every(others, 1))]
    for one, other in random.Random(1).sample(pairs, 500):
        verify(one, other)
        verify(other, one)


@settings(max_examples=50, deadline=None)
@given(plans.any_plan())
def test_nothing_is_said_twice(plan):
    """No empty regions, and no wait for what its lane has waited for before."""
    for lanes in plan.lanes:
        for lane in lanes.values():
            assert tidy(lane) == lane
            assert all(region.rows for instruction in lane for region in accesses(instruction))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_transfer_is_larger_than_asked(algorithm):
    plan = all_gather_matmul((7, 5, 9), algorithm, chunk_rows=3)
    between = [
        i for lanes in plan.lanes for lane in lanes.values() for i in lane if isinstance(i, Copy) and i.src.rank != i.dst.rank
    ]
    assert all(copy.src.rows <= 3 for copy in between)
    assert bool(between) == (algorithm != "direct")


@pytest.mark.parametrize("algorithm", ["direct", "pull", "push", "ring"])
def test_own_rows_are_multiplied_without_waiting(algorithm):
    plan = all_gather_matmul((2, 2, 2), algorithm, chunk_rows=1, symmetric_a=True)
    for r, lanes in enumerate(plan.lanes):
        first = next(i for i in lanes["compute"] if isinstance(i, Wait | Matmul))
        assert isinstance(first, Matmul)
        assert first.src.rank == r


def test_own_rows_can_be_multiplied_last():
    plan = all_gather_matmul((2, 2, 2), "direct", chunk_rows=1, own_first=False)
    for r, lanes in enumerate(plan.lanes):
        assert [i.src.rank for i in lanes["compute"] if isinstance(i, Matmul)] == [*after(r, 3), r]


@pytest.mark.parametrize("joined", [True, False])
def test_products_of_adjacent_arrivals_are_joined(joined):
    plan = all_gather_matmul((1, 8), "push", chunk_rows=1, joined=joined)
    products = [i.src.rows for i in plan.lanes[0]["compute"] if isinstance(i, Matmul)]
    assert products == ([1, 4, 2, 1, 1] if joined else [1] * 9)


def test_a_ring_talks_to_neighbours_only():
    plan = all_gather((1, 2, 0, 3, 1), "ring", chunk_rows=2, symmetric_gathered=True)
    for r, lanes in enumerate(plan.lanes):
        spoken_to = {i.rank for i in lanes["compute"] if isinstance(i, Notify)}
        put_to = {i.dst.rank for i in lanes["compute"] if isinstance(i, Copy)}
        assert spoken_to <= {(r - 1) % 5, (r + 1) % 5}
        assert put_to <= {r, (r + 1) % 5}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_rank_is_the_first_of_two(ranks):
    for r in range(ranks):
        assert sorted([r, *after(r, ranks)]) == sorted([r, *before(r, ranks)]) == [*range(ranks)]
    for step in range(ranks - 1):
        assert len({after(r, ranks)[step] for r in range(ranks)}) == ranks
        assert all(before(after(r, ranks)[step], ranks)[step] == r for r in range(ranks))


def test_all_ranks_enter_and_leave():
    assert enter(1, 3) == [Wait(Signal("free", 2), 0), Wait(Signal("free", 0), 0)]
    assert leave(1, 3) == [Notify(0, Signal("free", 1)), Notify(2, Signal("free", 1))]


def test_offsets_are_where_rows_begin():
    assert offsets((3, 0, 2)) == [0, 3, 3]
    assert offsets((4,)) == [0]


@given(st.integers(0, 50), st.integers(1, 60))
def test_chunks_cover_the_rows_in_order(rows, size):
    pieces = [*chunks(rows, size)]
    assert [start for start, _ in pieces] == [*range(0, rows, size)]
    assert all(one[1] == other[0] for one, other in pairwise(pieces))
    assert sum(stop - start for start, stop in pieces) == rows


def test_tidying_leaves_out_waits_that_add_nothing():
    this, that = Signal("this", 0), Signal("that", 0)
    lane = [Wait(this, 1), Wait(this, 2), Notify(0, this), Wait(this, 1), Wait(that, 0), Wait(this, 3)]
    assert tidy(lane) == (Wait(this, 2), Notify(0, this), Wait(that, 0), Wait(this, 3))


def test_peers_need_not_wait_for_a_ranks_own_copies():
    lane = all_gather((4, 4), "pull", chunk_rows=2).lanes[0]["compute"]
    staged = [at for at, done in enumerate(lane) if isinstance(done, Copy) and done.dst.buffer == "staged"]
    assert len(staged) == 2
    for at in staged:
        told, kept = lane[at + 1 : at + 3]
        assert isinstance(told, Notify)
        assert isinstance(kept, Copy)
        assert (told.rank, kept.src, kept.dst.buffer) == (1, lane[at].src, "gathered")
