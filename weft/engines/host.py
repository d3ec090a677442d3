"""The host engine: ranks are processes of one machine, and every buffer that a peer accesses lies in shared memory.

The compute lane runs on the caller's thread: matrix products from Python, everything between them in one native call each. The
comm lane runs beside it on a native thread. A plan is compiled once per geometry of its tensors; a repeated call only fills in
the addresses of the caller's tensors.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _native
from weft.engines.matmul import Weight, multiply
from weft.errors import MismatchError, PlanError, WeftError
from weft.plan import Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Signal, Wait, accesses, reads, writes
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


class HostEngine:
    """Executes plans for one rank of a world.

    `refused` are the algorithms that this kind of engine cannot carry out, and why not. `products` says how it makes products, if
    there is more to say than that the caller's thread does.
    """

    refused: Mapping[str, str] = {}
    products = ""

    remembers = True  # calls may be found again by the identity of their tensors

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

    def compile(
        self, plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], call: str | None = None
    ) -> Program:
        """The plan for this rank and tensors that look like these; peers are told of it as `call`, or else by its sizes."""
        return Program(self, plan, tensors, dtypes, call)

    def check_product(self, x: Tensor, weight: Weight, out_dtype: torch.dtype) -> None:
        """Raise `ValueError` for a product that this engine cannot make, with a result of `out_dtype`."""

    def settle(self) -> None:
        """Wait until all that was started is done, and raise what went wrong with it."""
        while self.pending:
            self.pending[0].join()

    def name(self, signals: Sequence[str]) -> None:
        """Give counters to the signals of a plan; all ranks do so in the same order."""
        names = {**self.names, **dict.fromkeys(signals, 0)}
        if len(names) > _native.World.max_names:
            raise PlanError(f"the plans of a world may use {_native.World.max_names} signal names; with {signals} they are more")
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
        trouble, _, source, _, _ = compiled.stop(lane)
        return self.ended(trouble, source, compiled, doing, call, timeout)

    def ended(
        self, trouble: _native.Trouble, source: int, compiled: _native.Compiled, doing: str, call: str, timeout: float
    ) -> WeftError:
        """The error for a wait for rank `source` that ended early because of `trouble`."""
        world = self.world
        match trouble:
            case _native.Trouble.mismatch:
                theirs = world.native.peer_call(source, compiled.call)
                return world.fail(
                    MismatchError(
                        f"call {compiled.call} of this world: rank {world.rank} calls {call}, but rank {source} calls {theirs}"
                    )
                )
            case _native.Trouble.left:
                return world.lost(source, "closed its world", doing)
            case _native.Trouble.failed:
                return world.failure(doing)
            case _:
                return world.timed_out(doing, timeout)


class Program:
    """A plan compiled for one rank and one geometry of its tensors."""

    more_lanes = 0  # of the native program, beside those of `LANES`

    def __init__(
        self,
        engine: HostEngine,
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
            raise PlanError(f"the host engine has the lanes {' and '.join(LANES)}; the plan has {', '.join(lanes)}")
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

    def build(self, tensors: Mapping[str, Tensor]) -> None:
        """Turn this rank's lanes into what the engine carries out."""
        engine, plan, rank = self.engine, self.plan, self.world.rank
        self.slots: dict[tuple[int, str], int] = {}
        addresses = [self._address(slot) for slot in self._find_slots()]
        promised = [(engine.index(signal), count) for signal, count in plan.promised(rank).items()]
        self.native = _native.Compiled(self.call, len(LANES) + self.more_lanes, addresses, promised, plan.ranks)
        self.own = [(name, self.slots[rank, name]) for name in tensors if (rank, name) in self.slots]
        self.bound: tuple[tuple[int, int], ...] | None = None
        self.products: list[tuple[Tensor | Region, Tensor | Region, str]] = []
        every = [instruction for lane in self.lanes for instruction in lane]
        outputs = [region for instruction in every for region in writes(instruction) if region.buffer not in self.workspace]
        self.written = 0 if any(isinstance(i, Matmul) for i in every) else sum(map(self._bytes, outputs))
        for lane, instructions in enumerate(self.lanes):
            for instruction in instructions:
                self._compile(lane, instruction)

    def own_lanes(self) -> Mapping[str, Sequence[Instruction]]:
        """The lanes of this rank that the native core interprets."""
        return self.plan.lanes[self.world.rank]

    def begin(self, seconds: float) -> None:
        """Publish the call; its waits may take `seconds`."""
        self.world.native.begin(self.native, seconds)

    def run(
        self,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
        bias: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Execute once, with tensors of the geometry it was compiled for."""
        world, native, compiled = self.world, self.world.native, self.native
        seconds = world.timeout if timeout is None else timeout
        self.bind(self.addresses(tensors))
        if self.engine.pending:
            self.engine.settle()
        try:
            with world.guard:
                self.begin(seconds)
                if self.lanes[1]:
                    native.start(compiled, 1)
                at = native.run(compiled, 0, 0)
                for src, dst, name in self.products:
                    if at < 0:
                        break
                    start = _native.now()
                    x = tensors[src.buffer][src.start : src.stop] if isinstance(src, Region) else src
                    out = tensors[dst.buffer][dst.start : dst.stop] if isinstance(dst, Region) else dst
                    multiply(x, weights[name], out, None if bias is None else bias.get(name))
                    compiled.set_span(0, at, start, _native.now())
                    at = native.run(compiled, 0, at + 1)
                if at < 0:
                    raise self._stopped(0, seconds)
        finally:
            if self.lanes[1]:
                native.join()
        if self.lanes[1] and compiled.stop(1)[0] != _native.Trouble.none:
            raise self._stopped(1, seconds)
        if world.recorder is not None:
            world.recorder.add(self.plan, self._spans())

    def addresses(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
        """Where the caller's tensors lie, by slot."""
        return tuple((slot, tensors[name].data_ptr()) for name, slot in self.own)

    def bind(self, addresses: tuple[tuple[int, int], ...]) -> None:
        """Work on the caller's tensors at these addresses."""
        if self.bound is not addresses:
            for slot, address in addresses:
                self.native.set_slot(slot, address)
            self.bound = addresses

    def execute(self, addresses: tuple[tuple[int, int], ...], timeout: float | None = None) -> None:
        """Execute a program of one lane without products: nothing but one native call."""
        world = self.world
        if self.engine.pending:
            self.engine.settle()
        self.bind(addresses)
        try:
            done = world.native.execute(self.native, timeout or world.timeout)
        except BaseException as error:  # what a signal handler raised; a `with` would cost every call
            world.fail(error)
            raise
        if not done:
            raise self._stopped(0, timeout or world.timeout)
        if world.recorder is not None:
            world.recorder.add(self.plan, self._spans())

    def start(self, addresses: tuple[tuple[int, int], ...], timeout: float | None = None) -> None:
        """Begin what `execute` does, on the native lane."""
        self.bind(addresses)
        self.timeout = timeout or self.world.timeout
        self.begin(self.timeout)
        self.world.native.start(self.native, 0)
        self.engine.pending.append(self)

    def idle(self) -> bool:
        """Whether nothing was started that has not been joined."""
        return self not in self.engine.pending

    def done(self) -> bool:
        """Whether what was started is over."""
        return self not in self.engine.pending or bool(self.world.native.join(self.native, 0.0))

    def join(self, timeout: float = math.inf) -> bool:
        """Wait until what was started is over, and raise what went wrong with it; False if `timeout` seconds pass first."""
        deadline = time.monotonic() + timeout
        while self in self.engine.pending:
            left = deadline - time.monotonic()
            if self.world.native.join(self.native, min(max(left, 0.0), 0.05)):  # now and then Python may handle a signal
                self.engine.pending.remove(self)
                if self.native.stop(0)[0] != _native.Trouble.none:
                    raise self._stopped(0, self.timeout)
                if self.world.recorder is not None:
                    self.world.recorder.add(self.plan, self._spans())
            elif left <= 0:
                return False
        return True

    def _spans(self) -> list[tuple[str, int, int, int]]:
        return [
            (name, index, start, stop)
            for lane, name in enumerate(LANES)
            for index, (start, stop) in enumerate(self.native.spans(lane))
        ]

    def _stopped(self, lane: int, timeout: float) -> WeftError:
        """The error for a wait of this program that ended early; if another lane's end was the reason, for that one's."""
        if self.native.stop(lane)[0] == _native.Trouble.lane:
            lane = self.native.stopped
        _, index, source, expected, actual = self.native.stop(lane)
        doing = self.doing(lane, index, self.native.call, source, expected, actual)
        return self.engine.stopped(self.native, lane, doing, self.call, timeout)

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
            words.append(f"{name}={[*buffer.rows]} rows x {geometry.columns} {str(geometry.dtype).removeprefix('torch.')}{place}")
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

    def _find_slots(self) -> list[tuple[int, str]]:
        for lane in self.lanes:
            for instruction in lane:
                for region in reads(instruction) + writes(instruction):
                    self.slots.setdefault((region.rank, region.buffer), len(self.slots))
        return list(self.slots)

    def _address(self, slot: tuple[int, str]) -> int:
        """Where a rank's buffer begins; the caller's own tensors are filled in by each call."""
        rank, name = slot
        if name in self.workspace:
            return int(self.segments["workspace"].base(rank)) + self.workspace[name]
        place = self.geometry[name].place
        return int(self.segments[name].base(rank)) + place[1] if place else 0

    def _operand(self, region: Region) -> tuple[int, int, int]:
        stride = self.geometry[region.buffer].stride
        return self.slots[region.rank, region.buffer], region.start * stride, stride

    def _whole(self, region: Region) -> int:
        """How many bytes are written before anybody looks at these again: in a workspace only these, as in what products read."""
        return self.written if region.buffer not in self.workspace and self.written else self._bytes(region)

    def _bytes(self, region: Region) -> int:
        geometry = self.geometry[region.buffer]
        return region.rows * geometry.columns * geometry.dtype.itemsize

    def _compile(self, lane: int, instruction: Instruction) -> None:
        native, world, rank = self.native, self.world.native, self.world.rank
        match instruction:
            case Copy(src, dst):
                geometry = self.geometry[src.buffer]
                remote = src.rank != rank or dst.rank != rank
                row = geometry.columns * geometry.dtype.itemsize
                native.copy(lane, self._operand(dst), self._operand(src), src.rows, row, self._whole(dst), remote)
            case Reduce(srcs, dst, op):
                regions = (dst, *srcs)
                dtypes = [getattr(_native.Dtype, str(self.geometry[r.buffer].dtype).removeprefix("torch.")) for r in regions]
                combine, columns = getattr(_native.Combine, op), self.geometry[dst.buffer].columns
                native.reduce(lane, [self._operand(r) for r in regions], dtypes, dst.rows, columns, self._whole(dst), combine)
            case Notify(peer, signal):
                native.notify(lane, world, peer, self.engine.index(signal))
            case Wait(signal, count):
                native.wait(lane, world, rank, self.engine.index(signal), signal.source, count)
            case Matmul(src, dst):
                if lane:
                    raise PlanError(f"products are made on the compute lane; the plan has {instruction} on another")
                native.pause(lane)
                self.products.append((self._rows(src), self._rows(dst), dst.buffer))

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


class Repeat:
    """A call of a program of one lane on certain tensors, to be made again on the same: little more than one native call."""

    def __init__(self, program: Program, addresses: tuple[tuple[int, int], ...], a: Tensor, out: Tensor) -> None:
        self.program, self.addresses, self.world, self.engine = program, addresses, program.world, program.engine
        self.repeat = partial(program.world.native.repeat, program.native, memory.seen(a), memory.seen(out))

    def made(self, a: Tensor, out: Tensor, timeout: float | None) -> bool:
        """Make the call if its tensors are as they were; else, or where there is more to do than the call, do nothing: False."""
        program, world = self.program, self.world
        if self.engine.pending or world.recorder is not None:
            return False
        if program.bound is not self.addresses:
            program.bind(self.addresses)
        seconds = world.timeout if timeout is None else timeout
        try:
            done = self.repeat(a, out, seconds)
        except BaseException as error:  # what a signal handler raised; a `with` would cost every call
            world.fail(error)
            raise
        if done is False:
            raise program._stopped(0, seconds)
        return done is not None


def _geometry(plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], world: World) -> dict[str, Geometry]:
    """The geometry of every buffer that is used; workspaces look like what they exchange rows with."""
    known = {name: Geometry.of(tensor, world) for name, tensor in tensors.items()}
    linked = {
        (a.buffer, b.buffer)
        for lanes in plan.lanes
        for lane in lanes.values()
        for i in lane
        if isinstance(i, Copy | Reduce)
        for a in reads(i)
        for b in writes(i)
    }
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
