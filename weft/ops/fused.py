"""From a checked call of a fused operator to its result: decide, plan, compile, execute, finish.
The same for all operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from weft.engines import engine
from weft.engines.engine import Program
from weft.ops.autotune import report, select
from weft.ops.call import Call
from weft.plan import Compute, Plan
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request, Variant, Workload


def run(call: Call) -> Any:
    """Carry out a call, collectively; its result."""
    return carry_out(call)[0]


def carry_out(call: Call) -> tuple[Any, Way | None]:
    """Carry out a call, collectively: its result, and the way that it went if calls of its class
    will always go it.
    """
    selection = select(call)
    way = _prepare(call, selection.variant)
    begun = time.monotonic_ns()
    result = _go(call, way)
    if selection.trial is not None:
        report(call, selection.trial, begun, time.monotonic_ns())
    return result, way if selection.trial is None else None


def execute(call: Call, variant: Variant) -> Any:
    """Carry out a call in one variant."""
    return _go(call, _prepare(call, variant))


def _go(call: Call, way: Way) -> Any:
    weights = dict(zip(way.products, call.weights, strict=False))
    biases = {
        name: bias
        for name, bias in zip(way.products, call.biases, strict=False)
        if bias is not None
    }
    way.program.run(call.tensors, call.workload.rows, weights, biases, call.options.timeout)
    return call.finish()


class Way(NamedTuple):
    """How rows of a class of sizes are multiplied: a program, and the buffers of its products."""

    program: Program
    products: tuple[str, ...]


def _prepare(call: Call, variant: Variant) -> Way:
    """The way to carry out a call in a variant."""
    world, operator, workload = call.world, call.operator, call.workload
    whole = engine(world).whole_plans or variant.algorithm in operator.asymmetric
    where = {
        "hosts": world.topology,
        "remote_reads": world.remote_reads,
        "planned": None if whole else (world.rank,),
    }
    held = workload._replace(rows=(), k=1, n=1, packed=True)  # what plans for all sizes depend on
    plan, dtypes, products = _planned(
        call.planner, held, operator.request(workload, variant, **where, **call.asked)
    )
    return Way(engine(world).program(plan, call.tensors, workload.rows, dtypes), products)


@lru_cache(maxsize=1024)
def _planned(
    planner: Callable[[Request], Plan], workload: Workload, request: Request
) -> tuple[Plan, Mapping[str, torch.dtype], tuple[str, ...]]:
    """A plan, the dtypes of its buffers, and the buffers that products go to."""
    plan = planner(request)
    if request.planned is not None:
        plan = replace(plan, request=repr(request._replace(planned=None)))
    dtypes = {
        name: getattr(torch, rows.dtype)
        for name, rows in OPERATORS[workload.operator].buffers(workload).items()
    }
    every = (instruction for lanes in plan.lanes for lane in lanes.values() for instruction in lane)
    products = dict.fromkeys(
        instruction.weight
        for instruction in every
        if isinstance(instruction, Compute) and instruction.weight
    )
    return plan, dtypes, tuple(products)
