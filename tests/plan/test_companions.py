"""Companions of rows: plans that move them, their proof, and what it refuses."""

from __future__ import annotations

import pytest

from weft.errors import PlanError
from weft.kernels.matmul import with_kernel
from weft.plan import Compute, Copy, Launch, Plan, Reduce, Region
from weft.plan.companions import with_companions
from weft.plan.compression import compressed
from weft.plan.proof import accepts, problems
from weft.plan.values import text
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request
from weft_tools.laboratory.companions import BESIDE
from weft_tools.laboratory.companions import plans as with_beside
from weft_tools.laboratory.mutants import deleted, edited, places

ALGORITHMS = [
    pytest.param(operator, algorithm, hosts, id=f"{operator.name} by {algorithm} {at}")
    for operator in OPERATORS.values()
    for algorithm in operator.algorithms
    for hosts, at in ((None, "on a host"), ((0, 0, 1), "between hosts"))
    if hosts is None or algorithm not in operator.shared_memory_only
]


@pytest.mark.parametrize(("operator", "algorithm", "hosts"), ALGORITHMS)
def test_plans_with_companions_are_right_where_those_of_the_rows_are(operator, algorithm, hosts):
    kept = {"gathered": True, "weights": 2} if operator.several_weights else {}
    plan = operator.plan(Request(3, 2, algorithm, hosts=hosts, **kept))
    assert not problems(plan, hosts=hosts)
    assert not problems(with_kernel(plan, BESIDE), hosts=hosts)


def test_a_companion_is_moved_and_read_with_its_rows():
    plan = with_kernel(OPERATORS["all_gather_matmul"].plan(Request(2, 1, "push")), BESIDE)
    own = [one for rank, one in plan.instructions() if rank == 0]
    copied = [str(one.src.buffer) for one in own if isinstance(one, Copy)]
    assert copied == ["a", "a.y", "a.z"]
    for one in own:
        if isinstance(one, Compute):
            rows, *beside = (region.buffer for region in one.srcs)
            assert beside == [f"{rows}.y", f"{rows}.z"]
    value = text(next(iter(plan.result.values())))
    assert value.startswith("beside(a@0[row+0], a.y@0[row+0], a.z@0[row+0]")


@pytest.mark.parametrize("plan", with_beside(2)[:3], ids=lambda plan: plan.algorithm)
def test_no_copy_of_a_companion_can_be_left_out(plan):
    assert accepts(plan)
    assert not [mutant.change for mutant in deleted(plan) if accepts(mutant.plan)]


def test_a_companion_of_other_rows_is_refused():
    plan = with_kernel(OPERATORS["all_gather_matmul"].plan(Request(2, 2, "direct")), BESIDE)
    place, one = next(
        (place, one)
        for place, one in places(plan)
        if isinstance(one, Compute) and one.srcs[0].rank == place[0]
    )
    rows, y, z = one.srcs
    other = y._replace(start=1 - y.start, stop=2 - y.start)
    for srcs in ((rows, other, z), (rows, z, y), (rows, y)):
        changed = edited(plan, place, Compute(one.kernel, srcs, one.dst, one.weight))
        assert not accepts(changed)


def test_companions_are_not_compressed():
    """They are no numbers of a row: scales, and the experts that a token chose."""
    plan = OPERATORS["all_gather_matmul"].plan(Request(2, 1, "push", hosts=(0, 1)))
    made = with_kernel(compressed(plan, (0, 1), "int8"), BESIDE)
    copies = [one for _, one in made.instructions() if isinstance(one, Copy)]
    assert {one.compress for one in copies if one.src.buffer == "a"} == {"int8"}
    assert {one.compress for one in copies if one.src.buffer != "a"} == {""}


def test_what_has_no_companions_is_refused():
    sums = OPERATORS["all_gather_matmul"].plan(Request(2, 1, "push"))
    reduced = Reduce((Region(0, "a", 0, 1),), Region(0, "out", 0, 1))
    with pytest.raises(PlanError, match="rows with companions are not added up"):
        with_companions(edited(sums, (0, "compute", 0), reduced), ["y"])
    launched = Plan("gather", "launched", sums.buffers, sums.lanes, launch=Launch())
    with pytest.raises(PlanError, match="in one launch moves no companions"):
        with_companions(launched, ["y"])
