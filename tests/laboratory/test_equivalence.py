"""Executions show that a plan is wrong: each defect of one instruction makes some run differ."""

from __future__ import annotations

import pytest

from weft.plan.proof import accepts
from weft.schedules.operators import PLANNERS
from weft.schedules.workload import Request
from weft_tools.laboratory.equivalence import Equivalence
from weft_tools.laboratory.mutants import deleted, moved


@pytest.mark.parametrize(
    ("operator", "algorithm", "ranks"),
    [
        ("all_gather_matmul", "direct", 2),
        ("matmul_reduce_scatter", "put", 2),
        ("all_gather", "eager", 3),
        ("all_to_all", "pull", 2),
        ("barrier", "levels", 3),
        ("broadcast", "pull", 3),
    ],
)
def test_every_rejected_mutant_that_can_run_differs_in_some_run(operator, algorithm, ranks):
    plan = PLANNERS[operator].plan(Request(ranks, 1, algorithm))
    equivalence = Equivalence(plan, seed=0)
    wrong = [
        mutant
        for mutation in (deleted, moved)
        for mutant in mutation(plan)
        if not accepts(mutant.plan)
    ]
    assert wrong
    assert [change for change, changed in wrong if not equivalence.differing([changed])] == []
