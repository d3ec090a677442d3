"""Calls of weft's collectives: plans on symmetric or plain CPU tensors that the native core
executes without Python.

Every rank must make the call. It returns when the result is complete and peers no longer read the
inputs. The ``_async`` form returns a `Handle` at once and runs on the native lane (the first call
of its kind may wait for peers, to allocate a workspace together; an all-to-all with split sizes
begins later); its tensors must not be accessed before `Handle.wait`. At most 16 asynchronous calls
of a world run concurrently; the next call blocks until the first has ended. Calls are executed in
the order in which they are made. Results do not depend on the order of arrival: they are bitwise
equal on every run.

The call cache has the calls on tensors of the same layouts (dtype, shape, strides; the address in
symmetric memory, if in any); a repeated call is fastest with `out`. Symmetric tensors
(`World.empty`), the same on all ranks, are read and written in place by peers; others are staged.

All tensors are plain: `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or
negative view. There are no gradients: a tensor that requires one is a `ValueError` while autograd
records (outside ``torch.no_grad()``), except for a leaf that is broadcast, for instance a
parameter. Torch's functional collectives have gradients, also on a process group of weft's. Writes
to `out`, or by a broadcast, do not increment a tensor's version counter: autograd does not detect
that a tensor saved for backward is overwritten.

Common keywords: `out`, a contiguous tensor for the result (by default a new one); `world`, by
default the world made by ``weft.init()``; `timeout`, the seconds any wait may take, by default the
world's. Bad arguments raise `ValueError` or `TypeError` before anything is sent; lost, late or
disagreeing peers raise `PeerLost`, `PeerTimeout` and `MismatchError`, and close the world.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import check_timeout, suggestion
from weft.checks import name as dtype_name
from weft.engines import engine
from weft.engines.engine import Engine
from weft.engines.program import Program
from weft.errors import PeerTimeout
from weft.kernels.weights import DTYPES as FLOATS
from weft.ops import arguments, dims, measured
from weft.ops.measured import Plans
from weft.plan import Plan
from weft.plan.values import REDUCTIONS
from weft.world import World, current

NUMBERS = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""The dtypes that can be reduced; averages are of floating dtypes."""

ANY = (*NUMBERS, torch.bool)
"""The dtypes that can be moved."""


class CollectiveCall(NamedTuple):
    """A checked call of a collective: its plan, the rows of its shards, the matrices of its
    buffers, and its result.

    `copied` has pairs of a part of the result and the block that is copied to it at the end.
    `sizes_exchanged`: ranks exchanged the sizes, which may differ in the next call with the same
    arguments. `plans`: the plans from which the fastest is chosen by measuring them, if there are
    several, for calls of about `size` bytes on each rank; `plan` is then the first of them.
    `name`: what errors name in place of the plan's operator.
    """

    plan: Plan
    rows: Sequence[int]
    tensors: dict[str, Tensor]
    result: Tensor
    copied: Sequence[tuple[Tensor, Tensor]] = ()
    sizes_exchanged: bool = False
    plans: Plans = MappingProxyType({})
    size: int = 0
    name: str = ""

    @property
    def key(self) -> measured.Class:
        """The class of calls that share the choice among `plans`."""
        return measured.Class.of(self.plan.operator, self.size)

    def finish(self) -> Tensor:
        """The result, with the blocks copied to it."""
        for part, block in self.copied:
            part.copy_(block)
        return self.result


Check = Callable[..., CollectiveCall]
"""An operator's ``check(world, a, out, *options)``, which raises an error for bad arguments."""


class Handle:
    """A collective in progress, made by the ``_async`` forms."""

    def __init__(self, program: Program, call: CollectiveCall) -> None:
        self._program, self._result = program, call.result
        self._number = program.started
        self._call: CollectiveCall | None = call

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._call is None or self._reused() or self._program.done()

    def _reused(self) -> bool:
        """Whether a later call has started the program again, which the end of this one permits."""
        return self._program.started != self._number

    def wait(self, timeout: float | None = None) -> Tensor:
        """Wait for the result, and return it.

        Raises `PeerTimeout` after `timeout` seconds; the collective continues, and `wait` can be
        called again. Raises `ValueError` for a `timeout` that is not positive, and the errors of
        the collective itself.
        """
        if self._call is not None:
            check_timeout(timeout)
            if not self._join(timeout):
                operator = self._program.plan.operator
                raise PeerTimeout(f"{operator} is not done after {timeout:g} s")
            self._call.finish()
            self._call = None
        return self._result

    def _join(self, timeout: float | None) -> bool:
        """Wait until the call has ended, and raise its error; False after `timeout` seconds."""
        if self._call is None or self._reused():
            return True
        if not self._program.join(float("inf") if timeout is None else timeout):
            return False
        if self._program.failure is not None:
            raise self._program.failure
        return True


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
    with world.tell_refusal:
        call = check(world, a, out, *options)
        description = describe(_name(call), a, check, options)
        trial = left = None
        if len(call.plans) > 1:
            choices = measured.choices(world, description, timeout)
            found = choices.of(call.key, call.plans)
            call = call._replace(plan=call.plans[found.name]())
            trial = found if isinstance(found, measured.Trial) else None
            left = choices.left.get(call.key)
        program: Any = own.program(call.plan, call.tensors, call.rows)
        with world.exclusive:
            binding = program.bind(call.tensors, call.rows, description)
            if trial is None:
                program.execute(binding, timeout)
        if trial is not None:
            execute = partial(program.execute, binding, timeout)
            choices.measure(trial, execute, call.plans, call.size, description, timeout)
        result = call.finish()
        if own.caches_calls and trial is None and not call.copied and not call.sizes_exchanged:
            operands = a, out, None, None
            made = call.tensors, [result], program.prepare, left
            own.calls.add(check, options, *operands, program, binding, *made)
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
    with world.tell_refusal:
        check_timeout(timeout)
        call = check(world, a, out, *options)
        return begin(world, call, describe(_name(call), a, check, options), timeout)


def begin(world: World, call: CollectiveCall, description: str, timeout: float | None) -> Handle:
    """Begin a checked call and return at once."""
    own = engine(world)
    if call.plans and (choices := own.selections.get(measured.Choices)):
        call = call._replace(plan=choices.expected(call.key, call.plans))
    with world.exclusive:
        own.limit_outstanding()
        program = _idle(own, call)
        program.start(program.bind(call.tensors, call.rows, description), call, timeout)
        program.started += 1
    return Handle(program, call)


def _idle(own: Engine, call: CollectiveCall) -> Program:
    """An idle program of a call: each of several concurrent calls needs its own."""
    programs = (
        own.program(call.plan, call.tensors, call.rows, number=number) for number in count()
    )
    return next(program for program in programs if program.idle())


def _name(call: CollectiveCall) -> str:
    return call.name or call.plan.operator


def describe(operator: str, a: Tensor, check: Check, options: tuple[Hashable, ...]) -> str:
    """A call as errors of all ranks show it: operator, tensor and options that are not defaults."""
    return _described(operator, a.shape, a.dtype, _options(check), options)


@lru_cache
def _options(check: Check) -> tuple[str, ...]:
    """The names of an operator's options, which follow the world, the tensor and `out`."""
    return tuple(inspect.signature(check).parameters)[3:]


@lru_cache(1024)
def _described(
    operator: str,
    shape: torch.Size,
    dtype: torch.dtype,
    names: tuple[str, ...],
    values: tuple[Hashable, ...],
) -> str:
    shown = [f"{tuple(shape)} {dtype_name(dtype)}"]
    for name, value in zip(names, values, strict=True):
        if value is not None and value != "auto":
            shown.append(f"{name}={[*value] if isinstance(value, tuple) else value}")
    return f"{operator}({', '.join(shown)})"


@lru_cache(4096)
def planned(planner: Callable[..., Plan], *args: Any, **kwargs: Any) -> Plan:
    """A plan by a planner with these arguments, cached."""
    return planner(*args, **kwargs)


def check_input(a: Tensor, world: World, dtypes: Sequence[torch.dtype] = ANY) -> None:
    """Raise an error unless a tensor has one of these dtypes, and autograd does not record it."""
    arguments.check_input(a, "a", world, dtypes)
    check_not_recorded(a, "a")


def check_not_recorded(tensor: Tensor, name: str) -> None:
    """Raise `ValueError` if the gradient of a tensor would be lost."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, but weft's collectives have none: pass {name}.detach(), "
            "call under torch.no_grad(), or use torch's functional collectives"
        )


def check_reduction(a: Tensor, op: str, world: World) -> None:
    """Raise an error unless `op` is a reduction that is defined for the dtype of `a`."""
    if op not in REDUCTIONS:
        raise ValueError(
            f"there is no reduction {op!r}; choose one of {', '.join(REDUCTIONS)}"
            f"{suggestion(op, REDUCTIONS)}"
        )
    check_input(a, world, FLOATS if op == "avg" else NUMBERS)


def as_matrix(tensor: Tensor, dim: int = 0) -> Tensor:
    """The tensor as contiguous rows: one for each index of the dimensions up to `dim`."""
    shape = math.prod(tensor.shape[: dim + 1]), math.prod(tensor.shape[dim + 1 :])
    return dims.adjacent(tensor.contiguous().view(shape))


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix with a row for each index of dimension 0: a view, with any distance
    between rows, if the elements of each row are contiguous.
    """
    return dims.adjacent(tensor.reshape(len(tensor), math.prod(tensor.shape[1:])))


def parts(
    tensor: Tensor, blocks: Tensor, dim: int, sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """The parts of a tensor along `dim`, of these sizes, each with a contiguous block of `blocks`
    of the same shape.
    """
    parts = tensor.split([*sizes], dim)
    flat = blocks.view(-1).split([part.numel() for part in parts])
    return [(part, block.view(part.shape)) for part, block in zip(parts, flat, strict=True)]


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and ((one.is_contiguous() and other.is_contiguous()) or one.stride() == other.stride())
    )
