"""What all engines have in common: compiled plans, the workspace, and errors that say what was
waited for.

An engine compiles a plan; how many rows its blocks have is said by each execution.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.errors import MismatchError, PlanError, WeftError
from weft.kernels.weights import PackedWeight, Weight
from weft.plan import Compute, Copy, Instruction, Plan, Reduce, Region, Signal, Wait, reads, writes
from weft.world import World, memory

LANES = ("compute", "comm")
# calls under way at a time: ranks read what each other's latest 32 are, and may be some calls apart
OUTSTANDING = 16
_MOMENT = 1.0  # seconds in which an instruction ends that has no waits
_CACHED = 256  # compiled plans; a program is small, and its workspace is shared

Tensors = Mapping[str, Tensor]
"""Tensors by buffer."""
Weights = Mapping[str, Weight]
"""Weights by the buffer that their products go to."""
Dtypes = Mapping[str, torch.dtype]
"""Dtypes by buffer."""
Timed = tuple[str, int, int, int]
"""A lane, the index of an instruction there, and when that began and ended."""


class Engine(ABC):
    """Executes plans for one rank of a world; which kind of engine does, follows from the world
    (`weft.engines.engine`).

    `refused` are the algorithms that this kind of engine cannot carry out, and why not. `products`
    says how it makes products, if there is more to say than that the caller's thread does.
    """

    refused: Mapping[str, str] = {}
    products = ""

    whole_plans = True  # whether other ranks' lanes are looked at, too
    caches_calls = False  # whether repeated calls are found in `calls`

    def __init__(self, world: World) -> None:
        self.world = world
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.names = {
            "agree": 0
        }  # signal names of all plans, in the order in which all ranks meet them
        self.workspace: Tensor | None = None
        self.segment: memory.Segment | None = None  # that of the workspace
        self.pending: list[Program] = []  # started and not yet joined, in their order
        self.calls = _native.CallCache(world.executor, PackedWeight)
        self.selections: dict[Hashable, Any] = {}  # variants by class (`weft.ops.autotune`)

    def execute(
        self,
        plan: Plan,
        tensors: Tensors,
        weights: Weights | None = None,
        timeout: float | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Execute `plan`, collectively.

        `tensors` are this rank's inputs and outputs by buffer name, matrices with the rows of the
        buffer's blocks; those that peers access must be symmetric. `weights` are what a product
        into each buffer multiplies by. `rows` are those of each of the plan's shards; without them
        each block is a row. Workspaces take the dtype and columns of the buffers they exchange rows
        with.
        """
        self.world.check()
        rows = plan.pieces if rows is None else rows
        self.program(plan, tensors, rows).run(tensors, rows, weights or {}, timeout=timeout)

    def execute_as(
        self,
        call: str,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Execute a plan of which peers are told as `call`, not by its sizes; nobody else may
        execute it.

        Of the call comes first what the user called; what ranks must agree on may be on a line of
        its own.
        """
        program = self.program(plan, tensors, rows)
        program.compiled.say(call)
        program.run(tensors, rows, {}, timeout=timeout)

    def program(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int] = (),
        dtypes: Dtypes = MappingProxyType({}),
        number: int = 0,
    ) -> Program:
        """The compiled plan for tensors and sizes like these; `number` tells those apart that are
        under way at the same time.

        `dtypes` are those of workspaces that differ from the buffers they exchange rows with.
        """
        key = id(plan), number, self.kind(tensors, rows), *dtypes.values()
        program = self.programs.get(key)
        if program is None:
            program = self.compile(plan, tensors, rows, dtypes)
            self.programs[key] = program
            if len(self.programs) > _CACHED:
                self.programs.popitem(last=False)
        return program

    @abstractmethod
    def kind(self, tensors: Tensors, rows: Sequence[int]) -> Hashable:
        """What a program of this engine depends on beside its plan."""

    @abstractmethod
    def compile(self, plan: Plan, tensors: Tensors, rows: Sequence[int], dtypes: Dtypes) -> Program:
        """The plan for this rank and tensors and sizes like these."""

    def check_product(  # noqa: B027, most engines make any product
        self, x: Tensor, weight: Weight, out_dtype: torch.dtype
    ) -> None:
        """Raise `ValueError` for a product that this engine cannot make, with a result of
        `out_dtype`.
        """

    def drain(self) -> None:
        """Wait until all that was started is done, and raise what went wrong with it."""
        while self.pending:
            self.pending[0].join()

    def make_room(self) -> None:
        """Wait until so few calls are under way that one more can begin."""
        while len(self.pending) >= OUTSTANDING:
            self.pending[0].join()

    def name(self, signals: Sequence[str]) -> None:
        """Give counters to the signals of a plan; all ranks do so in the same order."""
        names = {**self.names, **dict.fromkeys(signals, 0)}
        if len(names) > _native.Executor.max_names:
            raise PlanError(
                f"the plans of a world may use {_native.Executor.max_names} signal names; with "
                f"{signals} they are more"
            )
        self.names = {name: number for number, name in enumerate(names)}

    def index(self, signal: Signal) -> int:
        """Where a signal's counter lies among a rank's counters."""
        return self.names[signal.name] * self.world.ranks + (
            signal.source if signal.peer is None else signal.peer
        )

    def reserve(self, size: int, call: str) -> memory.Segment:
        """The workspace's segment, of at least `size` bytes. Growing it is collective: ranks first
        agree on the call.
        """
        if self.segment is None or self.segment.size < size:
            # first: what went wrong with a call before this one is the cause of what goes wrong
            # here
            self.drain()
            self.agree(call)
            self.moved()
            self.calls.clear()
            self.workspace = self.segment = None
            self.workspace = self.world.allocate([_class_of(size)], torch.uint8)
            self.segment = memory.find(self.workspace)
            assert self.segment is not None
        return self.segment

    def abandon(self) -> None:
        """End what was started, as far as that goes: the world is closed, and what it works on may
        soon be others' memory.
        """
        for program in self.pending:
            program.stop(_MOMENT)

    def moved(self) -> None:  # noqa: B027, most programs find the workspace where it is
        """The workspace is about to be replaced."""

    def agree(self, call: str) -> None:
        """Wait until all ranks make this call."""
        world = self.world
        peers = [(world.rank + step) % world.ranks for step in range(1, world.ranks)]
        raised = [(self.index(Signal("agree", peer)), 1) for peer in peers]
        compiled = _native.Compiled(call, 1, raised, world.ranks)
        for peer in peers:
            compiled.notify(0, world.executor, peer, self.index(Signal("agree", world.rank)))
        for peer in peers:
            compiled.wait(0, world.executor, world.rank, self.index(Signal("agree", peer)), peer, 1)
        with world.fail_on_error:
            world.executor.begin(compiled, world.timeout)
            if world.executor.run(compiled, 0, 0) < 0:
                status, _, source, *_ = compiled.wait_failure(0)
                raise self.ended(
                    status, source, compiled, f"to begin {call.splitlines()[0]}", world.timeout
                )

    def ended(
        self,
        status: _native.WaitStatus,
        source: int,
        compiled: _native.Compiled,
        doing: str,
        timeout: float,
    ) -> WeftError:
        """The error for a wait for rank `source` that ended early because of `status`."""
        world = self.world
        match status:
            case _native.WaitStatus.mismatch:
                own, theirs = (
                    world.executor.peer_call(rank, compiled.call) for rank in (world.rank, source)
                )
                return world.fail(
                    MismatchError.between(compiled.call, world.rank, own, source, theirs)
                )
            case _native.WaitStatus.left:
                return world.lost(source, "closed its world", doing)
            case _native.WaitStatus.failed:
                return world.failure(doing)
            case _native.WaitStatus.lane:  # of no lane of this call
                return WeftError(f"rank {world.rank} closed its world while it waited {doing}")
            case _:
                return world.timed_out(doing, *self._late(source, compiled.call), timeout)

    def _late(self, source: int, call: int) -> tuple[int, str]:
        """The rank to look at where rank `source` is waited for in a call, which may itself wait
        for others, and why.
        """
        missing = [
            peer for peer in self.world.others if not self.world.executor.peer_call(peer, call)
        ]
        if not missing:
            return source, "has made the call, but not done its part"
        late = source if source in missing else missing[0]
        others = [str(peer) for peer in missing if peer != late]
        return (
            late,
            f"has not made the call{', nor have others: ' if others else ''}{', '.join(others)}",
        )


class Program(ABC):
    """A plan compiled for one rank; `native` is what the native core has of it."""

    compiled: _native.Compiled

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.engine, self.world, self.plan = engine, engine.world, plan
        self.held: object = None  # what must live until that which was started is over
        lanes = self.own_lanes()
        if plan.ranks != self.world.ranks:
            raise PlanError(
                f"a plan for {plan.ranks} ranks cannot run in a world of {self.world.ranks}"
            )
        if not set(lanes) <= set(LANES):
            raise PlanError(
                f"engines have the lanes {' and '.join(LANES)}; the plan has {', '.join(lanes)}"
            )
        engine.name(plan.signal_names())
        self.lanes = [lanes.get(name, ()) for name in LANES]
        self.shared = plan.shared_buffers(self.world.hosts)
        self.weights = tuple(
            dict.fromkeys(
                i.weight
                for lane in lanes.values()
                for i in lane
                if isinstance(i, Compute) and i.weight
            )
        )
        """The names of its weights, in the order of the computations."""
        moved = {
            region.buffer
            for _, i in plan.instructions()
            if isinstance(i, Copy | Reduce)
            for region in reads(i)
        }
        self.agreed = {  # what ranks must agree on
            name
            for name, buffer in plan.buffers.items()
            if name in self.shared or (buffer.role == "input" and name in moved)
        }

    def check_given(self, tensors: Tensors) -> None:
        """Raise `ValueError` unless there is a tensor for every buffer of the caller's."""
        for name, buffer in self.plan.buffers.items():
            if buffer.given and name not in tensors:
                raise ValueError(
                    f"{self.plan.operator} needs a tensor for the {buffer.role} {name!r}"
                )

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        """The lanes of this rank that the native core interprets."""
        return self.plan.lanes[self.world.rank]

    def run(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        """Execute once, with these tensors and the rows of each shard."""
        with self.world.exclusive:
            self.carry_out(tensors, rows, weights, bias, timeout)

    @abstractmethod
    def carry_out(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        """What `run` does, in this thread's turn."""

    @abstractmethod
    def bind(self, tensors: Tensors, rows: Sequence[int], words: str = "") -> Any:
        """What `execute` and `start` take for these tensors; it may be kept while the tensors stay
        where they are.

        `words` are what peers are told that the user called; without them they are made of the
        tensors.
        """

    @abstractmethod
    def execute(self, binding: Any, timeout: float | None = None) -> None:
        """Execute a program of one lane without products, in this thread's turn."""

    @abstractmethod
    def start(self, binding: Any, held: object = None, timeout: float | None = None) -> None:
        """Begin what `execute` does, in the background; `held`, whose memory it works on, lives
        until it is over.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether what was started is over."""

    @abstractmethod
    def join(self, timeout: float = math.inf) -> bool:
        """Wait until what was started is over, and raise what went wrong with it; False if
        `timeout` seconds pass first.
        """

    @abstractmethod
    def stop(self, timeout: float) -> None:
        """End the waits of what was started, and return when that is over, or after `timeout`
        seconds.
        """

    def idle(self) -> bool:
        """Whether nothing was started that has not been joined."""
        return self not in self.engine.pending

    def doing(
        self, lane: int, index: int, call: int, source: int, expected: int, actual: int
    ) -> str:
        """What a wait of this program is for, or a copy that failed: which rows of what it holds
        up, and what it counts.
        """
        wait = self.lanes[lane][index]
        if source == self.world.rank and not (isinstance(wait, Wait) and expected):
            return f"for the end of {self.plan.operator} call {call}"
        held = next(
            (self.plan.sizing_region(i) for i in self.lanes[lane][index:] if writes(i)), None
        )
        rows = f"rows {':'.join(map(str, self.rows_of(held)))}" if held else "the end"
        if not isinstance(wait, Wait):
            return (
                f"for {rows} of {self.plan.operator} call {call} (in the memory of rank {source})"
            )
        come = f"{actual} of {expected}" if expected else "still owed by an earlier call"
        signal = f'signal "{wait.signal.what}" from rank {source}: {come}'
        return f"for {rows} of {self.plan.operator} call {call} ({signal})"

    @abstractmethod
    def rows_of(self, region: Region) -> tuple[int, int]:
        """Where the rows of a region begin and end, in the execution under way."""


def _class_of(size: int) -> int:
    """The size of a workspace of at least `size` bytes: of few sizes, so that it seldom grows, and
    hardly more than is needed.

    The least, 1 MiB, is enough for most calls of few rows: to grow it takes all ranks as long as
    several of those.
    """
    step = 1 << max(20, size.bit_length() - 4)
    return -(-size // step) * step


def kinds(plan: Plan, given: Dtypes, dtypes: Dtypes) -> dict[str, tuple[torch.dtype, str]]:
    """The dtype of every buffer that is used, and the given one whose columns it has: workspaces
    look like what they exchange rows with.
    """
    known = {name: (dtype, name) for name, dtype in given.items()}
    # in an order that all ranks have, since the first link of a workspace decides
    linked = dict.fromkeys(
        (a.buffer, i.dst.buffer)
        for _, i in plan.instructions()
        if isinstance(i, Copy | Reduce)
        for a in reads(i)
    )
    grown = True
    while grown:
        grown = False
        for one, other in [*linked, *((b, a) for a, b in linked)]:
            if one in known and other not in known:
                dtype, like = known[one]
                known[other] = dtypes.get(other, dtype), like
                grown = True
    return known
