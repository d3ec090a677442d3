"""Planners of all operators, fused ones and collectives, by name and with one signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from weft.plan import Plan
from weft.plan.binding import split
from weft.schedules import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels, nested
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Operator, Request

EAGER = "eager"
"""The algorithm for few rows, which operators choose by size."""

EAGER_PLANS: Mapping[str, Callable[[Levels], Plan]] = {
    "barrier": barrier,
    "all_gather": all_gather.eager,
    "reduce_scatter": reduce_scatter.eager,
    "all_reduce": all_reduce.eager,
    "broadcast": partial(broadcast.eager, 0),
    "all_to_all": all_to_all.eager,
}
"""The planners of eager plans, from the levels by which ranks synchronize."""


class Planner(NamedTuple):
    """An operator's algorithms, its plan for a request, and the rows of each shard by the rows of
    each rank.
    """

    algorithms: tuple[str, ...]
    plan: Callable[[Request], Plan]
    shards: Callable[[list[int]], list[int]] = list


def _fused(operator: Operator, r: Request) -> Plan:
    return operator.plan(r._replace(pieces=1) if r.algorithm in operator.uncut else r)


def _all_gather(r: Request) -> Plan:
    symmetric = r.symmetric
    return all_gather.all_gather(
        r.ranks, r.pieces, r.algorithm, symmetric_a=symmetric, symmetric_gathered=symmetric
    )


def _reduce_scatter(r: Request) -> Plan:
    if r.algorithm == "direct":
        return reduce_scatter.reduce_scatter(r.ranks, r.pieces, symmetric_a=r.symmetric)
    return reduce_scatter.put(r.pieces, range(r.ranks), r.algorithm)


def _all_reduce(r: Request) -> Plan:
    symmetric = r.symmetric
    return all_reduce.all_reduce(
        r.ranks, r.pieces, r.algorithm, symmetric_a=symmetric, symmetric_out=symmetric
    )


def _broadcast(r: Request) -> Plan:
    if r.algorithm == "pull":
        return broadcast.broadcast(r.ranks, r.pieces, 0, symmetric_a=r.symmetric)
    if r.algorithm == "push":
        return broadcast.push(0, range(r.ranks))
    return broadcast.ring(r.pieces, 0, range(r.ranks))


def _all_to_all(r: Request) -> Plan:
    return all_to_all.all_to_all(r.ranks, r.pieces, symmetric_a=r.symmetric)


PLANNERS: Mapping[str, Planner] = {
    **{
        name: Planner(operator.algorithms, partial(_fused, operator))
        for name, operator in OPERATORS.items()
    },
    "all_gather": Planner((*all_gather.ALGORITHMS, EAGER), _all_gather),
    "reduce_scatter": Planner((*reduce_scatter.ALGORITHMS, EAGER), _reduce_scatter),
    "all_reduce": Planner(
        (*all_reduce.ALGORITHMS, EAGER), _all_reduce, lambda rows: split(sum(rows), len(rows))
    ),
    "broadcast": Planner((*broadcast.ALGORITHMS, EAGER), _broadcast, lambda rows: [sum(rows)]),
    "barrier": Planner(("levels",), lambda r: barrier(nested(r.ranks)), lambda rows: []),
    "all_to_all": Planner(("pull", EAGER), _all_to_all, lambda rows: rows * len(rows)),
}


def planned(operator: str, request: Request) -> Plan:
    """The plan of an operator for a request; an eager one for ranks of one host."""
    if request.algorithm == EAGER:
        return EAGER_PLANS[operator](nested(request.ranks))
    return PLANNERS[operator].plan(request)
