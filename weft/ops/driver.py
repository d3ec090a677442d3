"""The path of every call, collective or fused operator, from its check to its results: select a
variant, prepare a program, execute it, finish. `Engine.calls` repeats a known call without these
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft import _native
from weft.engines.program import Program
from weft.ops.autotune import measure, select
from weft.ops.call import Call, Choice, Key, Selection
from weft.schedules.workload import Variant
from weft.world import World

if TYPE_CHECKING:
    from weft.ops.operator import FusedOperator
    from weft.ops.options import Operands


def repeat(key: Key, world: World | None, timeout: float | None) -> Any:
    """The result (a list of several) of a call that has the key of an earlier one: one native call,
    but for its products. None, with nothing done, if there was none or the call must be checked.
    """
    return None if torch.compiler.is_compiling() else _native.repeat(*key, world, timeout)


def call(
    operator: FusedOperator,
    world: World,
    operands: Operands,
    options: Any,
    timeout: float | None,
    key: Key | None = None,
    companions: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The results of a call of an operator, whose sizes ranks have exchanged, without gradients,
    collectively.
    """
    with torch.no_grad():  # autograd records by thread, and this may be another
        checked = operator.checked(world, operands, options, companions)
        checked.timeout = timeout
        made: list[Tensor] = run(checked, key)
        return made


def run(call: Call, key: Key | None = None) -> Any:
    """The results of a checked call, collectively; the call cache finds it by its `key` from now
    on.
    """
    return selected(call, select(call), call, key)


def selected(call: Call, selection: Selection, of: Choice, key: Key | None = None) -> Any:
    """The results of a checked call by the selection `of` a choice, which may be among several
    calls.
    """
    program = prepare(call, selection.variant)
    if selection.trial is not None:
        measure(of, selection.trial, partial(call.execute, program))
    elif key is not None and call.repeatable(key):
        _execute_and_cache(call, program, key, selection)
    else:
        call.execute(program)
    return call.finish()


def execute(call: Call, variant: Variant) -> Any:
    """The results of a checked call in one variant."""
    call.execute(prepare(call, variant))
    return call.finish()


def prepare(call: Call, variant: Variant, number: int = 0) -> Program:
    """The program of a call in a variant; concurrent calls have different `number` each."""
    plan, options = call.plan(variant), call.engine_options(variant)
    return call.engine.program(plan, call.tensors, call.rows, call.dtypes, number, options)


def _execute_and_cache(call: Call, program: Any, key: Key, selection: Selection) -> None:
    with call.world.exclusive:
        binding = call.bind(program)
        compute, prepared = call.computes(program, binding, key)
        program.execute(binding, call.timeout, compute)
    tensors, results = call.tensors, call.results
    call.engine.calls.add(*key, program, binding, tensors, results, prepared, selection.left)
