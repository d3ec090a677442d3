"""The base class of all engines: compiled plans, the workspace, and errors of failed waits.

An engine compiles a plan once; each execution passes the numbers of rows of the blocks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.engines.program import Dtypes, Program, Tensors, Weights
from weft.errors import PlanError, WeftError
from weft.kernels.weights import PreparedWeight, Weight
from weft.plan import (
    Launch,
    Plan,
    Signal,
)
from weft.plan.language import LANES
from weft.plan.proof import verify
from weft.schedules import all_gather
from weft.schedules.barrier import barrier
from weft.schedules.levels import Levels
from weft.schedules.workload import Variant
from weft.world import World, memory

_log = logging.getLogger("weft")
# Concurrent calls of a rank. Ranks read descriptions of each other's latest 32 calls only, and may
# differ by some calls.
OUTSTANDING = 16
_STOP_SECONDS = 1.0  # enough for any instruction that does not wait
_CACHED = 256  # compiled plans; a program is small, and its workspace is shared
_LONGEST = 4 << 10
"""Bytes of a text that ranks exchange: peers must know how many are sent."""
_LEAST_WORKSPACE = 1 << 20
"""Bytes of the smallest workspace, so that calls of few rows never grow one, which all ranks do
together and which takes as long as several such calls.
"""


class Engine(ABC):
    """Executes plans for one rank of a world; `weft.engines.engine` selects its class.

    `shared_memory`: whether ranks can access the memory of all peers, which some algorithms need.
    `products` describes how it computes products, for `weft.explain`; it is empty if the caller's
    thread does.
    """

    shared_memory = True
    products = ""

    caches_calls = False  # whether `calls` has repeated calls
    launches = False  # whether kernels can execute the plans that ask for it by their `launch`

    def __init__(self, world: World) -> None:
        self.world = world
        self.programs: OrderedDict[Hashable, Program] = OrderedDict()
        self.proved: OrderedDict[int, Plan] = OrderedDict()  # by `id`, which a living plan keeps
        # signal names of all plans, in the same order on all ranks
        self.names = {"agree": 0}
        self.workspace: Tensor | None = None
        self.parts: dict[tuple[int, torch.dtype], Tensor] = {}  # of the workspace
        self.segment: memory.Segment | None = None  # the workspace's
        self.pending: list[Program] = []  # started and not yet joined, in the order of their starts
        self.calls = _native.CallCache(world.executor, PreparedWeight, self.pending)
        self.selections: dict[Hashable, Any] = {}  # variants by class (`weft.ops.autotune`)
        self.counts: dict[Hashable, Any] = {}  # exchanges of sizes (`weft.ops.split_sizes`)

    def execute(
        self,
        plan: Plan,
        tensors: Tensors,
        weights: Weights | None = None,
        timeout: float | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Execute `plan`, collectively.

        `tensors` are this rank's inputs and outputs by buffer name: matrices with the rows of the
        buffer's blocks, symmetric if peers access them. No output may overlap another of them.
        `weights` are the weights of the plan's computations by name. `rows` are the numbers of rows
        of the plan's shards; without them each block is one row. Workspaces take the dtype and
        columns of the buffers they exchange rows with; such buffers have equal columns, and equal
        dtypes if rows are copied.

        At its first execution the plan is proved as it runs in this world: over several hosts as
        the messages between them (`weft.verify` with `hosts`). Raises `PlanError` for a plan that
        is not correct, `ValueError` or `TypeError` for tensors that do not fit, before anything is
        sent.
        """
        self.world.failure.check()
        weights = weights or {}
        rows = plan.pieces if rows is None else rows
        with self.world.failure.report_rejection:
            self._prove(plan)
            program = self.program(plan, tensors, rows)
            program.check_operands(tensors, weights)
            program.run(tensors, rows, weights, timeout=timeout)

    def _prove(self, plan: Plan) -> None:
        """Raise `PlanError` unless a plan is correct as this engine executes it."""
        if id(plan) not in self.proved:
            if plan.ranks == self.world.ranks:
                verify(plan, hosts=None if self.shared_memory else self.world.hosts)
            self.proved[id(plan)] = plan
            if len(self.proved) > _CACHED:
                self.proved.popitem(last=False)

    def execute_as(
        self,
        call: str,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Execute a plan under the description `call`, which peers compare with their own, in
        place of a description made of sizes; the plan must not be executed otherwise.

        The first line of a description names the user's call; a second line, if any, holds the
        values that must be equal on all ranks.
        """
        program = self.program(plan, tensors, rows)
        program.compiled.set_call_text(call)
        program.run(tensors, rows, {}, timeout=timeout)

    def program(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int] = (),
        dtypes: Dtypes = MappingProxyType({}),
        number: int = 0,
        options: Any = None,
    ) -> Program:
        """The compiled plan for tensors and sizes of this kind; concurrent calls of one plan have
        different `number` each.

        `dtypes` has the workspaces whose dtypes differ from the buffers they exchange rows with;
        `options` are those of a variant, if this engine has any; by default `default_options`.
        """
        options = options or self.default_options
        key = id(plan), number, options, self.kind(tensors, rows), *dtypes.values()
        program = self.programs.get(key)
        if program is None:
            program = self.compile(plan, tensors, rows, dtypes, options)
            program.original = plan
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug(
                    "compiled %s by %s, plan %08x", plan.operator, plan.algorithm, plan.digest
                )
            self.programs[key] = program
            if len(self.programs) > _CACHED:
                self.programs.popitem(last=False)
        return program

    @property
    def default_options(self) -> Any:
        """The options of a program for which none are given."""
        return None

    @abstractmethod
    def kind(self, tensors: Tensors, rows: Sequence[int]) -> Hashable:
        """The key of a compiled plan, apart from the plan: the properties of tensors and rows that
        a program of this engine is compiled for.
        """

    @abstractmethod
    def compile(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: Any,
    ) -> Program:
        """Compile the plan for this rank, for tensors and sizes of this kind, and with `options` as
        in `program`.
        """

    def lane_names(self, lanes: Collection[str]) -> tuple[str, ...]:
        """The names of a program's lanes, of which a plan has `lanes`. Raises `PlanError` for lanes
        that this engine does not run.
        """
        if not {*lanes} <= {*LANES}:
            raise PlanError(
                f"engines have the lanes {' and '.join(LANES)}; the plan has {', '.join(lanes)}"
            )
        return LANES

    def check_product(  # noqa: B027, most engines compute any product
        self, x: Tensor, weight: Weight, out_dtype: torch.dtype
    ) -> None:
        """Raise `ValueError` for a product with a result of `out_dtype` that this engine cannot
        compute.
        """

    def check_launch(self, launch: Launch) -> None:
        """Raise `ValueError` for a launch that this engine cannot make."""
        raise ValueError(
            "this world's ranks compute on the CPU, and kernels run on GPUs: make the world by "
            'weft.init(device="cuda"), or by weft.init(products="triton") under '
            "TRITON_INTERPRET=1; or choose another algorithm"
        )

    def drain(self) -> None:
        """Wait until all started calls have ended, and raise their errors."""
        while self.pending:
            self.pending[0].join()

    def limit_outstanding(self) -> None:
        """Wait until one more call can be started."""
        while len(self.pending) >= OUTSTANDING:
            self.pending[0].join()

    def name(self, signals: Sequence[str]) -> None:
        """Assign counters to the signals of a plan; all ranks do so in the same order."""
        names = {**self.names, **dict.fromkeys(signals, 0)}
        if len(names) > _native.Executor.max_names:
            raise PlanError(
                f"the plans of a world may use {_native.Executor.max_names} signal names in "
                f"all; with {', '.join(signals)} there would be {len(names)}"
            )
        self.names = {name: number for number, name in enumerate(names)}

    def index(self, signal: Signal) -> int:
        """The index of a signal's counter among a rank's counters."""
        return self.names[signal.name] * self.world.ranks + (
            signal.source if signal.peer is None else signal.peer
        )

    def reserve(self, size: int, call: str) -> memory.Segment:
        """The workspace's segment, of at least `size` bytes. To grow it is collective: ranks first
        check that all of them make the call.
        """
        if self.segment is None or self.segment.size < size:
            # Before the rest: the error of an earlier call would be the cause of any error here.
            self.drain()
            self.agree(call)
            self.workspace_replaced()
            self.calls.clear()
            self.parts.clear()
            self.workspace = self.segment = None
            self.workspace = self.world.allocate([_workspace_size(size)], torch.uint8)
            self.segment = memory.find(self.workspace)
            assert self.segment is not None
        return self.segment

    def workspace_part(self, rank: int, dtype: torch.dtype) -> Tensor:
        """A rank's part of the workspace as elements of a dtype."""
        part = self.parts.get((rank, dtype))
        if part is None:
            assert self.segment is not None
            part = self.parts[rank, dtype] = memory.numbers(self.segment, rank, dtype)
        return part

    def meet(self, call: str, timeout: float | None = None) -> None:
        """Wait until all ranks make a call; collective. `call` describes it as in `execute_as`."""
        with self._unrecorded():
            self.execute_as(
                call, _barrier(_choice(call), self.world.placement.levels), {}, timeout=timeout
            )

    def exchange(self, call: str, text: str, timeout: float | None = None) -> list[str]:
        """The texts of all ranks, by rank, of up to 4 KiB each; collective. `call` describes the
        call of which this is a part, as in `execute_as`.
        """
        world, padded = self.world, bytearray(text.encode().ljust(_LONGEST, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8).view(1, -1)
        every = own.new_empty(world.ranks, _LONGEST)
        plan = _to_all(_choice(call), world.placement.levels, world.hosts.if_several)
        tensors = {"a": own, "gathered": every}
        with self._unrecorded():
            self.execute_as(call, plan, tensors, (1,) * world.ranks, timeout)
        return [row.numpy().tobytes().rstrip(b"\0").decode() for row in every]

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Do not record the executions in this context, which are parts of another call."""
        recorder, self.world.recorder = self.world.recorder, None
        try:
            yield
        finally:
            self.world.recorder = recorder

    @property
    def setting(self) -> str:
        """The properties of its world, besides its calls, on which the fastest variants depend."""
        link, world = self.world.emulated_link, self.world
        pages = "huge" if world.placement.huge_pages else "small"
        over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
        return f"{world.placement.threads} threads, {pages} pages, {over}"

    def check_options(self, options: Any) -> None:  # noqa: B027, of streams only
        """Raise `ValueError` for options that this rank's device cannot honour."""

    def groups(self) -> Sequence[Callable[[Any, Sequence[Variant]], Iterable[Variant]]]:
        """The variants to measure for a call, besides its algorithms and pieces: each function
        takes the call and the variants so far, the fastest first.
        """
        return ()

    @property
    def one_sided(self) -> Any:
        """The one-sided calls of a world whose work is on streams; others are native."""
        raise WeftError("this world's one-sided calls are native")

    def finish_transfers(self) -> None:  # noqa: B027, only worlds of streams have any here
        """Wait until all asynchronous one-sided transfers are complete."""

    def abandon(self) -> None:
        """Stop all started calls, within a time limit: the world is closed, and the memory that
        they use may soon be freed and reused.
        """
        for program in self.pending:
            program.stop(_STOP_SECONDS)

    def release(self) -> None:  # noqa: B027, streams may still use the memory
        """Drop what refers to the workspace of a closed world, if nothing uses it any more."""

    def workspace_replaced(self) -> None:  # noqa: B027, most programs look up its address
        """Drop programs that contain addresses of the workspace, which is about to be replaced."""

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
        with world.failure.fail_on_error:
            world.executor.begin(compiled, world.timeout)
            if world.executor.run(compiled, 0, 0) < 0:
                status, _, source, *_ = compiled.wait_failure(0)
                raise self.wait_error(
                    status, source, compiled, f"to begin {call.splitlines()[0]}", world.timeout
                )

    def wait_error(
        self,
        status: _native.WaitStatus,
        source: int,
        compiled: _native.Compiled,
        purpose: str,
        timeout: float,
    ) -> WeftError:
        """The error for a wait for rank `source` that failed with `status`; `purpose` continues
        "rank 0 waited …".
        """
        world = self.world
        match status:
            case _native.WaitStatus.mismatch:
                own, theirs = (
                    world.executor.peer_call(rank, compiled.call) for rank in (world.rank, source)
                )
                return world.failure.mismatch(compiled.call, own, source, theirs)
            case _native.WaitStatus.refused:
                own = world.executor.peer_call(world.rank, compiled.call)
                return world.failure.rejected(own, source)
            case _native.WaitStatus.left:
                return world.failure.lost(source, "closed its world", purpose)
            case _native.WaitStatus.failed:
                return world.failure.reported(purpose)
            case _native.WaitStatus.lane:  # but no lane of this call has failed
                return WeftError(
                    f"rank {world.rank} closed its world while it waited {purpose}: wait for "
                    "asynchronous calls before the world is closed"
                )
            case _:
                return world.failure.timed_out(
                    purpose, *self._late_rank(source, compiled.call), timeout
                )

    def _late_rank(self, source: int, call: int) -> tuple[int, str]:
        """The rank that delays a wait for rank `source` in a call, and the reason: `source`, or a
        rank that it may wait for itself.
        """
        executor, here = self.world.executor, self.world.hosts.here
        # a rank on another host that has sent nothing here yet may have made the call
        missing = [
            peer
            for peer in self.world.placement.others
            if not executor.peer_call(peer, call)
            and (peer == source or here(peer) or executor.made_calls(peer))
        ]
        if not missing:
            return source, "has made the call, but not done its part"
        late = source if source in missing else missing[0]
        others = [str(peer) for peer in missing if peer != late]
        return (
            late,
            f"has not made the call{', nor have others: ' if others else ''}{', '.join(others)}",
        )


def _choice(call: str) -> str:
    """The name for the selection of a variant, in errors of waits and in profiles."""
    return f"choice of {call.partition('(')[0]}"


@cache
def _barrier(name: str, levels: Levels) -> Plan:
    return replace(barrier(levels, "begin"), operator=name)


@cache
def _to_all(name: str, levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    ranks = len(levels[-1])
    plan = (
        all_gather.all_gather(ranks, 1, "push", hosts=hosts) if hosts else all_gather.eager(levels)
    )
    return replace(plan, operator=name)


def _workspace_size(size: int) -> int:
    """`size` bytes rounded up, by less than an eighth from 8 MiB on, so that the workspace seldom
    grows.

    The minimum, `_LEAST_WORKSPACE`, is enough for most calls of few rows: growing takes all ranks
    as long as several such calls.
    """
    step = max(_LEAST_WORKSPACE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
