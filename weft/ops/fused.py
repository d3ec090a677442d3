"""From a checked call of a fused operator to its result: decide, plan, compile, execute, finish. The same for all operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from weft.engines import engine
from weft.ops.auto import decide
from weft.ops.call import Call, Given, Options
from weft.plan import Matmul, Plan
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Place, Variant, Workload
from weft.world import World


def check(operator: str, world: World, given: Given, options: Options) -> Call:
    """A checked call of the operator of this name, which is in the file of this name; raises what the operator would."""
    checked: Call = importlib.import_module(f"weft.ops.{operator}").check(world, given, options)
    return checked


def run(call: Call) -> Any:
    """Carry out a call, collectively; its result."""
    return execute(call, decide(call).variant)


def execute(call: Call, variant: Variant) -> Any:
    """Carry out a call in one variant."""
    world, tensors = call.world, call.tensors
    place = Place(world.topology, world.remote_reads)
    rows = call.workload.rows
    plan, dtypes, products = _planned(call.planner, *call.operator.in_blocks(call.workload, variant), place, call.asked)
    program = engine(world).program(plan, tensors, rows, dtypes)
    biases = {name: bias for name, bias in zip(products, call.biases, strict=False) if bias is not None}
    program.run(tensors, rows, dict(zip(products, call.weights, strict=False)), biases, call.options.timeout)
    return call.finish()


class _Planned(NamedTuple):
    """A plan, the dtypes of its buffers, and the buffers that products go to."""

    plan: Plan
    dtypes: Mapping[str, torch.dtype]
    products: tuple[str, ...]


@lru_cache(maxsize=1024)
def _planned(
    planner: Callable[..., Plan], workload: Workload, variant: Variant, place: Place, asked: tuple[tuple[str, object], ...]
) -> _Planned:
    plan = planner(workload, variant, place, **dict(asked))
    dtypes = {name: getattr(torch, rows.dtype) for name, rows in OPERATORS[workload.operator].buffers(workload).items()}
    every = (instruction for lanes in plan.lanes for lane in lanes.values() for instruction in lane)
    products = dict.fromkeys(instruction.dst.buffer for instruction in every if isinstance(instruction, Matmul))
    return _Planned(plan, dtypes, tuple(products))
