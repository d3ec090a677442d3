"""The benchmark of a fused operator: its parts alone, one after the other, and overlapped, on the
same data in one run.

What is particular to an operator is its `Subject`; measuring, verifying and tracing are the same
for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

import weft
from weft.bench.baselines import GLOO
from weft.bench.harness import link_of, poison, progress, verified, where, worst
from weft.bench.settings import FusedSettings
from weft.engines import engine
from weft.engines.recording import record
from weft.kernels.products import multiply
from weft.kernels.weights import pack
from weft.measure.timing import Statistics, Stopwatch, session
from weft.measure.verification import Check, Problem
from weft.ops import fused
from weft.ops.autotune import select
from weft.ops.call import Given, Options, Selection
from weft.ops.operator import find
from weft.plan import Copy, Plan
from weft.plan.binding import bind, split
from weft.plan.trace import Trace
from weft.predict.figures import VIEWS
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Workload
from weft.world import World

Times = TypeVar("Times")


class Rounds(Protocol):
    """The settings of a benchmark that are its numbers of rounds."""

    @property
    def warmup(self) -> int: ...
    @property
    def iterations(self) -> int: ...


_TRACED = 5  # runs of a view, of which the one with the median time is shown


@dataclass(frozen=True)
class Result:
    """What was measured.

    `times` has the four views, `baselines` and `ablation` what they are compared with. `checks`
    holds the worst that verification found for each of these before and after timing on any rank.
    `choice` is what was carried out, and why, `chunk_rows` the most rows of its transfers; `where`
    says on what, as the JSON does; `notes` are what else one must know to read the times.
    """

    settings: FusedSettings
    choice: Selection
    chunk_rows: int
    times: dict[str, Statistics]
    baselines: dict[str, Statistics]
    ablation: dict[str, Statistics]
    checks: dict[str, Check]
    where: dict[str, Any]
    traces: list[Trace]
    notes: tuple[str, ...] = ()


class View(NamedTuple):
    """Something to measure: a call that all ranks make, the tensors it writes, and a check of these
    in a given run.
    """

    call: Callable[[], object]
    outputs: tuple[Tensor, ...]
    check: Callable[[int], Check]


class Views(ABC):
    """What one rank measures, by name, all on the same inputs."""

    views: dict[str, View]

    @abstractmethod
    def renew(self, run: int) -> None:
        """Fill the inputs with those of this run."""


class Subject(Views):
    """The tensors of one rank and the views on them: `VIEWS`, the baseline, and the steps that
    `ablation` names, in order.

    As in a model that runs many times, the weight is packed; the baseline has a plain one.
    `prepare` makes the parts that depend on the operator: the `problem`, its input `a` and its
    `out`; the `x` that is multiplied into `product` without communication; the tensors `moved`
    without a product, by the names of the plan's buffers; the checks of `out`, by the operator and
    by the baseline, and of the moved rows; the operator's arguments for `shares` of rows; and a
    maker of the `baseline`'s call, if there is one.
    """

    problem: Problem
    a: Tensor
    x: Tensor
    product: Tensor
    out: Tensor
    moved: dict[str, Tensor]
    check: Callable[[int], Check]
    check_moved: Callable[[int], Check]
    check_baseline: Callable[[int], Check]
    shares: dict[str, Any]
    baseline: Callable[[], Callable[[], object]] | None
    notes: tuple[str, ...]

    def __init__(self, settings: FusedSettings, world: World, stopwatch: Stopwatch) -> None:
        shape, self.settings, self.world = settings.shape, settings, world
        self.rows = split(shape.m, world.ranks)
        self.dtype, self.out_dtype = (
            getattr(torch, settings.dtype),
            getattr(torch, settings.result_dtype),
        )
        held = Workload(
            settings.operator,
            tuple(self.rows),
            shape.k,
            shape.n,
            settings.dtype,
            settings.result_dtype,
        )
        self.dtypes = {
            name: getattr(torch, rows.dtype)
            for name, rows in OPERATORS[settings.operator].buffers(held).items()
        }
        self.prepare()
        self.weight = pack(self.problem.weight)
        latency = settings.link_latency_us or 0.0
        if settings.link_gbps:
            world.emulate_link(
                1.0 if settings.link_gbps == "auto" else float(settings.link_gbps), latency
            )
        compute = partial(multiply, self.x, self.weight, self.product)
        asked = Options(
            out_dtype=self.out_dtype,
            algorithm=settings.algorithm,
            chunk_rows=settings.chunk_rows,
            **self.shares,
        )
        given = Given(self.a, [self.weight], [None], [self.out])
        self.call = find(settings.operator).check(world, given, asked)
        self.choice = self.call.rule(settings.algorithm)
        if settings.link_gbps == "auto":
            self.renew(0)
            first, alone = (
                next(iter(self.moved.values())),
                stopwatch.interleave({"compute": compute}, 1, 5)["compute"].median,
            )
            gbps = balanced_gbps(
                bind(self.plan(), self.rows), first.shape[1] * first.itemsize, 1e-3 * alone, latency
            )
            world.emulate_link(gbps, latency)
        if settings.algorithm == "auto" and shape.m:
            self.choice = select(self.call)
            while (trial := self.choice.trial) is not None and trial.includes(self.call):
                fused.run(self.call)
                self.choice = select(self.call)
        self.views = {
            "compute": View(
                compute, (self.product,), partial(self.problem.check_product, self.product)
            ),
            "communicate": View(
                partial(self._move, self.plan()), (*self.moved.values(),)[1:], self.check_moved
            ),
            "sequential": self.view(self.operator(self.call.operator.baseline, None)),
            "pipelined": self.view(self.operator(settings.algorithm, settings.chunk_rows)),
        }
        if settings.gloo and self.baseline is not None:
            self.views[GLOO] = View(self.baseline(), (self.out,), self.check_baseline)
        self.ablation: dict[str, str] = {}

    @abstractmethod
    def prepare(self) -> None:
        """Make what is particular to the operator."""

    def operator(self, algorithm: str, chunk_rows: int | None) -> Callable[[], object]:
        """The call to measure."""
        asked = {
            "algorithm": algorithm,
            "chunk_rows": chunk_rows,
            "out": self.out,
            "out_dtype": self.out_dtype,
        }
        function = getattr(weft, self.settings.operator)
        asked |= {"world": self.world, **self.shares}
        taken = {name: asked[name] for name in asked if name in signature(function).parameters}
        call = partial(function, self.a, self.weight, **taken)
        return call if "out" in taken else lambda: self.out.copy_(call())

    def plan(self) -> Plan:
        """The communication of the choice."""
        operator, world = self.call.operator, self.world
        where: dict[str, Any] = {"hosts": world.topology, "remote_reads": world.remote_reads}
        return operator.communicate(
            operator.request(self.call.workload, self.choice.variant, **where)
        )

    def view(self, call: Callable[[], object]) -> View:
        """The view of a call that does all that the operator does."""
        return View(call, (self.out,), self.check)

    def _move(self, plan: Plan) -> None:
        engine(self.world).program(plan, self.moved, self.rows, self.dtypes).run(
            self.moved, self.rows, {}
        )


def measure(
    make_subject: Callable[[FusedSettings, World, Stopwatch], Subject], settings: FusedSettings
) -> Result:
    """Measure on this rank, collectively. Traces are on rank 0 only."""
    with session(settings.threads) as world:
        stopwatch = Stopwatch(world)
        subject, traces = make_subject(settings, world, stopwatch), list[Trace | None]()

        def race() -> dict[str, Statistics]:
            times = interleave(subject, stopwatch, settings)
            if settings.trace or settings.timeline:
                traces.extend(
                    trace(subject, world, stopwatch, name) for name in ("sequential", "pipelined")
                )
            return times

        times, checks = verify(subject, world, race)
        if settings.save_outputs:
            torch.save(
                subject.views["pipelined"].outputs[0],
                settings.save_outputs / f"rank{world.rank}.pt",
            )
        return Result(
            settings,
            subject.choice,
            subject.call.operator.chunk_rows(subject.rows, subject.choice.variant),
            times={name: times[name] for name in VIEWS},
            baselines={name: times[name] for name in (GLOO,) if name in times},
            ablation={step: times[name] for step, name in subject.ablation.items()},
            checks=checks,
            where={
                "ranks": world.ranks,
                "hosts": len(set(world.hosts)),
                "link": link_of(world),
                **where(world),
            },
            traces=[trace for trace in traces if trace],
            notes=subject.notes,
        )


def verify(
    subject: Views, world: World, race: Callable[[], Times]
) -> tuple[Times, dict[str, Check]]:
    """What `race` finds, and of every view the worst check of any rank, before and after it.

    Each is run on inputs of its own, into poisoned outputs; ``pipelined`` comes last, so its output
    stays.
    """

    def check(name: str, run: int) -> Check:
        view = subject.views[name]
        subject.renew(run)
        poison(*view.outputs)
        view.call()
        return worst(world, view.check(run))

    names = sorted(subject.views, key="pipelined".__eq__)
    times, checks = verified(names, check, race)
    return times, dict(zip(names, checks, strict=True))


def interleave(subject: Views, stopwatch: Stopwatch, rounds: Rounds) -> dict[str, Statistics]:
    """Time all views in turn, behind a progress bar of rank 0."""
    with progress(
        "measuring", rounds.iterations + max(rounds.warmup, 1) - 1, shown=stopwatch.world.rank == 0
    ) as advance:
        calls = {name: view.call for name, view in subject.views.items()}
        return stopwatch.interleave(calls, rounds.warmup, rounds.iterations, advance)


def trace(subject: Views, world: World, stopwatch: Stopwatch, name: str) -> Trace | None:
    """The trace of a view's run with the median time, on rank 0."""
    traces = []
    for _ in range(_TRACED):
        stopwatch.time(lambda: None)
        with record(world) as recording:
            subject.views[name].call()
        traces.append(recording.gather(name))
    return (
        sorted((t for t in traces if t), key=lambda t: t.seconds)[_TRACED // 2]
        if world.rank == 0
        else None
    )


def balanced_gbps(gather: Plan, row_bytes: int, compute: float, latency_us: float) -> float:
    """The bandwidth, in Gbit/s, at which the busiest rank's copies of rows to and from peers take
    `compute` seconds.
    """
    bits = 0.0
    for lanes in gather.lanes:
        moved = [
            i.src.rows
            for lane in lanes.values()
            for i in lane
            if isinstance(i, Copy) and i.src.rank != i.dst.rank
        ]
        left = compute - len(moved) * latency_us * 1e-6
        if left <= 0:
            raise ValueError(
                f"{len(moved)} transfers of {latency_us:g} us each take longer than the product "
                f"({1e3 * compute:.3f} ms): "
                "choose a lower latency or larger chunks, or give the bandwidth"
            )
        bits = max(bits, sum(moved) * row_bytes * 8 / left)
    return float(f"{bits / 1e9:.4g}")
