"""What weft's collectives share: on symmetric or plain CPU tensors they are plans that run wholly
in the native core.

Each is collective, and returns when its result is in place and its inputs are the caller's again.
The ``_async`` form returns a `Handle` at once and works on the native lane (the first call of its
kind may wait for its peers, to take a workspace together); until it is waited for, its tensors must
not be touched. A world has 16 of them under way at most; while it has, the next holds its thread
until the first is over. Calls are carried out in the order in which they are made. Results do not
depend on arrival order: the same bits on every run.

A call on tensors that lie like those of a call before (dtype, shape, strides; in the same place of
the same symmetric memory, if in any) is found again, which is fastest where `out` is passed.
Symmetric tensors (`World.empty`), the same on all ranks, are read and written in place by peers;
others are staged.

All tensors are plain: `torch.Tensor` or `torch.nn.Parameter` itself, strided, no conjugate or
negative view. There are no gradients: a tensor that requires one is a `ValueError` while autograd
records (outside ``torch.no_grad()``), but for a leaf that is broadcast, such as a parameter.
Torch's functional collectives have gradients, also on a process group of weft's. What is written to
`out`, or broadcast, does not raise torch's count of writes: autograd does not see that what it
keeps for backward is overwritten.

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
from typing import Any, NamedTuple, ParamSpec

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
from weft.schedules.staging import SHARED_SLOTS
from weft.schedules.thresholds import EAGER_ROOM
from weft.schedules.workload import PIECES
from weft.world import World, current
from weft.world.peer_memory import LEAST_BYTES

NUMBERS = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""What can be reduced; averages are of floating dtypes."""

ANY = (*NUMBERS, torch.bool)
"""What can be moved."""

REDUCTIONS = ("sum", "avg", "max", "min")

SENT_BYTES = (
    64 << 10
)  # least bytes of a piece that is put to peers: with fewer, its message takes longer than they do
REACHED_BYTES = (
    2 << 10
    # up to so much is handed out although few ranks could reach it: copying more costs more than a
    # signal
)
EXCHANGED_BYTES = (
    16 << 10
    # least bytes of a piece that two ranks exchange: with fewer, its signals take longer than it does
)
STEPS = 64  # in which it does so at most: a plan is a list of all of them

Asked = ParamSpec("Asked")


class Handle:
    """A collective in progress, made by the ``_async`` forms."""

    def __init__(self, program: Program, work: Work) -> None:
        self._program, self._result = program, work.result
        self._work: Work | None = work

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._program.done()

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result, once it is in place.

        Raises `PeerTimeout` if it is not after `timeout` seconds; the collective goes on and can be
        waited for again. Raises what the collective itself would.
        """
        if self._work is not None:
            if not self._program.join(float("inf") if timeout is None else timeout):
                raise PeerTimeout(f"{self._program.plan.operator} is not done after {timeout:g} s")
            self._work.finish()
            self._work = None
        return self._result


class Work(NamedTuple):
    """What a call comes to: a plan, the rows of its shards, the matrices it works on, its result,
    and what is copied to which parts of it at the end. `agreed`: the sizes were asked of all ranks,
    and may be others in the next call like this.
    """

    plan: Plan
    rows: Sequence[int]
    tensors: dict[str, Tensor]
    result: Tensor
    copied: Sequence[tuple[Tensor, Tensor]] = ()
    agreed: bool = False

    def finish(self) -> None:
        """Copy what is to be copied at the end."""
        for part, block in self.copied:
            part.copy_(block)


Prepare = Callable[..., Work]
"""What an operator makes of a call, checked: ``prepare(world, a, out, *options)``, by the names
that the operator gives them.
"""


def call_now(
    prepare: Prepare,
    a: Tensor,
    out: Tensor | None,
    options: tuple[Hashable, ...],
    world: World | None,
    timeout: float | None,
) -> Tensor:
    """Make a call and return its result."""
    world = current(world)
    own = world.engine or engine(world)
    if timeout is not None:
        check_timeout(timeout)
    if world.recorder is None and not own.pending:
        result = _result(own, prepare, a, options) if out is None else out
        seconds = world.timeout if timeout is None else timeout
        if result is not None and own.repeats.call(prepare, a, result, options, seconds):
            return result
    work = prepare(world, a, out, *options)
    with world.exclusive:
        program = _program(world, work)
        binding = program.bind(
            work.tensors,
            work.rows,
            _called(work.plan.operator, a.shape, a.dtype, _options(prepare), options),
        )
        program.execute(binding, timeout)
    work.finish()
    if own.remembers and not (work.copied or work.agreed):
        own.repeats.add(prepare, a, work.result, options, program, binding, work.tensors)
        if out is None:
            result = work.result
            own.ready.add(
                (prepare, options), a, (), (), (result.shape, result.stride(), result.dtype)
            )
    return work.result


def _result(
    own: Engine, prepare: Prepare, a: Tensor, options: tuple[Hashable, ...]
) -> Tensor | None:
    """Room for the result of a call like one that was made before; None if there was none."""
    made: Any = own.ready.find((prepare, options), a, (), ())
    if made is None:
        return None
    shape, strides, dtype = made
    return torch.empty_strided(shape, strides, dtype=dtype)


def begun(now: Callable[Asked, Tensor], prepare: Prepare) -> Callable[Asked, Handle]:
    """The ``_async`` form of the collective `now`, with the same arguments: those that `prepare`
    takes are passed by name.
    """
    signature = inspect.signature(now)
    usual = {
        name: each.default
        for name, each in signature.parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    first, *names = [name for name in signature.parameters if name not in usual]

    def begin(*given: Asked.args, **options: Asked.kwargs) -> Handle:
        if (
            len(given) + len(usual) != len(signature.parameters)
            or not signature.parameters.keys() >= options.keys()
        ):
            signature.bind(*given, **options)  # says what is wrong, if anything is
        asked: dict[str, Any] = {**usual, **options}
        world, timeout = current(asked.pop("world")), asked.pop("timeout")
        check_timeout(timeout)
        work = prepare(world, *given, **asked)
        tensor: Any = given[0] if given else asked[first]
        values = tuple(
            [
                value if type(value) in _WORDS else _word(value)
                for value in (*given[1:], *asked.values())
            ]
        )
        called = _called(
            work.plan.operator,
            tensor.shape,
            tensor.dtype,
            (*names[: max(0, len(given) - 1)], *asked),
            values,
        )
        with world.exclusive:
            engine(world).make_room()
            program = next(
                program
                for number in range(1 << 30)
                if (program := _program(world, work, number)).idle()
            )
            program.start(program.bind(work.tensors, work.rows, called), work, timeout)
        return Handle(program, work)

    begin.__signature__ = signature.replace(return_annotation=Handle)  # type: ignore[attr-defined]
    begin.__module__, begin.__name__, begin.__qualname__ = (
        now.__module__,
        f"{now.__name__}_async",
        f"{now.__name__}_async",
    )
    begin.__doc__ = f"Begin `{now.__name__}`, with the same arguments, and return at once."
    return begin


@lru_cache
def _options(prepare: Prepare) -> tuple[str, ...]:
    """The names of an operator's options: what follows the world, the tensor and `out`."""
    return tuple(inspect.signature(prepare).parameters)[3:]


@lru_cache(1024)
def _called(
    operator: str,
    shape: torch.Size,
    dtype: torch.dtype,
    names: tuple[str, ...],
    values: tuple[Hashable, ...],
) -> str:
    """What peers are told that the user called."""
    words = [f"{tuple(shape)} {dtype_name(dtype)}"]
    for name, value in zip(names, values, strict=True):
        if value is not None and value != "auto":
            words.append(f"{name}={[*value] if isinstance(value, tuple) else value}")
    return f"{operator}({', '.join(words)})"


_WORDS = {str, int, type(None)}  # options that are words as they are


def _word(value: Any) -> Hashable:
    """The value of another option as peers are told; nothing of a tensor."""
    if isinstance(value, Tensor):
        return None
    return tuple(value) if isinstance(value, list | tuple) else str(value)


def _program(world: World, work: Work, number: int = 0) -> Program:
    """The program for this work; `number` tells those apart that are under way at the same time."""
    return engine(world).program(work.plan, work.tensors, work.rows, number=number)


@lru_cache(4096)
def planned(planner: Callable[..., Plan], *asked: Any, **more: Any) -> Plan:
    """What a planner makes of this, kept for later calls."""
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
    """The parts of a tensor along `dim`, of these sizes, each with its place in `blocks`, where
    they lie one after another.
    """
    parts = tensor.split([*sizes], dim)
    places = blocks.view(-1).split([part.numel() for part in parts])
    return [(part, place.view(part.shape)) for part, place in zip(parts, places, strict=True)]


def slot_rows(matrix: Tensor, most: int, readers: int, world: World, piece: int = 0) -> int:
    """How many of at most `most` rows go to each of as many readers at a time, where they are
    staged.

    `piece`: the bytes of as much, where ranks with one thread gain by less than others do.
    """
    row, limits = _row_bytes(matrix), world.thresholds
    at_once, slot = (
        (piece, piece)
        if piece and world.threads == 1
        else (limits.staged_bytes, limits.slot_bytes * world.threads)
    )
    staged = most if most * row <= at_once else slot // (row * max(1, readers))
    return max(1, staged, -(-most // STEPS))


def exchanged_rows(matrix: Tensor, most: int, world: World) -> int:
    """The same where any two ranks give each other as many: so few that each slot that they share
    is written by both.
    """
    if world.oversubscribed:
        return slot_rows(matrix, most, world.ranks - 1, world)
    row, largest = (
        _row_bytes(matrix),
        world.thresholds.staged_bytes * world.threads // max(1, world.ranks - 1),
    )
    return max(
        1,
        min(max(-(-most // (2 * SHARED_SLOTS)), EXCHANGED_BYTES // row), largest // row),
        -(-most // STEPS),
    )


def sent_rows(matrix: Tensor, most: int) -> int:
    """How many of at most `most` rows go at a time where they are put to peers: a part of them that
    is worth a message.
    """
    return max(1, -(-most // PIECES), SENT_BYTES // _row_bytes(matrix))


def _row_bytes(matrix: Tensor) -> int:
    return max(1, matrix.shape[1] * matrix.itemsize)


def handed_out(world: World, size: int, most: int | None = None) -> bool:
    """Whether so many bytes of each rank, of at most so many, go through eager buffers, which ranks
    of one host have.
    """
    return (
        size <= (most or world.thresholds.eager_bytes)
        and world.topology is None
        and not world.stream_ordered
    )


def moved_at_once(world: World, size: int, reached: bool) -> bool:
    """The same of bytes that are only moved. `reached`: whether peers can reach the tensors
    themselves.

    Where they cannot, as many as an eager buffer holds: staged, they would be copied as often, and
    a signal more made.
    """
    return handed_out(
        world,
        size,
        EAGER_ROOM
        if not reached
        else world.thresholds.eager_bytes
        if many(world)
        else REACHED_BYTES,
    )


def reduced_at_once(world: World, size: int, reached: bool) -> bool:
    """The same of bytes that are reduced: where two ranks cannot reach them, they would be copied
    as often if they were staged.
    """
    return handed_out(world, size, EAGER_ROOM if world.ranks == 2 and not reached else None)


def many(world: World) -> bool:
    """Whether ranks are so many, or wait for a core, that signals are most of what a small
    collective takes.
    """
    return world.oversubscribed or len(world.levels) > 1


def read_in_place(world: World, size: int) -> bool:
    """Whether peers read so many bytes of an ordinary tensor through the kernel, where they lie."""
    return world.reads_memory and size >= LEAST_BYTES and not world.stream_ordered


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.is_contiguous()
        and other.is_contiguous()
        and one.shape == other.shape
    )
