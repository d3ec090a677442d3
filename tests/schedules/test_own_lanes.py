"""A rank's own lanes are all that it needs of a plan: what it reckons with from them alone is what
the whole plan says.
"""

import itertools

import pytest
import torch

from weft import PlanError, verify
from weft.engines.engine import kinds
from weft.plan import Signal
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, Request

CHOICES = [
    (operator, algorithm, order, reads, symmetric)
    for operator in OPERATORS.values()
    for algorithm in operator.algorithms
    if algorithm not in operator.asymmetric
    for order in (ORDERS if algorithm == "push" else ORDERS[:1])
    for reads in (True, False)
    for symmetric in (True, False)
]


def reckoned(plan, rank):
    """What a rank does, and what it goes by that all ranks must see alike."""
    given = {
        name: torch.float32 for name, buffer in plan.buffers.items() if buffer.role != "workspace"
    }
    counted = {signal: count for signal, count in plan.promised(rank).items() if count}
    return (
        plan.lanes[rank],
        counted,
        plan.signal_names(),
        kinds(plan, given, {}),
        plan.buffers,
        plan.pieces,
    )


@pytest.mark.parametrize(
    ("operator", "algorithm", "order", "reads", "symmetric"),
    CHOICES,
    ids=lambda each: getattr(each, "name", each),
)
def test_own_lanes_suffice(operator, algorithm, order, reads, symmetric):
    for ranks, cut in itertools.product((1, 2, 3, 5, 8), (1, 2, 8)):
        cut = 1 if algorithm in operator.uncut else cut
        request = Request(ranks, cut, algorithm, symmetric, order, remote_reads=reads)
        whole = operator.plan(request)
        for rank in range(ranks):
            own = operator.plan(request._replace(planned=(rank,)))
            assert reckoned(own, rank) == reckoned(whole, rank), (ranks, cut, rank)
            assert not any(lanes for other, lanes in enumerate(own.lanes) if other != rank)


def test_only_a_whole_plan_can_be_proved():
    operator = OPERATORS["all_gather_matmul"]
    own = operator.plan(Request(2, 1, "push", planned=(0,)))
    assert own.promised(1) == {}
    assert Signal("free", 1) in own.promised(0)
    with pytest.raises(PlanError, match="only a plan with the lanes of all ranks can be proved"):
        verify(own)
