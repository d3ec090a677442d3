"""The host engine: ranks are processes of one machine, and every buffer that a peer accesses is in
shared memory.

The compute lane runs on the caller's thread: computations from Python, the instructions between
two of them in one native call. The comm lane runs concurrently on a native thread. A plan is
compiled once per combination of dtypes; each call binds the sizes and addresses of its blocks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name as dtype_name
from weft.engines.computes import Computation, Computes, Operand, rows_of
from weft.engines.engine import Engine
from weft.engines.program import (
    Dtypes,
    Program,
    Tensors,
    Timed,
    Weights,
    exchanges,
    kinds,
    moves,
)
from weft.errors import PlanError, WeftError
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
)
from weft.plan.language import LANES
from weft.world import memory

Place = tuple[int, int, int]
"""A slot of a program, and the blocks there at which a region begins and ends."""


class HostEngine(Engine):
    """Executes plans on the caller's thread and one native thread."""

    caches_calls = True

    def kind(self, tensors: Tensors, rows: Sequence[int]) -> Hashable:
        return *tensors, *[tensor.dtype for tensor in tensors.values()]

    def compile(
        self,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: Any,
    ) -> HostProgram:
        return HostProgram(self, plan, tensors, dtypes)

    def release(self) -> None:
        executor = self.world.executor
        try:
            executor.enter()
        except WeftError:  # a call of another thread, or one that a signal handler has interrupted
            return
        try:
            if all(program.done() for program in self.pending):
                self.calls.clear()
                self.programs.clear()
                self.counts.clear()
                self.parts.clear()
                self.workspace = self.segment = None
        finally:
            executor.leave()


class HostProgram(Program):
    """A plan compiled into instructions over blocks, which the native core interprets; it pauses
    at computations, which Python runs.
    """

    engine: HostEngine

    more_lanes = 0  # lanes of the native program in addition to `LANES`

    def __init__(
        self,
        engine: HostEngine,
        plan: Plan,
        tensors: Tensors,
        dtypes: Dtypes,
        common: Plan | None = None,
    ) -> None:
        common = common or plan.common([engine.world.rank])
        super().__init__(engine, plan, common)
        plan, rank = self.plan, self.world.rank
        self.check_tensors(tensors)
        every = moves(common)
        found = kinds(every, {name: tensor.dtype for name, tensor in tensors.items()}, dtypes)
        # in the same order on all ranks
        self.kinds = {name: found[name] for name in plan.buffers if name in found}
        self.exchanges = exchanges(every)
        self.slots: dict[tuple[int, str], int] = {}
        for region in self.regions():
            self.slots.setdefault((region.rank, region.buffer), len(self.slots))
        promised = [(engine.index(signal), count) for signal, count in plan.promised(rank).items()]
        self.compiled = _native.Compiled("", len(LANES) + self.more_lanes, promised, plan.ranks)
        self.compiled.describe(
            plan.operator, f"algorithm={plan.algorithm}, plan {plan.digest:08x})"
        )
        self._lay_out()
        self.bound: _native.Binding | None = None
        # of `_own_binding`, with the workspace that it refers to
        self.own: tuple[_native.Binding, Computes] | None = None
        self.segment: memory.Segment | None = None
        self.computations: dict[int, Computation] = {}  # by index in the compute lane
        self.computing = any(isinstance(i, Compute) for lane in self.lanes for i in lane)
        self.regions_read = {
            region for lane in self.lanes for instruction in lane for region in reads(instruction)
        }
        for lane, instructions in enumerate(self.lanes):
            for at, instruction in enumerate(instructions):
                self._compile(lane, at, instruction)

    def regions(self) -> list[Region]:
        """All regions that this rank's lanes access."""
        return [
            region
            for lane in self.lanes
            for instruction in lane
            for region in accesses(instruction)
        ]

    def begin(self, seconds: float) -> None:
        """Publish the call; its waits may take `seconds`."""
        self.world.executor.begin(self.compiled, seconds)

    def run_locked(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        if self.engine.pending:
            self.engine.drain()
        binding, computes = self._own_binding(tensors, rows)
        biases = {name: bias.get(name) if bias else None for name in weights}
        self.execute(binding, timeout, lambda at: computes.run(at, tensors, weights, biases))

    def bind(self, tensors: Tensors, rows: Sequence[int], description: str = "") -> _native.Binding:
        """The blocks' sizes and addresses for these tensors; enlarges the workspace if it is too
        small, collectively.
        """
        shared = {name: self._parts(tensors[name]) for name in self.shared if name in tensors}
        bound = tensors if isinstance(tensors, dict) else dict(tensors)
        binding = _native.Binding(self.compiled, rows, bound, shared, description)
        if size := binding.workspace:
            binding.place(_native.Role.workspace, self.engine.reserve(size, binding.call).bases(0))
        if binding.eager:
            binding.place(_native.Role.eager, self.world.executor.eager_bases())
        return binding

    def _own_binding(
        self, tensors: Tensors, rows: Sequence[int]
    ) -> tuple[_native.Binding, Computes]:
        """A binding that no cached call shares, with its computations: the previous call's, if
        tensors and sizes have the same layouts.
        """
        bound = tensors if isinstance(tensors, dict) else dict(tensors)
        if (
            self.own is None
            or self.segment is not self.engine.segment
            or not self.shared.isdisjoint(bound)
            or not self.own[0].again(rows, bound)
        ):
            binding = self.bind(bound, rows)
            names = {name: name for name in (*bound, *self.weights)}
            computes = self.computes_of(binding, bound, names, names)
            self.own, self.segment = (binding, computes), self.engine.segment
        return self.own

    def apply(self, binding: _native.Binding) -> None:
        """Use these sizes and addresses from now on."""
        if self.bound is not binding:
            self.compiled.bind(binding)
            self.bound = binding

    def execute(
        self,
        binding: _native.Binding,
        timeout: float | None = None,
        compute: Callable[[int], None] | None = None,
    ) -> None:
        if self.engine.pending:
            self.engine.drain()
        self.world.executor.execute(self, binding, timeout or self.world.timeout, compute)
        self._record()

    def start(
        self, binding: _native.Binding, retained: object = None, timeout: float | None = None
    ) -> None:
        self.timeout = timeout or self.world.timeout
        with self.world.failure.fail_on_error:
            self.apply(binding)
            self.begin(self.timeout)
            self.world.executor.start(
                self.compiled, 0, (self.compiled, binding, retained, self.engine.workspace)
            )
            self.engine.pending.append(self)

    def done(self) -> bool:
        return self not in self.engine.pending or self.ended(0.0)

    def join(self, timeout: float = math.inf) -> bool:
        deadline = time.monotonic() + timeout
        self.world.failure.check_process()
        while self in self.engine.pending:
            left = deadline - time.monotonic()
            # in short waits, so that Python can handle a signal between them
            if self.ended(min(max(left, 0.0), 0.05)):
                self.engine.pending.remove(self)
                if self.compiled.wait_failure(0)[0] != _native.WaitStatus.none:
                    self.failure = self.stopped(0, self.timeout)
                    raise self.failure
                self._record()
            elif left <= 0:
                return False
        return True

    def stop(self, timeout: float) -> None:
        self.world.executor.stop(self.compiled)
        self.ended(timeout)

    def ended(self, seconds: float) -> bool:
        """Whether the started execution ends within this time."""
        return bool(self.world.executor.join(self.compiled, seconds))

    def rows_of(self, region: Region) -> tuple[int, int]:
        assert self.bound is not None
        first, rows, *_ = self.bound.matrix(self.place(region))
        return first, first + rows

    def _spans(self) -> list[Timed]:
        return [
            (name, index, start, stop)
            for lane, name in enumerate(LANES)
            for index, (start, stop) in enumerate(self.compiled.spans(lane))
        ]

    def stopped(self, lane: int, timeout: float) -> WeftError:
        """The error for a failed wait of a lane; if it failed because another lane did, the error
        for that lane.
        """
        if self.compiled.wait_failure(lane)[0] == _native.WaitStatus.lane:
            lane = self.compiled.stopped
        status, index, source, expected, actual = self.compiled.wait_failure(lane)
        purpose = self.describe_wait(lane, index, self.compiled.call, source, expected, actual)
        if status == _native.WaitStatus.unreadable:
            why = (
                f"{os.strerror(actual)}; with WEFT_READ_PEERS=0 large tensors are staged in shared "
                "memory instead"
            )
            return self.world.failure.fail(
                WeftError(f"rank {self.world.rank} cannot read the rows of a peer {purpose}: {why}")
            )
        return self.engine.wait_error(status, source, self.compiled, purpose, timeout)

    def _record(self) -> None:
        if self.world.recorder is not None:
            assert self.bound is not None
            self.world.recorder.add(self.plan, self.bound.rows, self._spans())

    def _lay_out(self) -> None:
        """Pass the blocks of the buffers to the native core."""
        plan, layouts = self.plan, dict[tuple[int, ...], int]()
        numbers = {name: number for number, name in enumerate(self.kinds)}

        def layout(blocks: Sequence[int]) -> int:
            return layouts.setdefault(tuple(blocks), len(layouts))

        shards = sum(plan.pieces)
        if any(
            max(buffer.numbers(r), default=-1) >= shards
            for r in range(plan.ranks)
            for buffer in plan.buffers.values()
        ):
            raise PlanError(
                f"{plan.operator}: a buffer has blocks of shards that the plan does not have, "
                f"{shards} block(s) in all"
            )
        buffers = []
        for name, (dtype, like) in self.kinds.items():
            buffer = plan.buffers[name]
            by_rank = [layout(buffer.numbers(r)) for r in range(plan.ranks)]
            kind, role = (dtype_name(dtype), dtype.itemsize), getattr(_native.Role, buffer.role)
            buffers.append(
                (
                    name,
                    *kind,
                    role,
                    numbers[like],
                    name in self.agreed,
                    name in self.shared,
                    by_rank,
                )
            )
        slots = [(rank, numbers[name]) for rank, name in self.slots]
        pairs = [(numbers[one], numbers[other]) for one, other in self.exchanges]
        self.compiled.lay_out(
            self.world.rank, plan.pieces, plan.rows_multiple, list(layouts), buffers, slots, pairs
        )

    def _parts(self, tensor: Tensor) -> tuple[list[int], str]:
        """The addresses of all ranks' parts of a tensor and a text that names them; no addresses
        if it is not symmetric.
        """
        segment = memory.find(tensor)
        if segment is None or segment.world != self.world.number:
            return [], " read through the kernel" if self.world.reads_memory else ""
        offset = memory.offset(tensor, segment, self.world.rank)
        return segment.bases(offset), f" in symmetric segment {segment.number} at byte {offset}"

    def place(self, region: Region) -> Place:
        """A region in the form that the native core takes."""
        return self.slots[region.rank, region.buffer], region.start, region.stop

    def computes_of(
        self,
        binding: _native.Binding,
        tensors: Tensors,
        keys: Mapping[str, Any],
        weights: Mapping[str, Any],
        reshaped: frozenset[str] = frozenset(),
        biased: bool = True,
    ) -> Computes:
        """The computations of a binding of `tensors`, for calls that pass a buffer's tensor under
        its key in `keys`; a buffer in `reshaped` may be passed with another shape.
        """

        def operand(region: Region, like: Region) -> Operand:
            name, own = region.buffer, region.rank == self.world.rank
            rows = binding.matrix(self.place(like))[1]
            if not (own and self.plan.buffers[name].given):
                matrix = self._matrix(binding, region, rows, tensors)
                return lambda _: matrix
            start = binding.matrix(self.place(region))[0]
            part = slice(start, start + rows)
            return rows_of(keys[name], part, tensors[name], name in reshaped)

        return Computes(self.computations, sum(binding.rows), operand, weights, biased)

    def _matrix(
        self, binding: _native.Binding, region: Region, rows: int, tensors: Tensors
    ) -> Tensor:
        """The matrix of the first rows of a region in the workspace, or in a peer's part of a
        symmetric tensor.
        """
        if torch.is_inference_mode_enabled():  # later calls may be outside of it
            with torch.inference_mode(False):
                return self._matrix(binding, region, rows, tensors)
        _, _, columns, _, stride, address = binding.matrix(self.place(region))
        dtype, _ = self.kinds[region.buffer]
        bound = self.plan.buffers[region.buffer].given
        segment = memory.find(tensors[region.buffer]) if bound else self.engine.segment
        if not rows * columns:
            return torch.empty(rows, columns, dtype=dtype, device="cpu")
        if segment is None:
            raise ValueError(
                f"peers access {region.buffer!r} in this plan, so it must be symmetric: make it "
                "with world.empty(...)"
            )
        if bound:
            part = memory.numbers(segment, region.rank, dtype)
        else:
            part = self.engine.workspace_part(region.rank, dtype)
        return memory.matrix(part, (rows, columns, stride, address))

    def _counts_as_output(self, region: Region) -> bool:
        """Whether the size of all outputs together, not of this region alone, decides if a write
        bypasses the caches: no instruction reads an output before all outputs are written, unless
        the plan has computations.
        """
        return not self.computing and self.plan.buffers[region.buffer].given

    def _compile(self, lane: int, at: int, instruction: Instruction) -> None:
        compiled, executor, rank = self.compiled, self.world.executor, self.world.rank
        match instruction:
            case Copy(src, dst):
                remote = src.rank != rank or dst.rank != rank
                sizing = (dst, src).index(self.plan.sizing_region(instruction))
                compiled.copy(
                    lane,
                    self.place(dst),
                    self.place(src),
                    sizing,
                    self._counts_as_output(dst),
                    remote,
                    dst in self.regions_read,
                )
            case Reduce(srcs, dst, op):
                regions = (dst, *srcs)
                dtypes = [
                    getattr(_native.Dtype, dtype_name(self.kinds[r.buffer][0])) for r in regions
                ]
                places = [self.place(r) for r in regions]
                sizing = regions.index(self.plan.sizing_region(instruction))
                combine = getattr(_native.Combine, op)
                compiled.reduce(
                    lane,
                    places,
                    sizing,
                    self._counts_as_output(dst),
                    dtypes,
                    combine,
                    dst in self.regions_read,
                )
            case Notify(peer, signal):
                compiled.notify(lane, executor, peer, self.engine.index(signal))
            case Wait(signal, count):
                compiled.wait(lane, executor, rank, self.engine.index(signal), signal.source, count)
            case Compute(_, srcs, dst):
                roles = {self.plan.buffers[region.buffer].role for region in (*srcs, dst)}
                if lane or "eager" in roles:
                    raise PlanError(
                        "kernels must be in the compute lane and must not use eager buffers; the "
                        f"plan has {instruction}"
                    )
                like = self.plan.sizing_region(instruction)
                compiled.multiply(lane, [self.place(like), *map(self.place, srcs)])
                self.computations[at] = Computation(instruction, like)
