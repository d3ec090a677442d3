"""From a checked call of a fused operator to its result: select a variant, prepare a program,
execute it, finish. The same for all operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.engines import engine
from weft.engines.host import HostProgram
from weft.engines.program import Program
from weft.kernels.matmul import MATMUL, with_kernel
from weft.kernels.weights import Weight
from weft.ops.autotune import measure, select
from weft.ops.call import Call, Operands, Options
from weft.plan import Kernel, Plan
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request, Variant, Workload
from weft.world import World

Key = tuple[
    Callable[..., Call],
    tuple[object, ...],
    Tensor,
    Tensor | None,
    Sequence[Weight],
    Sequence[Tensor | None],
]
"""The key of a call in the call cache: its operator's `check`, its options, and its operands as the
caller gave them: a, out, weights, biases.
"""


def repeat(world: World, key: Key, timeout: float | None) -> Any:
    """The result (a list of several) of a call that has the key of an earlier one: one native call,
    but for its products. None, with nothing done, if there was none or the call must be checked.
    """
    own = world.engine
    if torch.compiler.is_compiling() or own is None or own.pending or world.recorder is not None:
        return None
    if timeout is None:
        timeout = world.timeout
    else:
        check_timeout(timeout)
    return own.calls.call(*key, timeout)


def call(
    check: Callable[..., Call],
    world: World,
    operands: Operands,
    options: Options,
    key: Key | None = None,
) -> list[Tensor]:
    """The results of a call that `check` accepts, without gradients, collectively; peers are told
    if it is refused.
    """
    with torch.no_grad(), world.tell_refusal:  # autograd records by thread, and this may be another
        return run(check(world, operands, options), key)


def run(call: Call, key: Key | None = None) -> list[Tensor]:
    """The results of a checked call, collectively; `repeat` finds it by its `key` from now on."""
    selection = select(call)
    program = prepare(call, selection.variant)
    if selection.trial is not None:
        measure(call, selection.trial, partial(_execute, call, program))
    elif key is not None and isinstance(program, HostProgram) and _repeatable(call, key):
        _execute_and_cache(call, program, key)
    else:
        _execute(call, program)
    return call.finish()


def execute(call: Call, variant: Variant) -> list[Tensor]:
    """The results of a checked call in one variant."""
    _execute(call, prepare(call, variant))
    return call.finish()


def prepare(call: Call, variant: Variant) -> Program:
    """The program of a call in a variant."""
    world, workload = call.world, call.workload
    # plans depend on the operator and dtypes, not on sizes
    sizeless = workload._replace(rows=(), k=1, n=1, packed=True)
    request = call.request(variant)
    plan, dtypes = _planned(call.planner, sizeless, request, call.kernel, call.rows_multiple)
    return engine(world).program(plan, call.tensors, workload.rows, dtypes, options=variant.device)


@lru_cache(maxsize=1024)
def _planned(
    planner: Callable[[Request], Plan],
    workload: Workload,
    request: Request,
    kernel: Kernel,
    rows_multiple: int,
) -> tuple[Plan, Mapping[str, torch.dtype]]:
    """A plan, and the dtypes of its buffers."""
    buffers = OPERATORS[workload.operator].buffers(workload)
    plan = replace(planner(request), rows_multiple=rows_multiple)
    if kernel is not MATMUL:
        plan = with_kernel(plan, kernel)
    return plan, {name: getattr(torch, rows.dtype) for name, rows in buffers.items()}


def _execute(call: Call, program: Program) -> None:
    weights = dict(zip(program.weights, call.weights, strict=False))
    biases = {
        name: bias
        for name, bias in zip(program.weights, call.biases, strict=False)
        if bias is not None
    }
    program.run(call.tensors, call.workload.rows, weights, biases, call.options.timeout)


def _repeatable(call: Call, key: Key) -> bool:
    """Whether a call has its caller's weights and biases, and no tensors of its own."""
    *_, weights, biases = key
    return (
        engine(call.world).caches_calls
        and engine(call.world).shared_memory  # else products are to be preceded by sends
        and len(call.tensors) == 1 + len(call.results)
        and _same(call.weights, weights)
        and (not call.biases or _same(call.biases, biases))
    )


def _execute_and_cache(call: Call, program: HostProgram, key: Key) -> None:
    """Execute a repeatable call, and add it to the call cache."""
    _, _, a, _, weights, biases = key
    tensors, operands = dict(call.tensors), [a, *call.results]
    binding = program.bind(call.tensors, call.workload.rows)
    computes = program.computes_of(
        binding,
        call.tensors,
        {name: number for number, name in enumerate(call.tensors)},
        {name: number for number, name in enumerate(program.weights)},
        reshaped=frozenset(
            name for name, operand in zip(call.tensors, operands, strict=True) if operand.dim() != 2
        ),
        biased=bool(call.biases),
    )
    matrices = [*tensors.values()]  # of the operands, or of a copy: then the call is not cached
    with call.world.exclusive:
        program.execute(
            binding, call.options.timeout, lambda at: computes.run(at, matrices, weights, biases)
        )
    own = engine(call.world)
    own.calls.add(*key, program, binding, tensors, call.results, computes.prepare)


def _same(ours: Sequence[object], operands: Sequence[object]) -> bool:
    """Whether these are the caller's own objects."""
    return [*map(id, ours)] == [*map(id, operands)]
