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
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from weft import _native
from weft._native import Binding
from weft.checks import check_timeout, suggestion
from weft.checks import name as dtype_name
from weft.engines.program import Program
from weft.kernels.weights import DTYPES as FLOATS
from weft.ops import arguments, dims, driver, handle
from weft.ops.call import Call, Key, Selection
from weft.ops.dropped import warn_if_dropped
from weft.ops.handle import Handle
from weft.ops.rejections import report
from weft.plan import Plan
from weft.plan.values import REDUCTIONS
from weft.schedules.workload import Variant, Workload
from weft.world import World, current

NUMBERS = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""The dtypes that can be reduced; averages are of floating dtypes."""

ANY = (*NUMBERS, torch.bool)
"""The dtypes that can be moved."""

Plans = Mapping[str, Callable[[], Plan]]
"""The plans for a call, by algorithm, the rule's first."""


_AS_ASKED = "as asked for"
_BY_RULE = "the rule for its size and memory"


class CollectiveCall(Call):
    """A checked call of a collective; a subclass chooses its plans.

    `size` is the most bytes of a rank that are sent to peers, `algorithm` the caller's. `copied`
    has pairs of a part of the result and the block that is copied to it at the end.
    """

    exact = True
    description = ""
    copied: Sequence[tuple[Tensor, Tensor]] = ()

    def __init__(
        self,
        world: World,
        name: str,
        rows: Sequence[int],
        tensors: dict[str, Tensor],
        result: Tensor,
        *,
        size: int = 0,
        algorithm: str = "auto",
    ) -> None:
        super().__init__(world, None)
        self.name, self.algorithm, self.size = name, algorithm, size
        self.rows, self.tensors, self.results = rows, tensors, [result]
        self.plans = self.choose()

    @abstractmethod
    def choose(self) -> Plans:
        """The plans of its algorithm; several for ``auto`` if the fastest depends on the machine.
        Calls of up to the same power of two of bytes have the same algorithms.
        """

    @property
    def own_class(self) -> Workload:
        """Rows of one byte each, as the fastest plan depends on the bytes alone."""
        sizes = (class_bytes(self.size),) * self.world.ranks
        return Workload(self.name, sizes, 1, 1, "uint8", "uint8", symmetric=False)

    @property
    def similar(self) -> Workload | None:
        return None if len(self.plans) == 1 else self.own_class

    @property
    def work(self) -> int:
        return self.size

    def rule(self) -> Selection:
        return Selection(
            Variant(next(iter(self.plans))), _AS_ASKED if self.algorithm != "auto" else _BY_RULE
        )

    def candidates(self, first: Variant) -> list[Variant]:
        return [*map(Variant, self.plans)]

    def possible(self, algorithm: str) -> bool:
        return algorithm in self.plans

    def plan(self, variant: Variant) -> Plan:
        return self.plans[variant.algorithm]()

    def bind(self, program: Program) -> Binding:
        found: Binding = program.bind(self.tensors, self.rows, self.description)
        return found

    def execute(self, program: Program) -> None:
        with self.world.exclusive:
            program.execute(self.bind(program), self.timeout)

    def repeatable(self, key: Key) -> bool:
        return self.engine.caches_calls and not self.copied

    def finish(self) -> Tensor:
        """The result, with the blocks copied to it."""
        for part, block in self.copied:
            part.copy_(block)
        return self.results[0]

    def cut(self, variant: Variant) -> str:
        pieces = max(self.plan(variant).pieces, default=1)
        return f"{variant}, {pieces} piece{'' if pieces == 1 else 's'} per shard"


def class_bytes(size: int) -> int:
    """The most bytes of a call that is in one class with calls of `size` bytes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


Check = Callable[..., CollectiveCall]
"""An operator's ``check(world, a, out, *options)``, which raises an error for bad arguments."""


def _run(
    check: Check,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
) -> Tensor:
    """The result of a first call of a collective, which is cached for later calls."""
    return run_once(check, a, out, options, world, timeout, (check, options, a, out, None, None))


def run_once(
    check: Check,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
    key: Key | None = None,
) -> Tensor:
    """The result of a collective; without a `key` it is not kept in the call cache."""
    try:
        world = current(world)
        check_timeout(timeout)
        made: Tensor = driver.run(_checked(check, world, a, out, options, timeout), key)
    except Exception as error:
        report(error, world)
        raise
    if out is None:
        warn_if_dropped()
    return made


_native.set_first_call(_run)
run = cast(Callable[..., Tensor], _native.run)
"""The result of a collective, with the arguments of `_run`: a repeated call is one native call."""


def start(
    check: Check,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
) -> Handle:
    """Begin a collective and return at once."""
    try:
        world = current(world)
        check_timeout(timeout)
        return handle.begin(_checked(check, world, a, out, options, timeout))
    except Exception as error:
        report(error, world)
        raise


def _checked(
    check: Check,
    world: World,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    timeout: float | None,
) -> CollectiveCall:
    call = check(world, a, out, *options)
    call.timeout = timeout
    call.description = describe(call.name, a, check, options)
    return call


def describe(operator: str, a: Tensor, check: Check, options: tuple[Hashable, ...]) -> str:
    """A call as errors of all ranks show it: operator, tensor and options that are not defaults."""
    return _described(operator, a.shape, a.dtype, options_of(check), options)


@lru_cache
def options_of(check: Check) -> tuple[str, ...]:
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
