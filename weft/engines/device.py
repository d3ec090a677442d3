"""The device engine: lanes are streams of a GPU, on which copies, products, sums, notifies and waits are put in order.

The host puts an execution on the streams and goes on; it never waits for the device, so that calls queue up and can be captured in
a CUDA graph. Copies are torch's, which a copy engine carries out beside the products. On a CPU lanes are threads: slower than the
host engine, but the same engine as on a GPU, which is how it is tested where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft import _native
from weft.engines.counters import Awaited, Short, counters
from weft.engines.host import LANES, HostEngine, Program
from weft.engines.lanes import Step, Ticket, lane
from weft.errors import PeerTimeout
from weft.matmul import Weight, multiply, plain
from weft.plan import Copy, Instruction, Matmul, Notify, Plan, Reduce, Region, Wait, accesses
from weft.world import World

Tensors = Mapping[str, Tensor]
Span = Callable[[], tuple[str, int, int, int]]
"""Tells, when all is over, the lane, the index of an instruction, and when it began and ended."""


class DeviceEngine(HostEngine):
    """Executes plans for one rank of a world on the lanes of its device."""

    remembers = False  # tensors are not known by address alone

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.lanes = {name: lane(world.device, f"{name} of rank {world.rank}") for name in LANES}
        self.counters = counters(world, _native.World.max_names * world.ranks)
        self.last: DeviceProgram | None = None

    def compile(self, plan: Plan, tensors: Tensors, dtypes: Mapping[str, torch.dtype]) -> DeviceProgram:
        return DeviceProgram(self, plan, tensors, dtypes)

    def check(self) -> None:
        """Raise what a stream could not: that peers called something else than this rank's last call, or a wait was too long."""
        last, world = self.last, self.world
        for peer in range(world.ranks) if last is not None else ():
            if last is not None and world.native.mismatch(last.native, peer):
                raise self.ended(_native.Trouble.mismatch, peer, last.native, "", last.call, world.timeout)
        try:
            self.counters.check()
        except PeerTimeout as error:
            raise world.fail(error) from None


class DeviceProgram(Program):
    """A plan for one rank and one geometry of its tensors, put on lanes instruction by instruction."""

    engine: DeviceEngine

    def build(self, tensors: Tensors) -> None:
        rank, engine = self.world.rank, self.engine
        self.native = _native.Compiled(self.call, len(LANES), [], [], self.plan.ranks)
        self.promised = {engine.index(signal): count for signal, count in self.plan.promised(rank).items()}
        self.fixed = {region: self._rows(region) for instructions in self.lanes for i in instructions for region in accesses(i)}
        self.ticket: Ticket | None = None

    def run(
        self, tensors: Tensors, weights: Mapping[str, Weight], bias: Tensors | None = None, timeout: float | None = None
    ) -> None:
        """Put one execution on the lanes; the caller's stream goes on after it (on a CPU, it is over when this returns)."""
        engine, world = self.engine, self.world
        engine.settle()
        seconds, spans = self._begin(timeout)
        with world.guard:
            tickets = []
            for name in ("comm", "compute"):  # transfers first: they are soon put on their stream, and go on beside the rest
                if self.lanes[LANES.index(name)]:
                    engine.lanes[name].begin()
                    tickets.append(engine.lanes[name].start(self._steps(name, tensors, weights, bias or {}, seconds, spans)))
            self._join(tickets)
            engine.counters.advance(self.promised)
        if world.recorder is not None:
            world.recorder.add(self.plan, [span() for span in spans])

    def _join(self, tickets: list[Ticket]) -> None:
        """Go on after all of them; of several errors the first is raised, but no lane is left at work."""
        errors: list[BaseException] = []
        for ticket in tickets:
            try:
                ticket.join()
            except BaseException as error:
                self.world.fail(error)
                errors.append(error)
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerTimeout)), errors[0])

    def addresses(self, tensors: Tensors) -> Any:
        """What `execute` and `start` take."""
        return tensors

    def execute(self, addresses: Any, timeout: float | None = None) -> None:
        self.run(addresses, {}, timeout=timeout)

    def start(self, addresses: Any, timeout: float | None = None) -> None:
        """Begin what `execute` does, in the background: behind what was started before, on the lane for transfers."""
        seconds, spans = self._begin(timeout)
        background = self.engine.lanes["comm"]
        background.begin()
        steps = self._steps("compute", addresses, {}, {}, seconds, spans)
        self.ticket = background.start([*steps, lambda: self.engine.counters.advance(self.promised)])
        self.spans = spans
        self.engine.pending.append(self)

    def done(self) -> bool:
        return self.idle() or (self.ticket is not None and self.ticket.done())

    def join(self, timeout: float = math.inf) -> bool:
        if self.idle():
            return True
        assert self.ticket is not None
        try:
            if not self.ticket.join(timeout):
                return False
        except BaseException as error:
            self.engine.pending.remove(self)
            raise self.world.fail(error) from None
        self.engine.pending.remove(self)
        if self.world.recorder is not None:
            self.world.recorder.add(self.plan, [span() for span in self.spans])
        return True

    def _begin(self, timeout: float | None) -> tuple[float, list[Span]]:
        """Tell peers what is called; the seconds that waits may take, and where spans are put."""
        seconds = self.world.timeout if timeout is None else timeout
        self.engine.check()
        self.engine.last = self
        self.world.native.begin(self.native, seconds)
        return seconds, []

    def _steps(
        self,
        name: str,
        tensors: Tensors,
        weights: Mapping[str, Weight],
        bias: Tensors,
        timeout: float,
        spans: list[Span],
    ) -> list[Step]:
        """What the instructions of a lane come to with these tensors."""
        lane = self.lanes[LANES.index(name)]
        steps = [self._step(name, at, i, tensors, weights, bias, timeout) for at, i in enumerate(lane)]
        if self.world.recorder is None:
            return steps
        return [_timed(step, name, at, spans, self.world.device) for at, step in enumerate(steps)]

    def _step(
        self,
        name: str,
        at: int,
        instruction: Instruction,
        tensors: Tensors,
        weights: Mapping[str, Weight],
        bias: Tensors,
        timeout: float,
    ) -> Step:
        """What one instruction comes to."""
        engine, call = self.engine, self.native.call

        def rows(region: Region) -> Tensor:
            fixed = self.fixed[region]
            return fixed if isinstance(fixed, Tensor) else tensors[region.buffer][region.start : region.stop]

        match instruction:
            case Copy(src, dst):
                there, here = rows(dst), rows(src)
                return lambda: _done(there.copy_(here, non_blocking=True))
            case Matmul(src, dst):
                x, weight, out, addend = rows(src), weights[dst.buffer], rows(dst), bias.get(dst.buffer)
                return lambda: _multiply(x, weight, out, addend)
            case Reduce(srcs, dst, op):
                parts, total = [rows(src) for src in srcs], rows(dst)
                return lambda: _reduce(parts, total, op, self.plan.ranks)
            case Notify(peer, signal):
                raised = engine.index(signal)
                return lambda: engine.counters.notify(peer, raised)
            case Wait(signal, count):
                awaited = Awaited(engine.index(signal), signal.source, count)

                def hold() -> None:
                    try:
                        engine.counters.wait(awaited, self.native, timeout)
                    except Short as short:
                        lane = LANES.index(name)
                        doing = self.doing(lane, at, call, signal.source, short.expected, short.actual)
                        raise engine.ended(short.trouble, signal.source, self.native, doing, self.call, timeout) from None

                return hold


def _done(_: object) -> None:
    pass


def _timed(step: Step, name: str, at: int, spans: list[Span], device: torch.device) -> Step:
    """The step, noting when it begins and ends on its lane; the times of a stream are read when all is over."""

    def on_thread() -> None:
        start = _native.now()
        step()
        stop = _native.now()
        spans.append(lambda: (name, at, start, stop))

    def on_stream() -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        step()
        after.record()
        spans.append(lambda: (name, at, _clock(before), _clock(after)))

    return on_stream if device.type == "cuda" else on_thread


def _clock(event: torch.cuda.Event) -> int:
    """When an event happened, in nanoseconds of the host's clock; waits for the device, as only recordings do."""
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    return int(_native.now() - event.elapsed_time(now) * 1e6)


def _multiply(x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None) -> None:
    """``out = x @ weight (+ bias)``; on a GPU by torch's product, on a CPU by the fastest there is."""
    if not x.is_cuda or 0 in x.shape or 0 in weight.shape:
        multiply(x, weight, out, bias)
        return
    if out.dtype == x.dtype:
        torch.mm(x, plain(weight), out=out)
    else:
        torch.mm(x, plain(weight), out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)


def _reduce(parts: list[Tensor], total: Tensor, op: str, ranks: int) -> None:
    """Combine `parts` in their order: sums in float32 (float64 in float64, integers exactly), rounded once."""
    if op in ("max", "min"):
        best = parts[0]
        for part in parts[1:]:
            best = torch.maximum(best, part) if op == "max" else torch.minimum(best, part)
        total.copy_(best)
        return
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.int64
    summed = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        summed.add_(part)
    total.copy_(summed.div_(ranks) if op == "avg" else summed)
