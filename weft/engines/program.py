"""The base class of compiled plans, with the rows and signals that errors of waits name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name as dtype_name
from weft.checks import overlap
from weft.errors import PlanError
from weft.kernels.weights import Weight
from weft.plan import (
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Wait,
    accesses,
    reads,
    writes,
)

if TYPE_CHECKING:
    from weft.engines.engine import Engine

Tensors = Mapping[str, Tensor]
"""Tensors by buffer."""
Weights = Mapping[str, Weight]
"""Weights by name."""
Dtypes = Mapping[str, torch.dtype]
"""Dtypes by buffer."""
MIXED = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that a reduction combines with each other: it accumulates them in float32."""
REDUCED = MIXED | {
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
}
"""The dtypes that a reduction combines with their own."""
Moves = Mapping[tuple[str, ...], Copy | Compute | Reduce]
"""Instructions by their kind and their buffers; see `moves`."""
Timed = tuple[str, int, int, int]
"""A lane, the index of an instruction in it, and the times of its begin and end."""


class Program(ABC):
    """A plan compiled for one rank; `compiled` is its part in the native core."""

    compiled: _native.Compiled
    kinds: Mapping[str, tuple[torch.dtype, str]]
    """As the function `kinds` finds them."""
    original: Plan
    """The plan that was compiled, kept alive: its `id` is part of the key of this program."""

    def __init__(self, engine: Engine, plan: Plan, common: Plan | None = None) -> None:
        """`common` has all that ranks must agree on; by default it is that of the plan."""
        common = common or plan.common([engine.world.rank])
        if plan.uniform:
            plan = plan.part([engine.world.rank])
        self.engine = engine
        self.world = engine.world
        self.plan = plan
        self.retained: object = None  # objects that must live until the started execution ends
        lanes = self.own_lanes()
        if plan.ranks != self.world.ranks:
            raise PlanError(
                f"a plan for {plan.ranks} ranks cannot run in a world of {self.world.ranks}"
            )
        if plan.launch is not None and not engine.launches:
            raise PlanError(
                f"{plan.operator} by {plan.algorithm} is a plan for kernels, and this world's "
                "ranks compute on the CPU"
            )
        self.lane_names = engine.lane_names(lanes)
        engine.name(self.signal_names(common))
        self.lanes = [lanes.get(name, ()) for name in self.lane_names]
        # in a uniform plan one rank stands for all, whatever the hosts of its peers
        self.shared = common.shared_buffers(None if plan.uniform else self.world.hosts)
        own = [i for lane in lanes.values() for i in lane]
        for i in own:
            if isinstance(i, Copy) and i.compress:
                raise PlanError(f"{i}: rows are compressed only where they go to another host")
        computes = [i for i in own if isinstance(i, Compute)]
        self.weights = tuple(dict.fromkeys(i.weight for i in computes if i.weight))
        """The names of its weights, in the order of the computations."""
        self.computed = dict.fromkeys(
            (i.kernel, tuple(region.buffer for region in accesses(i)), i.weight) for i in computes
        )
        """Its kernels, each with the buffers of its sources and its result, and its weight."""
        self.averages = {i.dst.buffer for i in own if isinstance(i, Reduce) and i.op == "avg"}
        copied = {
            region.buffer
            for _, i in common.instructions()
            if isinstance(i, Copy | Reduce)
            for region in reads(i)
        }
        self.agreed = {  # buffers whose rows and dtypes must be equal on all ranks
            name
            for name, buffer in plan.buffers.items()
            if name in self.shared or (buffer.role == "input" and name in copied)
        }

    def check_tensors(self, tensors: Tensors) -> None:
        """Raise `ValueError` unless there is a tensor for every input and output, and no other."""
        operator, buffers = self.plan.operator, self.plan.buffers
        given = [name for name, buffer in buffers.items() if buffer.given]
        for name in given:
            if name not in tensors:
                raise ValueError(f"{operator} needs a tensor for the {buffers[name].role} {name!r}")
        if others := tensors.keys() - given:
            names = ", ".join(given)
            raise ValueError(f"{operator} takes tensors for {names}; got one for {min(others)!r}")

    def check_columns(self, tensors: Tensors) -> None:
        """Raise `ValueError` unless buffers between which rows are moved have equal columns."""
        columns = {name: tensors[like].shape[1] for name, (_, like) in self.kinds.items()}
        for one, other in exchanges(moves(self.plan)):
            if columns[one] != columns[other]:
                raise ValueError(
                    f"{one!r} has {columns[one]} columns and {other!r} has {columns[other]} columns"
                    ": the plan moves rows between them, so they must have equal columns"
                )

    def check_operands(self, tensors: Tensors, weights: Weights) -> None:
        """Raise `ValueError` for an output that overlaps another tensor and for a missing weight,
        `TypeError` for averages of integers, either for operands that a kernel cannot compute with.
        """
        operator, buffers = self.plan.operator, self.plan.buffers
        for name, other in permutations(tensors, 2):
            if buffers[name].role == "output" and overlap(tensors[name], tensors[other]):
                raise ValueError(
                    f"{operator}: the output {name!r} overlaps {other!r}: pass separate memory"
                )
        for name in sorted(self.averages & self.kinds.keys()):
            if not (dtype := self.kinds[name][0]).is_floating_point:
                raise TypeError(
                    f"{operator} averages rows of {name!r}, which has dtype {dtype_name(dtype)}: "
                    "averages are of floating dtypes"
                )
        if missing := [name for name in self.weights if name not in weights]:
            raise ValueError(f"{operator} needs a weight named {missing[0]!r}")
        rowless = {
            name: tensors[like].new_empty(0, tensors[like].shape[1], dtype=dtype)
            for name, (dtype, like) in self.kinds.items()
        }
        for kernel, names, weight in self.computed:
            if rowless.keys() >= {*names}:  # else the sizes of this call leave nothing to compute
                *sources, out = map(rowless.__getitem__, names)
                kernel.check(sources, None if weight is None else weights[weight], out)

    def signal_names(self, common: Plan) -> list[str]:
        """The names of all signals of all ranks."""
        return common.signal_names()

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        """This rank's lanes that the native core interprets."""
        return self.plan.lanes[self.world.rank]

    def run(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        """Execute once, with these tensors and numbers of rows of the shards."""
        with self.world.exclusive:
            self.run_locked(tensors, rows, weights, bias, timeout)

    @abstractmethod
    def run_locked(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        """`run`, while this thread holds the world's `exclusive`."""

    @abstractmethod
    def bind(self, tensors: Tensors, rows: Sequence[int], description: str = "") -> Any:
        """The argument of `execute` and `start` for these tensors; it stays valid while the
        tensors' addresses do.

        `description` is the user's call as errors of all ranks show it; by default it is made of
        the tensors.
        """

    def prepare(self, at: int, *_: object) -> Any:
        """The function that a repeated collective runs where its lane pauses, in the form of
        `weft.engines.computes.Computes.prepare`.
        """
        raise PlanError(f"{self.plan.operator} does not pause at instruction {at}")

    @abstractmethod
    def execute(self, binding: Any, timeout: float | None = None) -> None:
        """Execute a program of one lane without computations, while this thread holds the world's
        `exclusive`.
        """

    started = 0
    """The number of times that it was started."""
    failure: BaseException | None = None
    """The error of the started execution that `join` has waited for."""

    @abstractmethod
    def start(self, binding: Any, retained: object = None, timeout: float | None = None) -> None:
        """Begin `execute` in the background; `retained`, the owner of the memory it uses, is kept
        alive until it ends.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether the started execution has ended."""

    @abstractmethod
    def join(self, timeout: float = math.inf) -> bool:
        """Wait until the started execution has ended, and raise its error; False if `timeout`
        seconds pass first.
        """

    @abstractmethod
    def stop(self, timeout: float) -> None:
        """End the waits of the started execution, and return when it has ended, or after `timeout`
        seconds.
        """

    def idle(self) -> bool:
        """Whether every started execution has been joined."""
        return self not in self.engine.pending

    def describe_wait(
        self, lane: int, index: int, call: int, source: int, expected: int, actual: int
    ) -> str:
        """The purpose of a wait of this program, or of a copy that failed: the rows that are
        delayed, and the signal.
        """
        wait = self.lanes[lane][index]
        if source == self.world.rank and not (isinstance(wait, Wait) and expected):
            return f"for the end of {self.plan.operator} call {call}"
        delayed = next(
            (self.plan.sizing_region(i) for i in self.lanes[lane][index:] if writes(i)), None
        )
        rows = f"rows {':'.join(map(str, self.rows_of(delayed)))}" if delayed else "the end"
        if not isinstance(wait, Wait):
            return (
                f"for {rows} of {self.plan.operator} call {call} (in the memory of rank {source})"
            )
        count = f"{actual} of {expected}" if expected else "still owed by an earlier call"
        signal = f'signal "{wait.signal.what}" from rank {source}: {count}'
        return f"for {rows} of {self.plan.operator} call {call} ({signal})"

    @abstractmethod
    def rows_of(self, region: Region) -> tuple[int, int]:
        """The first row of a region and its last row + 1, in the current execution."""


def moves(plan: Plan) -> Moves:
    """An instruction of each kind that moves or computes rows, and of each combination of buffers:
    those of its result and of its sources.
    """
    return {
        (type(i).__name__, i.dst.buffer, *(region.buffer for region in reads(i))): i
        for _, i in plan.instructions()
        if not isinstance(i, Notify | Wait)
    }


def exchanges(every: Moves) -> list[tuple[str, str]]:
    """The pairs of buffers between which rows are moved, which have equal columns."""
    pairs = (
        (source, target)
        for (_, target, *sources), i in every.items()
        if not isinstance(i, Compute)
        for source in sources
    )
    return [*dict.fromkeys(pairs)]


def kinds(every: Moves, bound: Dtypes, dtypes: Dtypes) -> dict[str, tuple[torch.dtype, str]]:
    """The dtype of every buffer that is used, and the bound buffer whose columns it has: workspaces
    take both from the buffers they exchange rows with.

    `bound` has the dtypes of the caller's tensors, `dtypes` exceptions for workspaces. Raises
    `ValueError` for a copy that would have to convert its rows, and for a reduction of dtypes that
    cannot be combined, `PlanError` for a workspace that exchanges no rows.
    """
    found = {name: (dtype, name) for name, dtype in bound.items()}
    # in the same order on all ranks, since a workspace takes the first buffer that has a dtype
    linked = exchanges(every)
    grown = True
    while grown:
        grown = False
        for one, other in [*linked, *((b, a) for a, b in linked)]:
            if one in found and other not in found:
                dtype, like = found[one]
                found[other] = dtypes.get(other, dtype), like
                grown = True
    for (_, *buffers), instruction in every.items():
        for name in buffers:
            if name not in found:
                raise PlanError(
                    f"the columns of the workspace {name!r} are not known, as no copy or reduction "
                    f"connects it with an input or output: {instruction}"
                )
        _check_dtypes(instruction, {name: found[name][0] for name in buffers})
    return found


def _check_dtypes(instruction: Instruction, dtypes: Dtypes) -> None:
    """Raise `ValueError` unless rows of these dtypes, by buffer, can be copied or combined."""
    several = {*dtypes.values()}
    match instruction:
        case Copy():
            fits = len(several) == 1
            rule = "a copy does not convert"
        case Reduce():
            fits = several <= MIXED or (len(several) == 1 and several <= REDUCED)
            rule = "only float16, bfloat16 and float32 are combined with each other"
        case _:
            return
    if not fits:
        given = ", ".join(f"{name!r} is {dtype_name(dtype)}" for name, dtype in dtypes.items())
        raise ValueError(f"{instruction}: {given}; {rule}")
