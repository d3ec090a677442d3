"""Ordinary sizes, one after the other in any order: a random walk over all calls, by weft and by
torch.distributed. Choices that calls of a class share must hold for all of its sizes.
"""

from __future__ import annotations

import pytest
from support.ranks import group, on_ranks
from support.walk import group_steps, walk, weft_steps

SEED = 5


def by_weft(world, seed, number):
    walk(weft_steps(world, seed), number)


def by_torch(members, seed, number):
    walk(group_steps(members, seed), number)


@pytest.mark.data
@pytest.mark.parametrize(("ranks", "number"), [(2, 600), (3, 250)])
def test_calls_of_weft(ranks, number):
    on_ranks(by_weft, ranks, SEED, number)


@pytest.mark.data
@pytest.mark.parametrize(("ranks", "number"), [(2, 500), (3, 175)])
def test_calls_of_torch_distributed(ranks, number):
    on_ranks(by_torch, ranks, SEED, number, context=group)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_more_calls(ranks, seed):
    on_ranks(by_weft, ranks, seed, 10_000, limit=300)
    on_ranks(by_torch, ranks, seed, 10_000, limit=300, context=group)
