"""Verification around a race, whatever the number of contenders."""

from __future__ import annotations

import itertools

import pytest
import torch

from weft_tools.bench.harness import verified
from weft_tools.bench.verification import RUNS, Problem


@pytest.mark.parametrize("contenders", [3, RUNS // 2 + 1, 2 * RUNS + 3])
def test_every_contender_is_checked_before_and_after_with_new_rows(contenders):
    problem = Problem(5, 3, 2, torch.float32, torch.float32, seed=0, rank=0)
    rows, order = [], []

    def verify(contender, run):
        rows.append(problem.rows(run).clone())
        order.append(contender)
        return problem.check_product(rows[-1] @ problem.weight, run)

    found, checks = verified(range(contenders), verify, lambda: order.append("race") or "times")
    assert found == "times"
    assert order == [*range(contenders), "race", *range(contenders)]
    assert all(each.wrong == 0 for each in checks)
    assert len(checks) == contenders
    assert all(one.shape == (5, 3) for one in rows)
    for one, following in itertools.pairwise(rows):
        assert not torch.equal(one, following)
