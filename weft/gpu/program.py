"""A plan compiled for one rank of a device engine: steps put on lanes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import weft._native as _native
from weft.engines.program import Dtypes, Tensors, Weights
from weft.engines.ranges import in_range
from weft.errors import PeerTimeout, WeftError
from weft.gpu.counters import DeviceCounters, WaitFailed
from weft.gpu.fixed import FixedProgram
from weft.gpu.lanes import Completion, LaneOperands, Step
from weft.gpu.loading import Loading
from weft.gpu.options import programs
from weft.gpu.spans import Span, timed
from weft.plan import Compute, Copy, Notify, Plan, Reduce, Region, Wait, accesses
from weft.schedules.device_options import DeviceOptions

if TYPE_CHECKING:
    from weft.gpu.engine import DeviceEngine
    from weft.gpu.gathers import GatherLaunch
    from weft.gpu.kernel_trace import KernelTrace
    from weft.gpu.kernels.sum_in_rank_order import SumKernel
    from weft.gpu.products import ProductLaunch


class DeviceProgram(FixedProgram):
    """A plan compiled for one rank and one geometry of its tensors; a step of a lane is an
    instruction, or a run of products.
    """

    engine: DeviceEngine

    def __init__(
        self,
        engine: DeviceEngine,
        plan: Plan,
        tensors: Tensors,
        rows: Sequence[int],
        dtypes: Dtypes,
        options: DeviceOptions,
    ) -> None:
        self.options = options
        self.programs = programs(engine.world, options)
        super().__init__(engine, plan, tensors, rows, dtypes)
        self.compiled = _native.Compiled(self.call, len(self.lanes), [], self.plan.ranks)
        self.promised = {
            engine.index(signal): count
            for signal, count in self.plan.promised(self.world.rank).items()
        }
        self.rows = {
            region: self._rows(region)
            for instructions in self.lanes
            for i in instructions
            for region in accesses(i)
        }
        self.completion: Completion | None = None
        # by the part of the compute lane that they execute
        self.launches: dict[range, list[ProductLaunch | GatherLaunch]] = {}
        self.sums: dict[tuple[Region, ...], SumKernel] = {}
        engine.counters.prepare(self.promised)
        if engine.kernels:
            self._use_kernels()
        if self.plan.launch is not None:
            from weft.gpu.gathers import GatherLaunch, fan_outs

            for found in fan_outs(self.lanes[0], self.world.rank, self.world.ranks):
                self.launches[found.part] = [GatherLaunch(found, self, self.plan.launch)]
        launched = {at for part in self.launches for at in part}
        self.parts = {  # the instructions of each step of a lane
            name: [range(at, at + 1) for at in range(len(lane))]
            for name, lane in zip(self.lane_names, self.lanes, strict=True)
        }
        single = [part for part in self.parts["compute"] if part.start not in launched]
        self.parts["compute"] = sorted([*self.launches, *single], key=lambda part: part.start)
        self.loading = Loading(self)

    def _use_kernels(self) -> None:
        """Use kernels for products, and for sums of rows with fixed addresses."""
        from weft.gpu.kernels.sum_in_rank_order import SumKernel
        from weft.gpu.kernels.tiles import launches, runs
        from weft.gpu.products import ProductLaunch

        lane = self.lanes[0]
        index = self.engine.index
        counters, options = self.engine.counters, self.options
        assert isinstance(counters, DeviceCounters)
        if all(
            self.geometry[r.buffer].columns
            for i in lane
            if isinstance(i, Compute)
            for r in accesses(i)
        ):
            for start, stop in runs(lane):
                self.launches[range(start, stop)] = [
                    ProductLaunch(
                        part,
                        self.full_buffer,
                        self.geometry,
                        index,
                        counters,
                        self.programs,
                        options.tile,
                        options.own_tile,
                    )
                    for part in launches(lane[start:stop])
                ]
        for i in lane:
            if isinstance(i, Reduce) and i.op in ("sum", "avg"):
                parts = [part for src in i.srcs if isinstance(part := self.rows[src], Tensor)]
                if len(parts) == len(i.srcs) and SumKernel.fits(
                    parts, self.geometry[i.dst.buffer].dtype
                ):
                    self.sums[i.srcs] = SumKernel(parts, i.op == "avg", self.programs)

    def full_buffer(self, rank: int, buffer: str) -> Tensor | str:
        """A rank's buffer, or its name if it is this rank's own input or output. A workspace has
        the largest rank's number of rows on every rank.
        """
        rows = self.plan.buffers[buffer].rows
        found = self._rows(
            Region(rank, buffer, 0, max(rows) if buffer in self.workspace else rows[rank])
        )
        return found if isinstance(found, Tensor) else buffer

    def run_locked(
        self,
        tensors: Tensors,
        rows: Sequence[int],
        weights: Weights,
        bias: Tensors | None = None,
        timeout: float | None = None,
    ) -> None:
        """Put one execution on the lanes, and make the caller's stream wait for it; on a CPU, wait
        for it.
        """
        engine, world = self.engine, self.world
        engine.drain()
        engine.begin()
        seconds = world.timeout if timeout is None else timeout
        operands = LaneOperands(tensors, weights, bias or {}, seconds)
        spans = list[Span]()
        traces = self._kernel_traces() if world.recorder else {}
        launched = self._launched(operands, traces)
        lanes = {name: name for name in self.lane_names}
        self.loading.prepare(operands, {**self.launches, **traces}, lanes)
        self._begin(seconds)
        with world.failure.fail_on_error, in_range(self.plan.operator):
            completions = []
            # Transfers first: to enqueue them is fast, and they then overlap with the compute lane.
            for name in (*self.lane_names[1:], "compute"):
                if self.parts[name]:
                    steps = self._steps(name, operands, spans, launched, traces)
                    completions.append(engine.lane(name).start(partial(self._guarded, steps)))
            self._join(completions)
            engine.counters.advance(self.promised)
        world.executor.end(self.compiled)
        # Only then: a peer that is lost by now, but was not waited for, did its part.
        if world.device.type == "cpu" and engine.timed_out():
            engine.check()
        self._record(spans)

    def _kernel_traces(self) -> Mapping[range, Sequence[KernelTrace]]:
        """The launches of product kernels, to be traced, by the part of the lane they execute: none
        if ranks share a GPU, since they load kernels together, but may record alone.
        """
        if self.world.device.type == "cuda" and self.world.backend.ranks_per_device > 1:
            return {}
        from weft.gpu.kernel_trace import KernelTrace
        from weft.gpu.products import ProductLaunch

        found = {
            part: [
                KernelTrace(launch, self.lanes[0], self.world.device)
                for launch in launches
                if isinstance(launch, ProductLaunch)
            ]
            for part, launches in self.launches.items()
        }
        return {part: traces for part, traces in found.items() if traces}

    def _launched(
        self,
        operands: LaneOperands,
        traces: Mapping[range, Sequence[KernelTrace]] = MappingProxyType({}),
    ) -> dict[range, Step]:
        """Steps for the parts that kernels execute, by `traces` if there are any. Operands are
        checked before rows are sent.
        """
        every = {**self.launches, **traces}
        return {
            part: partial(_all, [launch.step(operands) for launch in launches])
            for part, launches in every.items()
        }

    def _join(self, completions: list[Completion]) -> None:
        """Wait for all lanes; then raise an error, if there are several one that this rank caused
        itself.
        """
        errors: list[BaseException] = []
        for completion in completions:
            try:
                completion.join()
            except BaseException as error:
                self.world.failure.fail(error)
                errors.append(error)
        if errors:
            raise min(
                errors,
                key=lambda error: (isinstance(error, WeftError), isinstance(error, PeerTimeout)),
            )

    def bind(self, tensors: Tensors, rows: Sequence[int], description: str = "") -> Any:
        """The tensors themselves, which `execute` and `start` take."""
        return tensors

    def execute(self, binding: Any, timeout: float | None = None) -> None:
        self.run_locked(binding, (), {}, timeout=timeout)

    def start(self, binding: Any, retained: object = None, timeout: float | None = None) -> None:
        """Begin `execute` in the background, on the lane for transfers and after the earlier calls
        there.
        """
        self.engine.begin()
        operands = LaneOperands(binding, {}, {}, self.world.timeout if timeout is None else timeout)
        self.spans: list[Span] = []
        launched = self._launched(operands)
        self.loading.prepare(operands, self.launches, {"compute": "comm"})
        self._begin(operands.timeout)
        steps = self._steps("compute", operands, self.spans, launched)
        steps.append(lambda: self.engine.counters.advance(self.promised))
        with in_range(f"{self.plan.operator}_async"):
            self.completion = self.engine.lane("comm").start(partial(self._guarded, steps))
        # The caller's stream, which may be far ahead, would otherwise reuse their memory.
        self.retained = binding, retained
        self.engine.pending.append(self)

    def done(self) -> bool:
        return self.idle() or (self.completion is not None and self.completion.done())

    def join(self, timeout: float = math.inf) -> bool:
        if self.idle():
            return True
        assert self.completion is not None
        try:
            with in_range("wait"):
                if not self.completion.join(timeout):
                    return False
        except BaseException as error:
            self.engine.pending.remove(self)
            self.failure = self.world.failure.fail(error)
            raise self.failure from None
        self.engine.pending.remove(self)
        self.retained = None
        self.world.executor.end(self.compiled)
        self._record(self.spans)
        return True

    def stop(self, timeout: float) -> None:
        """Wait for the started execution; its waits end by themselves, as the world is closed."""
        if self.completion is not None:
            with contextlib.suppress(WeftError):
                self.completion.join(timeout)

    def _begin(self, seconds: float) -> None:
        """Publish the call to peers."""
        self.engine.check()
        self.engine.last = self
        self.world.executor.begin(self.compiled, seconds)

    def _record(self, spans: Sequence[Span]) -> None:
        if self.world.recorder is not None:
            self.world.recorder.add(self.plan, (), [each for span in spans for each in span()])

    def _steps(
        self,
        name: str,
        operands: LaneOperands,
        spans: list[Span],
        launched: Mapping[range, Step],
        traces: Mapping[range, Sequence[KernelTrace]] = MappingProxyType({}),
    ) -> list[Step]:
        """Steps for the parts of a lane with these operands; `launched` has those of weft's
        kernels, which the compute lane launches.
        """
        lane = self.lane_names.index(name)
        parts = self.parts[name]
        own, traced = (launched, traces) if name == "compute" else ({}, {})
        steps = [
            own[part] if part in own else self._step(lane, part.start, operands) for part in parts
        ]
        if self.world.recorder is None:
            return steps
        return [
            timed(step, name, part, spans, self.world.device, traced.get(part, ()))
            for part, step in zip(parts, steps, strict=True)
        ]

    def _guarded(self, steps: Sequence[Step]) -> None:
        """Run steps; an error of one ends the waits of this rank's other lanes, and of its peers,
        at once.
        """
        with self.world.failure.fail_on_error:
            _all(steps)

    def find(self, region: Region, tensors: Tensors) -> Tensor:
        """The rows of a region."""
        rows = self.rows[region]
        if isinstance(rows, Tensor):
            return rows
        return tensors[region.buffer][region.start : region.stop]

    def _step(self, lane: int, at: int, operands: LaneOperands) -> Step:
        """The step for instruction number `at` of a lane."""
        engine, call = self.engine, self.compiled.call
        match self.lanes[lane][at]:
            case Notify(peer, signal):
                return partial(engine.counters.notify, peer, engine.index(signal))
            case Wait(signal, count):
                index = engine.index(signal)

                def wait() -> None:
                    try:
                        engine.counters.wait(
                            index, signal.source, count, self.compiled, operands.timeout
                        )
                    except WaitFailed as failed:
                        purpose = self.describe_wait(
                            lane, at, call, signal.source, failed.expected, failed.actual
                        )
                        raise engine.wait_error(
                            failed.status, signal.source, self.compiled, purpose, operands.timeout
                        ) from None

                return wait
            case moved:
                return self.step(moved, operands)

    def step(
        self,
        instruction: Copy | Compute | Reduce,
        operands: LaneOperands,
        into: Callable[[Tensor], Tensor] = lambda result: result,
    ) -> Step:
        """The step for an instruction that writes rows: to those `into` which it is led."""
        rows = partial(self.find, tensors=operands.tensors)
        match instruction:
            case Copy(src, dst) if self.options.comm_sms and src.rank != dst.rank:
                from weft.gpu.kernels.copy_rows import RowsInMemory, copy_rows

                to, source = into(rows(dst)), rows(src)
                size = source.shape[1] * source.itemsize
                steps = (t.stride(0) * t.itemsize for t in (to, source))
                return partial(
                    copy_rows,
                    to,
                    source,
                    RowsInMemory(len(source), size, *steps),
                    self.options.comm_sms,
                )
            case Copy(src, dst):
                return partial(into(rows(dst)).copy_, rows(src), non_blocking=True)
            case Compute(kernel, srcs, dst, name):
                weight = operands.weights[name] if name else None
                bias = operands.bias.get(name) if name else None
                sources = [rows(src) for src in srcs]
                out = into(rows(dst))
                on_gpu = self.world.device.type == "cuda"
                run = kernel.device() if on_gpu else kernel.prepare(sources, weight, out, len(out))
                return partial(run, *sources, weight, out, bias)
            case Reduce(srcs, dst, op):
                parts = [rows(src) for src in srcs]
                total = into(rows(dst))
                if srcs in self.sums and total.is_contiguous():
                    return partial(self.sums[srcs], total)
                return partial(_reduce, parts, total, op, self.plan.ranks)


def _all(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


def _reduce(parts: list[Tensor], total: Tensor, op: str, ranks: int) -> None:
    """Combine `parts` in their order: sums in float32 (float64 in float64, integers exactly),
    rounded once.
    """
    if op in ("max", "min"):
        total.copy_(reduce(torch.maximum if op == "max" else torch.minimum, parts))
        return
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64
    summed = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        summed.add_(part)
    total.copy_(summed.div_(ranks) if op == "avg" else summed)
