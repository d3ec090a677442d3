"""The host engine: ranks are processes of one machine, and every buffer that a peer accesses lies in shared memory.

The compute lane runs on the caller's thread: matrix products from Python, everything between them in one native call each. The
comm lane runs beside it on a native thread. A plan is compiled once per geometry of its tensors; a repeated call only fills in
the addresses of the caller's tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from weft import _native
from weft.checks import name as dtype_name
from weft.engines.engine import LANES, Engine, Program
from weft.engines.matmul import multiply
from weft.engines.weights import Weight
from weft.errors import PlanError, WeftError
from weft.plan import Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Wait, reads, writes


class HostEngine(Engine):
    """Executes plans on the caller's thread and one native thread beside it."""

    remembers = True

    def compile(
        self, plan: Plan, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], call: str | None = None
    ) -> HostProgram:
        return HostProgram(self, plan, tensors, dtypes, call)


class HostProgram(Program):
    """A plan compiled into instructions over addresses, which the native core interprets; products are made between them."""

    engine: HostEngine

    more_lanes = 0  # of the native program, beside those of `LANES`

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
        if self.lanes[1] and compiled.wait_failure(1)[0] != _native.WaitStatus.none:
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
                self.native.set_base(slot, address)
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
                if self.native.wait_failure(0)[0] != _native.WaitStatus.none:
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
        if self.native.wait_failure(lane)[0] == _native.WaitStatus.lane:
            lane = self.native.stopped
        _, index, source, expected, actual = self.native.wait_failure(lane)
        doing = self.doing(lane, index, self.native.call, source, expected, actual)
        return self.engine.stopped(self.native, lane, doing, self.call, timeout)

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
                dtypes = [getattr(_native.Dtype, dtype_name(self.geometry[r.buffer].dtype)) for r in regions]
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
