"""Synchronization by levels, for any number of ranks and any groups: each rank's notifies and
waits, and the proof that every rank waits for all others.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.plan.proof import verify
from weft.schedules.barrier import barrier
from weft.schedules.broadcast import eager as broadcast
from weft.schedules.levels import flat, nested, stages
from weft_tools.laboratory.mutants import deleted


@st.composite
def grouped(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Levels of any nested groups, also of unequal sizes, and with ranks that are not consecutive."""
    ranks = draw(st.integers(1, 14))
    level = tuple(range(ranks))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        joined = draw(st.lists(st.integers(0, 4), min_size=14, max_size=14))
        level = tuple(joined[group] for group in level)
        found.append(level)
    return (*found, *flat(ranks))


@settings(max_examples=25)
@given(grouped())
def test_a_barrier_is_proved_for_any_groups(levels):
    verify(barrier(levels))


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 12, 16, 23, 32])
def test_a_barrier_is_proved_for_many_ranks(ranks):
    verify(barrier(nested(ranks)))


@pytest.mark.parametrize("levels", [flat(3), nested(9)], ids=["flat", "levels"])
def test_no_signal_of_a_barrier_is_redundant(levels):
    for change, plan in deleted(barrier(levels)):
        with pytest.raises(PlanError):
            verify(plan)
            pytest.fail(change)


@pytest.mark.parametrize(
    ("ranks", "most", "depth"),
    [(2, 1, 1), (4, 3, 1), (8, 7, 1), (9, 4, 2), (16, 6, 2), (32, 7, 3), (64, 9, 3), (128, 10, 4)],
)
def test_notifies_grow_like_a_root_or_a_logarithm(ranks, most, depth):
    levels = nested(ranks)
    assert len(levels) == depth
    assert max(barrier(levels).notifies()) == most
    assert barrier(flat(ranks)).notifies() == [ranks - 1] * ranks


def test_close_ranks_synchronize_first():
    """Two packages of four caches, each with four ranks that are not consecutive: each rank sends
    one notify to the other package.
    """
    package, cache = tuple(r % 2 for r in range(32)), tuple(r % 8 for r in range(32))
    levels = nested(32, (cache, package))
    assert levels == (cache, package, *flat(32))
    for rank, (within, between, across) in enumerate(stages(levels)):
        assert sorted(within.notified) == [
            peer for peer in range(32) if peer % 8 == rank % 8 and peer != rank
        ]
        assert {cache[peer] for peer in between.notified} == {
            c for c in range(8) if c % 2 == rank % 2
        } - {cache[rank]}
        assert [package[peer] for peer in across.notified] == [1 - package[rank]]


def test_a_lone_rank_notifies_all_of_a_larger_group():
    levels = ((0, 1, 1, 1), *flat(4))
    assert [stage.notified for stage in stages(levels)[0]] == [[], [3, 2, 1]]
    assert sum(len(each[1].awaited) for each in stages(levels)) == 4
    verify(barrier(levels))


@settings(max_examples=25)
@given(grouped(), st.integers(0, 13))
def test_a_broadcast_of_a_few_rows_is_proved_for_any_groups(levels, number):
    verify(broadcast(number % len(levels[-1]), levels))


def test_a_broadcast_of_a_few_rows_signals_as_a_barrier_does():
    assert broadcast(77, nested(128)).notifies() == barrier(nested(128)).notifies()
    assert broadcast(2, flat(5)).notifies() == [4] * 5


def test_few_ranks_are_not_divided():
    assert nested(8, ((0, 0, 0, 0, 1, 1, 1, 1),)) == flat(8)
