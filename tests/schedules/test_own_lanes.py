"""A rank of a uniform plan needs only its own lanes: all that ranks must agree on follows from them
as from the lanes of all ranks.
"""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch

from weft import PlanError, verify
from weft.engines.program import kinds, moves
from weft.plan import Notify, Signal
from weft.plan.lazy import PerRank
from weft.schedules.all_gather import all_gather
from weft.schedules.all_reduce import all_reduce
from weft.schedules.levels import flat, nested
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft.schedules.workload import ORDERS, Request

ALGORITHMS = [
    (operator, algorithm) for operator in OPERATORS.values() for algorithm in operator.algorithms
]
NOT_UNIFORM = {
    ("all_gather_matmul", "pull"),
    ("matmul_reduce_scatter", "ring"),
    ("matmul_all_reduce", "ring"),
}
UNIFORM = [
    (operator, algorithm, order, links)
    for operator, algorithm in ALGORITHMS
    if operator.plan(Request(3, 1, algorithm)).uniform
    for order in (ORDERS if algorithm in operator.ordered else ORDERS[:1])
    for links in (1, 2)
]


def derived(plan, rank):
    """All that an engine derives from a plan for one rank."""
    dtypes = {
        name: torch.float32 for name, buffer in plan.buffers.items() if buffer.role != "workspace"
    }
    return (
        plan.lanes[rank],
        plan.promised(rank),
        plan.signal_names(),
        plan.shared_buffers(),
        kinds(moves(plan), dtypes, {}),
        plan.buffers,
        plan.pieces,
    )


@pytest.mark.parametrize(
    ("operator", "algorithm", "order", "links"),
    UNIFORM,
    ids=lambda each: getattr(each, "name", each),
)
def test_own_lanes_suffice(operator, algorithm, order, links):
    every = itertools.product((1, 2, 3, 5), (1, 3), (True, False), (True, False))
    for ranks, cut, reads, symmetric in (*every, (8, 2, True, False), (8, 8, False, True)):
        cut = 1 if algorithm in operator.uncut else cut
        request = Request(
            ranks, cut, algorithm, symmetric, order, remote_reads=reads, links=min(links, ranks)
        )
        assert operator.plan(request).uniform
        for planner in (operator.plan, operator.communicate):
            plan = planner(request)
            every = replace(plan, lanes=tuple(plan.lanes))
            assert not every.uniform
            for rank in range(ranks) if plan.uniform else ():
                part = planner(request).part([rank])
                assert derived(part, rank) == derived(every, rank), (request, rank)
                assert part.digest == plan.digest
                assert not any(lanes for other, lanes in enumerate(part.lanes) if other != rank)


def check(planner, *arguments):
    """Each rank's own lanes suffice; the plan is made once for each rank, so that no other lanes
    are computed.
    """
    plan = planner(*arguments)
    assert plan.uniform
    every = replace(plan, lanes=tuple(plan.lanes))
    for rank in range(plan.ranks):
        part = planner(*arguments).part([rank])
        assert derived(part, rank) == derived(every, rank), (arguments, rank)
        assert part.digest == plan.digest


EXPERTS = [(1, 0), (0, 2), (1, 3), (0, 0, 2), (2, 0, 1), (1, 1, 1, 0), (0, 3, 0, 0, 1, 2)]
EXCHANGES = [each for each in ALGORITHMS if "all_to_all" in each[0].name]


@pytest.mark.parametrize("experts", EXPERTS, ids=str)
@pytest.mark.parametrize(
    ("operator", "algorithm"), EXCHANGES, ids=lambda each: getattr(each, "name", each)
)
def test_a_few_ranks_stand_for_all(operator, algorithm, experts):
    """Where ranks have other numbers of experts, two with some and one without."""
    request = Request(len(experts), 2, algorithm, experts=experts, uneven=True)
    for planner in (operator.plan, operator.communicate):
        every = replace(planner(request), lanes=tuple(planner(request).lanes))
        for rank in range(len(experts)):
            plan = planner(request)
            found = plan.common([rank])
            assert sum(map(bool, found.lanes)) <= 3
            assert derived(found, rank)[2:] == derived(every, rank)[2:]
            assert not plan.uniform


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_own_lanes_of_collectives_suffice(ranks):
    for name, collective in COLLECTIVES.items():
        # the source of a broadcast does what no other rank does, and so do first and last hosts
        algorithms = {*(collective.algorithms or [""])}
        algorithms -= {"reduce_scatter": {"push", "ring"}, "broadcast": algorithms}.get(name, {*()})
        every = itertools.product(sorted(algorithms), (1, 2, 8), (True, False))
        for algorithm, cut, symmetric in every:
            check(collective.plan, Request(ranks, cut, algorithm, symmetric))
    for algorithm, cut, links in itertools.product(("pull", "push", "ring"), (1, 8), (1, 2)):
        check(lambda *of, links=links: all_gather(*of, links=links), ranks, cut, algorithm)
    for symmetric in itertools.product((True, False), repeat=2):
        choices = dict(zip(("symmetric_a", "symmetric_out"), symmetric, strict=True))
        check(lambda *of, choices=choices: all_reduce(*of, **choices), ranks, 2, "two_shot", "max")


@pytest.mark.parametrize(
    "levels", [flat(7), nested(60), nested(12, ((0,) * 4 + (1,) * 8,))], ids=len
)
def test_own_lanes_of_few_rows_suffice(levels):
    for name, collective in COLLECTIVES.items():
        if name != "broadcast":
            few_rows = getattr(collective.few_rows, "__wrapped__", collective.few_rows)
            check(few_rows, levels)


@pytest.mark.parametrize(
    ("operator", "algorithm"), ALGORITHMS, ids=lambda each: getattr(each, "name", each)
)
def test_plans_of_ranks_that_differ_are_not_uniform(operator, algorithm):
    plan = operator.plan(Request(3, 1, algorithm))
    if operator.name in dict(NOT_UNIFORM):
        assert plan.uniform == ((operator.name, algorithm) not in NOT_UNIFORM)
    if algorithm not in operator.shared_memory_only:
        assert not operator.plan(Request(3, 1, algorithm, hosts=(0, 0, 1))).uniform


def test_lanes_are_planned_when_they_are_read(monkeypatch):
    from weft.schedules import all_gather_matmul as schedule

    planned = []

    def push(request, rank, into):
        planned.append(rank)
        return gather(request, rank, into)

    gather = schedule.GATHERINGS["push"]
    monkeypatch.setitem(schedule.GATHERINGS, "push", push)
    plan = schedule.all_gather_matmul(Request(64, 1, "push"))
    assert not planned
    part = plan.part([5])
    assert part.promised(5)[Signal("arrived", 6)] == 1
    assert plan.lanes[5] is part.lanes[5]
    assert planned == [5]
    assert list(plan.lanes[-2:]) == [plan.lanes[62], plan.lanes[63]]
    assert planned == [5, 62, 63]


def test_lazy_lanes_compare_and_print_like_a_tuple():
    plan = OPERATORS["all_gather_matmul"].plan(Request(3, 2, "push"))
    lanes = tuple(plan.lanes)
    assert plan.lanes == lanes
    assert lanes == plan.lanes
    assert plan.lanes != lanes[:2]
    assert plan.lanes != [*lanes]
    assert repr(plan.lanes) == repr(lanes)
    assert repr(plan.result) == repr(dict(plan.result))
    assert plan.lanes[1:] == lanes[1:]
    with pytest.raises(IndexError):
        plan.lanes[3]
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert type(copy.lanes) is tuple
    assert type(copy.result) is dict


def test_an_error_of_a_planner_is_raised_when_its_lanes_are_read():
    lanes = PerRank(2, lambda rank: [{}][rank])
    assert lanes[0] == {}
    with pytest.raises(IndexError):
        list(lanes)


def test_a_plan_with_other_lanes_is_not_uniform():
    """Its ranks compare the lanes, and its counters grow by the notifies of all ranks."""
    plan = OPERATORS["all_gather_matmul"].plan(Request(2, 1, "push"))
    lanes = [dict(each) for each in plan.lanes]
    lanes[1]["comm"] = tuple(i for i in lanes[1]["comm"] if not isinstance(i, Notify))
    changed = replace(plan, lanes=tuple(lanes))
    assert not changed.uniform
    assert changed.digest != plan.digest
    assert Signal("arrived", 1) in plan.promised(0)
    assert Signal("arrived", 1) not in changed.promised(0)


def test_a_part_of_a_plan_is_not_proved():
    plan = OPERATORS["all_gather_matmul"].plan(Request(2, 1, "push"))
    verify(plan)
    with pytest.raises(PlanError, match="deadlock: rank 0 compute waits for 1 of arrived<1"):
        verify(plan.part([0]))
