"""What all engines have in common: compiled plans, the workspace, and errors that say what was waited for.

An engine compiles a plan once per geometry of its tensors; a repeated call only fills in where the caller's tensors lie.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _native
from weft.checks import name as dtype_name
from weft.engines.weights import Weight
from weft.errors import MismatchError, PlanError, WeftError
from weft.plan import Copy, Instruction, Plan, Reduce, Region, Signal, Wait, accesses, reads, writes
from weft.world import World, memory

LANES = ("compute", "comm")
_CACHED = 256  # compiled plans; a program is small, and its workspace is shared


class Geometry(NamedTuple):
    """How the rows of a buffer lie in memory; `place` is ``(segment number, byte offset)`` in symmetric memory."""

    dtype: torch.dtype
    columns: int
    stride: int  # bytes between the beginnings of rows
    place: tuple[int, int] | None = None

    @classmethod
    def of(cls, tensor: Tensor, world: World) -> Geometry:
        if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
            raise ValueError(
                f"a buffer is a matrix with contiguous rows; got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        segment = memory.find(tensor)
        place = None
        if segment is not None and segment.world == world.number:
            place = segment.number, int(tensor.storage_offset()) * tensor.itemsize
        rows, columns = tensor.shape
        return cls(tensor.dtype, columns, (tensor.stride(0) if rows > 1 else columns) * tensor.itemsize, place)


class Engine(ABC):
    """Executes plans for one rank of a world; which kind of engine does, follows from the world (`weft.engines.engine`).

    `refused` are the algorithms that this kind of engine cannot carry out, and why not. `products` says how it makes products, if
    there is more to say than that the caller's thread does.
    """

    refused: Mapping[str, str] = {}
    products = ""

    remembers = False  # whether calls may be found again by the identity of their tensors

    def __init__(self, world: World) -> None:
        self.world = world
        self.compiled: OrderedDict[Hashable, Program] = OrderedDict()
        self.names = {"agree": 0}  # signal names of all plans, in the order in which all ranks meet them
        self.workspace: Tensor | None = None
        self.pending: list[Program] = []  # started and not yet joined, in their order
        self.calls: dict[Hashable, Any] = {}  # where operators remember calls they have seen; void when `compiled` is

    def execute(
        self, plan: Plan, tensors: Mapping[str, Tensor], weights: Mapping[str, Weight] | None = None, timeout: float | None = None
    ) -> None:
        """Execute `plan`, collectively.

        `tensors` are this rank's inputs and outputs by buffer name, matrices whose rows are the buffer's rows; those that peers
        access must be symmetric. `weights` are what a product into each buffer multiplies by. Workspaces take the dtype
        and columns of the buffers they exchange rows with.
        """
        self.world.check()
        key = id(plan), *((name, Geometry.of(tensor, self.world)) for name, tensor in tensors.items())
        self.program(key, plan, tensors).run(tensors, weights or {}, timeout=timeout)

    def program(
        self, key: Hashable, plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Program:
        """The compiled plan for tensors that look like these; `key` stands for the plan, their geometry and the dtypes.

        `dtypes` are those of workspaces that differ from the buffers they exchange rows with.
        """
        program = self.compiled.get(key)
        if program is None:
            program = self.compile(plan, tensors, dtypes or {})
            self.compiled[key] = program
            if len(self.compiled) > _CACHED:
                self.compiled.popitem(last=False)
        return program

    @abstractmethod
    def compile(
        self, plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], call: str | None = None
    ) -> Program:
        """The plan for this rank and tensors that look like these; peers are told of it as `call`, or else by its sizes."""

    def check_product(self, x: Tensor, weight: Weight, out_dtype: torch.dtype) -> None:  # noqa: B027, most make any product
        """Raise `ValueError` for a product that this engine cannot make, with a result of `out_dtype`."""

    def settle(self) -> None:
        """Wait until all that was started is done, and raise what went wrong with it."""
        while self.pending:
            self.pending[0].join()

    def name(self, signals: Sequence[str]) -> None:
        """Give counters to the signals of a plan; all ranks do so in the same order."""
        names = {**self.names, **dict.fromkeys(signals, 0)}
        if len(names) > _native.Executor.max_names:
            raise PlanError(f"the plans of a world may use {_native.Executor.max_names} signal names; with {signals} they are more")
        self.names = {name: number for number, name in enumerate(names)}

    def index(self, signal: Signal) -> int:
        """Where a signal's counter lies among a rank's counters."""
        return self.names[signal.name] * self.world.ranks + signal.source

    def reserve(self, size: int, call: str) -> memory.Segment:
        """The workspace's segment, of at least `size` bytes. Growing it is collective: ranks first agree on the call."""
        if self.workspace is None or self.workspace.numel() < size:
            self.settle()  # first: what went wrong with a call before this one is the cause of what goes wrong here
            self.agree(call)
            self.compiled.clear()  # programs over the old workspace
            self.calls.clear()
            self.workspace = None
            self.workspace = self.world.empty(size, dtype=torch.uint8)
        segment = memory.find(self.workspace)
        assert segment is not None
        return segment

    def agree(self, call: str) -> None:
        """Wait until all ranks make this call."""
        world = self.world
        peers = [(world.rank + step) % world.ranks for step in range(1, world.ranks)]
        raised = [(self.index(Signal("agree", peer)), 1) for peer in peers]
        compiled = _native.Compiled(call, 1, [], raised, world.ranks)
        for peer in peers:
            compiled.notify(0, world.native, peer, self.index(Signal("agree", world.rank)))
        for peer in peers:
            compiled.wait(0, world.native, world.rank, self.index(Signal("agree", peer)), peer, 1)
        with world.guard:
            world.native.begin(compiled, world.timeout)
            if world.native.run(compiled, 0, 0) < 0:
                raise self.stopped(compiled, 0, f"to begin {call}", call, world.timeout)

    def stopped(self, compiled: _native.Compiled, lane: int, doing: str, call: str, timeout: float) -> WeftError:
        """The error for a wait of a native lane that ended early."""
        status, _, source, _, _ = compiled.wait_failure(lane)
        return self.ended(status, source, compiled, doing, call, timeout)

    def ended(
        self, status: _native.WaitStatus, source: int, compiled: _native.Compiled, doing: str, call: str, timeout: float
    ) -> WeftError:
        """The error for a wait for rank `source` that ended early because of `status`."""
        world = self.world
        match status:
            case _native.WaitStatus.mismatch:
                theirs = world.native.peer_call(source, compiled.call)
                return world.fail(
                    MismatchError(
                        f"call {compiled.call} of this world: rank {world.rank} calls {call}, but rank {source} calls {theirs}"
                    )
                )
            case _native.WaitStatus.left:
                return world.lost(source, "closed its world", doing)
            case _native.WaitStatus.failed:
                return world.failure(doing)
            case _:
                return world.timed_out(doing, timeout)


class Program(ABC):
    """A plan compiled for one rank and one geometry of its tensors."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        call: str | None = None,
    ) -> None:
        self.engine, self.world, self.plan = engine, engine.world, plan
        lanes = self.own_lanes()
        if plan.ranks != self.world.ranks:
            raise PlanError(f"a plan for {plan.ranks} ranks cannot run in a world of {self.world.ranks}")
        if not set(lanes) <= set(LANES):
            raise PlanError(f"engines have the lanes {' and '.join(LANES)}; the plan has {', '.join(lanes)}")
        engine.name(plan.signal_names())
        self.lanes = [lanes.get(name, ()) for name in LANES]
        self.geometry = _geometry(plan, tensors, dtypes, self.world)
        self.shared = {  # what ranks of one host access of each other
            region.buffer
            for rank, own in enumerate(plan.lanes)
            for lane in own.values()
            for instruction in lane
            for region in accesses(instruction)
            if region.rank != rank and self.world.hosts[region.rank] == self.world.hosts[rank]
        }
        self.call = call or self._describe()
        self._check(tensors)
        self.segments = {name: segment for name, t in tensors.items() if (segment := memory.find(t)) is not None}
        self.workspace = self._reserve()
        self.build(tensors)

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        """The lanes of this rank that the native core interprets."""
        return self.plan.lanes[self.world.rank]

    @abstractmethod
    def build(self, tensors: Mapping[str, Tensor]) -> None:
        """Turn this rank's lanes into what the engine carries out."""

    @abstractmethod
    def run(
        self,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
        bias: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Execute once, with tensors of the geometry it was compiled for."""

    @abstractmethod
    def addresses(self, tensors: Mapping[str, Tensor]) -> Any:
        """What `execute` and `start` take for these tensors; it may be kept while the tensors stay where they are."""

    @abstractmethod
    def execute(self, addresses: Any, timeout: float | None = None) -> None:
        """Execute a program of one lane without products."""

    @abstractmethod
    def start(self, addresses: Any, timeout: float | None = None) -> None:
        """Begin what `execute` does, in the background."""

    @abstractmethod
    def done(self) -> bool:
        """Whether what was started is over."""

    @abstractmethod
    def join(self, timeout: float = math.inf) -> bool:
        """Wait until what was started is over, and raise what went wrong with it; False if `timeout` seconds pass first."""

    def idle(self) -> bool:
        """Whether nothing was started that has not been joined."""
        return self not in self.engine.pending

    def doing(self, lane: int, index: int, call: int, source: int, expected: int, actual: int) -> str:
        """What a wait of this program is for: which rows of what it holds up, and what it counts."""
        wait = self.lanes[lane][index]
        assert isinstance(wait, Wait)
        held = next((writes(i)[0] for i in self.lanes[lane][index:] if writes(i)), None)
        rows = f"rows {held.start}:{held.stop}" if held else "the end"
        come = f"{actual} of {expected}" if expected else "still owed by an earlier call"
        signal = f'signal "{wait.signal.name}" from rank {source}: {come}'
        return f"for {rows} of {self.plan.operator} call {call} ({signal})"

    def _describe(self) -> str:
        """What ranks must agree on, in words: what they call, with which rows, and a digest of the rest of the plan."""
        shared = self.shared
        every = (i for lanes in self.plan.lanes for lane in lanes.values() for i in lane)
        moved = {region.buffer for i in every if isinstance(i, Copy | Reduce) for region in reads(i)}
        words = []
        for name, buffer in self.plan.buffers.items():
            geometry = self.geometry.get(name)
            if geometry is None or (name not in shared and (buffer.role != "input" or name not in moved)):
                continue
            place = ""
            if geometry.place and name in shared:
                place = f" in symmetric segment {geometry.place[0]} at byte {geometry.place[1]}, {geometry.stride} bytes a row"
            words.append(f"{name}={[*buffer.rows]} rows x {geometry.columns} {dtype_name(geometry.dtype)}{place}")
        digest = zlib.crc32(repr(self.plan.lanes).encode())
        return f"{self.plan.operator}({', '.join(words)}, algorithm={self.plan.algorithm}, plan {digest:08x})"

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name, buffer in self.plan.buffers.items():
            if buffer.role == "workspace":
                continue
            if name not in tensors:
                raise ValueError(f"{self.plan.operator} needs a tensor for the {buffer.role} {name!r}")
            if len(tensors[name]) != buffer.rows[self.world.rank]:
                raise ValueError(f"{name!r} has {len(tensors[name])} rows; the plan gives it {buffer.rows[self.world.rank]}")
            if name in self.shared and self.geometry[name].place is None:
                raise ValueError(f"peers access {name!r} in this plan, so it must be symmetric: make it with world.empty(...)")

    def _reserve(self) -> dict[str, int]:
        """Lay out the workspaces that the plan uses, alike on all ranks; returns their offsets."""
        used = {r.buffer for lanes in self.plan.lanes for lane in lanes.values() for i in lane for r in reads(i) + writes(i)}
        offsets, size = {}, 0
        for name, buffer in self.plan.buffers.items():
            if buffer.role == "workspace" and name in used:
                offsets[name] = size
                size += -(-max(buffer.rows) * self.geometry[name].stride // 4096) * 4096
        if offsets:
            self.segments["workspace"] = self.engine.reserve(size, self.call)
        return offsets

    def _rows(self, region: Region) -> Tensor | Region:
        """Rows that do not change place from call to call as a tensor; those of the caller's own tensors as they are named."""
        if region.rank == self.world.rank and region.buffer not in self.workspace:
            return region
        dtype, columns, stride, place = self.geometry[region.buffer]
        segment = self.segments["workspace" if region.buffer in self.workspace else region.buffer]
        offset = self.workspace[region.buffer] if place is None else place[1]
        whole = segment.bytes(region.rank)[: segment.size // dtype.itemsize * dtype.itemsize].view(dtype)
        step = stride // dtype.itemsize
        return whole.as_strided((region.rows, columns), (step, 1), offset // dtype.itemsize + region.start * step)


def _geometry(plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], world: World) -> dict[str, Geometry]:
    """The geometry of every buffer that is used; workspaces look like what they exchange rows with."""
    known = {name: Geometry.of(tensor, world) for name, tensor in tensors.items()}
    linked = dict.fromkeys(  # in an order that all ranks have, since the first link of a workspace decides
        (a.buffer, b.buffer)
        for lanes in plan.lanes
        for lane in lanes.values()
        for i in lane
        if isinstance(i, Copy | Reduce)
        for a in reads(i)
        for b in writes(i)
    )
    grown = True
    while grown:
        grown = False
        for one, other in [*linked, *((b, a) for a, b in linked)]:
            if one in known and other not in known:
                dtype, columns, _, _ = known[one]
                dtype = dtypes.get(other, dtype)
                known[other] = Geometry(dtype, columns, columns * dtype.itemsize)
                grown = True
    return known
