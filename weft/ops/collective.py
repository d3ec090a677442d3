"""Calls of weft's collectives: on symmetric or plain CPU tensors they are plans that run wholly in
the native core.

Each is collective, and returns when its result is in place and its inputs are the caller's again.
The ``_async`` form returns a `Handle` at once and works on the native lane (the first call of its
kind may wait for its peers, to take a workspace together); until it is waited for, its tensors must
not be touched. A world carries out 16 of them at a time; the next one holds its thread until the
first is over. Calls are carried out in the order in which they are made. Results do not
depend on arrival order: the same bits on every run.

A call on tensors with the layouts of an earlier call (dtype, shape, strides; the address in
symmetric memory, if in any) is found in the call cache; it is fastest with `out`. Symmetric tensors
(`World.empty`), the same on all ranks, are read and written in place by peers; others are staged.

All tensors are plain: `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or
negative view. There are no gradients: a tensor that requires one is a `ValueError` while autograd
records (outside ``torch.no_grad()``), but for a leaf that is broadcast, such as a parameter.
Torch's functional collectives have gradients, also on a process group of weft's. Writes to
`out`, or by a broadcast, do not raise torch's count of writes: autograd does not see that a tensor
it keeps for backward is overwritten.

Keywords that all share: `out`, a contiguous tensor for the result (else a new one); `world`, by
default that of ``weft.init()``; `timeout`, the seconds any wait may take, by default the world's.
Bad arguments are `ValueError` or `TypeError`, raised before anything is sent; lost, late or
disagreeing peers are `PeerLost`, `PeerTimeout` and `MismatchError`, and close the world.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.checks import name as dtype_name
from weft.engines import engine
from weft.engines.engine import Engine, Program
from weft.errors import PeerTimeout
from weft.kernels.weights import DTYPES as FLOATS
from weft.ops import arguments
from weft.plan import Plan
from weft.world import World, current

NUMBERS = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""The dtypes that can be reduced; averages are of floating dtypes."""

ANY = (*NUMBERS, torch.bool)
"""The dtypes that can be moved."""

REDUCTIONS = ("sum", "avg", "max", "min")


class CollectiveCall(NamedTuple):
    """A checked call of a collective: its plan, the rows of its shards, the matrices of its
    buffers, and its result.

    `copied` are copied in the end, each block to its part of the result. `sizes_exchanged`: ranks
    exchanged the sizes, which may differ in the next call with the same arguments.
    """

    plan: Plan
    rows: Sequence[int]
    tensors: dict[str, Tensor]
    result: Tensor
    copied: Sequence[tuple[Tensor, Tensor]] = ()
    sizes_exchanged: bool = False

    def finish(self) -> Tensor:
        """The result, with the blocks copied to it."""
        for part, block in self.copied:
            part.copy_(block)
        return self.result


Check = Callable[..., CollectiveCall]
"""An operator's ``check(world, a, out, *options)``, which raises what is wrong with a call."""


class Handle:
    """A collective in progress, made by the ``_async`` forms."""

    def __init__(self, program: Program, call: CollectiveCall) -> None:
        self._program, self._result = program, call.result
        self._call: CollectiveCall | None = call

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._call is None or self._program.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result, once it is in place.

        Raises `PeerTimeout` if it is not after `timeout` seconds; the collective goes on and can be
        waited for again. Raises the errors of the collective itself.
        """
        if self._call is not None:
            if not self._program.join(float("inf") if timeout is None else timeout):
                raise PeerTimeout(f"{self._program.plan.operator} is not done after {timeout:g} s")
            self._call.finish()
            self._call = None
        return self._result


def run(
    check: Check,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
) -> Tensor:
    """The result of a collective; a repeated call is one native call."""
    world = current(world)
    own: Engine = world.engine or engine(world)
    if timeout is not None:
        check_timeout(timeout)
    if world.recorder is None and not own.pending:
        seconds = world.timeout if timeout is None else timeout
        cached: Any = own.calls.call(check, options, a, out, None, None, seconds)
        if cached is not None:
            result: Tensor = cached
            return result
    call = check(world, a, out, *options)
    program = own.program(call.plan, call.tensors, call.rows)
    with world.exclusive:
        binding = program.bind(call.tensors, call.rows, _in_words(check, call, a, options))
        program.execute(binding, timeout)
    result = call.finish()
    if own.caches_calls and not call.copied and not call.sizes_exchanged:
        operands = a, out, None, None
        own.calls.add(check, options, *operands, program, binding, call.tensors, [result], None)
    return result


def start(
    check: Check,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
) -> Handle:
    """Begin a collective and return at once."""
    world = current(world)
    own = engine(world)
    check_timeout(timeout)
    call = check(world, a, out, *options)
    with world.exclusive:
        own.limit_outstanding()
        program = _idle(own, call)
        words = _in_words(check, call, a, options)
        program.start(program.bind(call.tensors, call.rows, words), call, timeout)
    return Handle(program, call)


def _idle(own: Engine, call: CollectiveCall) -> Program:
    """An idle program of a call: each of several concurrent calls needs its own."""
    programs = (
        own.program(call.plan, call.tensors, call.rows, number=number) for number in count()
    )
    return next(program for program in programs if program.idle())


def _in_words(check: Check, call: CollectiveCall, a: Tensor, options: tuple[Hashable, ...]) -> str:
    """A call as errors of all ranks show it: operator, tensor and options that are not defaults."""
    return _words(call.plan.operator, a.shape, a.dtype, _options(check), options)


@lru_cache
def _options(check: Check) -> tuple[str, ...]:
    """The names of an operator's options, which follow the world, the tensor and `out`."""
    return tuple(inspect.signature(check).parameters)[3:]


@lru_cache(1024)
def _words(
    operator: str,
    shape: torch.Size,
    dtype: torch.dtype,
    names: tuple[str, ...],
    values: tuple[Hashable, ...],
) -> str:
    words = [f"{tuple(shape)} {dtype_name(dtype)}"]
    for name, value in zip(names, values, strict=True):
        if value is not None and value != "auto":
            words.append(f"{name}={[*value] if isinstance(value, tuple) else value}")
    return f"{operator}({', '.join(words)})"


@lru_cache(4096)
def planned(planner: Callable[..., Plan], *asked: Any, **more: Any) -> Plan:
    """A plan, kept for later calls."""
    return planner(*asked, **more)


def check_input(a: Tensor, world: World, dtypes: Sequence[torch.dtype] = ANY) -> None:
    """A tensor of one of these dtypes, of which no gradient is to be recorded."""
    arguments.check_input(a, "a", world, dtypes)
    check_not_recorded(a, "a")


def check_not_recorded(tensor: Tensor, what: str) -> None:
    """Raise `ValueError` where the gradient of a tensor would be lost."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what} requires a gradient, but weft's collectives have none: pass {what}.detach(), "
            "call under torch.no_grad(), "
            "or use torch's functional collectives"
        )


def check_reduction(a: Tensor, op: str, world: World) -> None:
    """A reduction, and a dtype that it is defined for."""
    if op not in REDUCTIONS:
        raise ValueError(f"there is no reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
    check_input(a, world, FLOATS if op == "avg" else NUMBERS)


def as_matrix(tensor: Tensor, dim: int = 0) -> Tensor:
    """The tensor as contiguous rows: one for each index of the dimensions up to `dim`."""
    return tensor.contiguous().view(
        math.prod(tensor.shape[: dim + 1]), math.prod(tensor.shape[dim + 1 :])
    )


def parts(
    tensor: Tensor, blocks: Tensor, dim: int, sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """The parts of a tensor along `dim`, of these sizes, each with its block of `blocks`, which
    are contiguous.
    """
    parts = tensor.split([*sizes], dim)
    places = blocks.view(-1).split([part.numel() for part in parts])
    return [(part, place.view(part.shape)) for part, place in zip(parts, places, strict=True)]


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.is_contiguous()
        and other.is_contiguous()
        and one.shape == other.shape
    )
