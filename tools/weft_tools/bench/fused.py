"""The benchmark of a fused operator: its parts alone, one after the other, and overlapped, on the
same data in one run.

Each operator has its `Subject`; measurement, verification and tracing are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import signature
from time import monotonic
from typing import Any, ClassVar

import torch
from torch import Tensor

import weft
from weft.checks import name as dtype_name
from weft.engines import engine
from weft.kernels.packed import pack
from weft.kernels.weights import Weight
from weft.measure.progress import progress
from weft.measure.timing import Stopwatch, largest, stopwatch_of
from weft.ops import driver
from weft.ops.autotune import select
from weft.ops.operator import find
from weft.ops.options import Operands, made
from weft.plan import Copy, Plan
from weft.plan.binding import bind, split
from weft.plan.trace import Trace
from weft.schedules.lanes import products_alone
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request, Variant, Workload
from weft.world import World
from weft_tools.bench import data
from weft_tools.bench.alone import ALONE, all_cores
from weft_tools.bench.between_ranks import session
from weft_tools.bench.budget import PREPARING, Budget, fitted
from weft_tools.bench.cascade import compare_with_cascade
from weft_tools.bench.fused_baselines import call_of
from weft_tools.bench.harness import environment, link_of
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.result import Result
from weft_tools.bench.scaled import measured_rows, scaled
from weft_tools.bench.settings.fused import FusedSettings
from weft_tools.bench.systems import SYSTEMS
from weft_tools.bench.torch_products import (
    faster,
    multiplying_in,
    sentence,
    slowdown,
    sums_in_float32,
)
from weft_tools.bench.traces import trace
from weft_tools.bench.verification import Check, Problem
from weft_tools.bench.views import View, Views, product_on, timed
from weft_tools.predict.figures import IN_CHUNKS

_CALLS = 50  # of an emulated link, for which there is time at least
_SHOWN = "compute", IN_CHUNKS, "communicate", "sequential", "pipelined"
_BASELINES = *(each.fused for each in SYSTEMS.values() if each.fused), ALONE
WITHOUT_GATHERED = "without gathered"
"""The view of the fused call that does not return the gathered rows, beside the one that does."""


class Subject(Views):
    """The tensors of one rank and the views on them: `VIEWS`, the baselines, those that are `slow`,
    the algorithm `streamed`, if any, and the steps that `ablation` names, in order.

    On a CPU the weight is packed, as in a model that runs many times; the baselines have plain
    ones. `compared` tells whether the operator has baselines, `biased` whether it can add a bias.

    Attributes (set by `prepare`):
        problem: the operands and the exact results.
        a, out: the operator's input and result.
        gathered: the gathered rows that the latest call returned, if it does.
        x, product: operand and result of the product without communication.
        moved: the tensors of the communication without a product, by the names of the plan's
            buffers.
        check, check_moved: the checks of `out` after a call of the operator, and of the moved rows.
        check_baseline: the check of the result of a baseline.
        shares: the operator's arguments for the rows of each rank.
        one_process: makes the call for the work of all ranks, its result, and the check of that.
    """

    compared: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    problem: Problem
    a: Tensor
    gathered: Tensor
    x: Tensor
    product: Tensor
    out: Tensor
    moved: dict[str, Tensor]
    check: Callable[[int], Check]
    check_moved: Callable[[int], Check]
    check_baseline: Callable[[Tensor, int], Check]
    shares: dict[str, Any]
    one_process: Callable[[], tuple[Callable[[], object], Tensor, Callable[[int], Check]]]
    notes: tuple[str, ...]

    def __init__(
        self, settings: FusedSettings, world: World, stopwatch: Stopwatch, budget: Budget
    ) -> None:
        shape = settings.shape
        self.settings = settings
        self.world = world
        self.empty = partial(torch.empty, device=world.device)
        self.rows = split(shape.m, world.ranks)
        self.dtype = getattr(torch, settings.dtype)
        self.out_dtype = getattr(torch, settings.result_dtype)
        workload = Workload(
            settings.operator,
            tuple(self.rows),
            shape.k,
            shape.n,
            settings.dtype,
            settings.result_dtype,
        )
        self.dtypes = {
            name: getattr(torch, rows.dtype)
            for name, rows in OPERATORS[settings.operator].buffers(workload).items()
        }
        self.prepare()
        weight, on_gpu = self.problem.weight, world.device.type == "cuda"
        self.weight: Weight = weight if on_gpu else pack(weight)
        latency = settings.link_latency_us or 0.0
        if settings.link_gbps:
            world.emulate_link(
                1.0 if settings.link_gbps == "auto" else float(settings.link_gbps), latency
            )
        product, own_bias = product_on(world.device), self.problem.own_bias
        compute = partial(product, self.x, self.weight, self.product, bias=own_bias)
        operator = find(settings.operator)
        options = made(
            operator.options,
            out_dtype=self.out_dtype,
            algorithm=settings.algorithm,
            chunk_rows=settings.chunk_rows,
            order=settings.order,
            keep=settings.return_gathered,
            **self.shares,
        )
        operands = Operands(self.a, [self.weight], [self.problem.bias], [self.out])
        options = operator.exchanged(world, operands, options, None)
        self.call = operator.check(world, operands, options)
        self.choice = self.call.rule()
        preparing = budget.part(PREPARING)
        if settings.link_gbps == "auto":
            self.renew(0)
            self.tuned = fitted(
                lambda: largest(world, [stopwatch.time(compute)])[0],
                partial(self._balance_link, latency),
                self._tune,
                preparing,
            )
        else:
            self.tuned = self._tune(preparing)
        self.algorithm = settings.algorithm if self.tuned else self.choice.variant.algorithm
        self.streamed = ""
        self.ablation: dict[str, str] = {}
        self.views = self._own_views(compute)
        self.slowdown = self._slowdown()
        with multiplying_in(faster(self.out_dtype, self.slowdown)):
            self.views |= self._baselines()
        self.slow = self._slow_baselines()
        self.views |= self.slow
        self.views |= self._streaming()
        self.views |= self._in_chunks()

    def _tune(self, budget: Budget) -> bool:
        """Let the first calls of ``auto`` measure its candidates; whether they could within the
        budget, else the rule's is the choice.
        """
        self.choice = self.call.rule()
        if self.settings.algorithm != "auto" or not self.settings.shape.m:
            return True
        self.choice = select(self.call)
        while (trial := self.choice.trial) and self.call.comparable(trial.candidates):
            if not budget.left():
                self.choice = self.call.rule()
                return False
            driver.run(self.call)
            self.choice = select(self.call)
        return True

    def _balance_link(self, latency: float, product: float) -> None:
        """Emulate a link on which communication takes as long as a product of so many seconds, but
        not so long that few calls fill the time of the measurement.
        """
        self.choice = self.call.rule()
        compute = min(product, self.settings.seconds / _CALLS)
        buffers = self.call.operator.buffers(self.call.workload)
        row_bytes = {
            name: rows.columns * self.dtypes[name].itemsize for name, rows in buffers.items()
        }
        plan = bind(self.plan(), self.rows)
        gbps = balanced_gbps(plan, row_bytes, compute, latency)
        self.world.emulate_link(gbps, latency)

    def _own_views(self, compute: Callable[[], None]) -> dict[str, View]:
        """The views of `VIEWS`."""
        settings = self.settings
        return {
            "compute": View(
                compute, (self.product,), partial(self.problem.check_product, self.product)
            ),
            "communicate": View(
                partial(self._move, self.plan()), (*self.moved.values(),)[1:], self.check_moved
            ),
            "sequential": self.view(self.operator(self.call.operator.baseline, None)),
            "pipelined": self.view(
                self.operator(self.algorithm, settings.chunk_rows, settings.order)
            ),
        }

    def _baselines(self) -> dict[str, View]:
        """The views of the baselines, with gloo on one host also of one process."""
        world = self.world
        names = self.settings.baselines if self.compared else ()
        views = {SYSTEMS[name].fused: self._baseline(name) for name in names}
        if "gloo" in names and world.ranks > 1 and not world.hosts.several:
            call, out, check = self.one_process()
            call = call if world.rank == 0 else lambda: None
            views[ALONE] = View(call, (out,), check, partial(all_cores, world))
        return views

    def _slowdown(self) -> float:
        """How many times as long as by float32 the products of baselines take on the slowest rank,
        1 without baselines.
        """
        if not self.settings.baselines or not self.compared or self.world.device.type == "cuda":
            return 1.0
        return largest(self.world, [slowdown(self.out_dtype)])[0]

    def _slow_baselines(self) -> dict[str, View]:
        """The views of the baselines that multiply in the dtype of the results, where torch is
        faster by float32, on `few_rows`.
        """
        if not self.multiplied_in:
            return {}
        few = copy(self)
        few.settings = replace(self.settings, shape=replace(self.settings.shape, m=self.few_rows))
        few.rows = split(self.few_rows, self.world.ranks)
        few.prepare()
        with multiplying_in(self.out_dtype):
            views = few._baselines()
        return {
            f"{name} in {self.settings.result_dtype}": view._replace(renew=few.renew)
            for name, view in views.items()
        }

    @property
    def few_rows(self) -> int:
        """The rows of all ranks on which slow baselines are measured."""
        return measured_rows(self.settings.shape.m, self.world.ranks, self.slowdown)

    def _streaming(self) -> dict[str, View]:
        """The view of the algorithm that multiplies while rows arrive, where auto has selected to
        communicate first.
        """
        first = self.choice.variant.algorithm == self.call.operator.baseline
        if not first or self.settings.algorithm != "auto" or self.world.ranks == 1:
            return {}
        self.streamed, _ = self.call.overlapped()
        call = self.operator(self.streamed, self.settings.chunk_rows)
        return {self.streamed: self.view(call)}

    def _in_chunks(self) -> dict[str, View]:
        """The view of the products alone, cut as where rows arrive."""
        call = partial(self._multiply, self.products_alone())
        return {IN_CHUNKS: self.views["compute"]._replace(call=call)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the latest call of the operator, by name."""
        found = {"a": self.a, "b": self.problem.weight, "out": self.out}
        bias = self.problem.bias
        return found if bias is None else found | {"bias": bias}

    def result(self, rows: Sequence[int], columns: int) -> Tensor:
        """A tensor for the operator's results of `rows` on each rank, or of one number on all."""
        rank, dtype = self.world.rank if len(rows) > 1 else 0, self.out_dtype
        if self.settings.symmetric_out:
            return self.world.empty(max(rows), columns, dtype=dtype)[: rows[rank]]
        return self.empty(rows[rank], columns, dtype=dtype)

    @property
    def multiplied_in(self) -> str:
        """The dtype in which the baselines multiply, "" if it is that of the results."""
        fast = faster(self.out_dtype, self.slowdown)
        return "" if fast == self.out_dtype else dtype_name(fast)

    @property
    def general_notes(self) -> Iterator[str]:
        """Sentences on the weight and the kernels of its products."""
        if self.world.device.type == "cpu":
            yield "The weight is packed" + (
                "; baselines have a plain weight." if self.compared else "."
            )
        if not self.tuned:
            yield (
                f"--seconds {self.settings.seconds:g} left no time to measure the candidates of "
                "auto: the algorithm is its rule's."
            )
        if self.settings.symmetric_out:
            yield "The result is in symmetric memory: peers put their sums where it stays."
        if self.multiplied_in:
            yield sentence(self.out_dtype, self.slowdown)
        if self.world.backend.products == "triton":
            yield "compute is torch's product; all others multiply by weft's kernel."

    @abstractmethod
    def prepare(self) -> None:
        """Set the attributes that depend on the operator."""

    def operator(
        self, algorithm: str, chunk_rows: int | None, order: str | None = None, **more: Any
    ) -> Callable[[], object]:
        """The call of the operator, with the arguments that it takes."""
        options = {
            "bias": self.problem.bias,
            "algorithm": algorithm,
            "chunk_rows": chunk_rows,
            "order": order,
            "out": self.out,
            "out_dtype": self.out_dtype,
            "world": self.world,
            **self.shares,
            **more,
        }
        function = getattr(weft, self.settings.operator)
        names = signature(function).parameters
        accepted = {name: value for name, value in options.items() if name in names}
        call = partial(function, self.a, self.weight, **accepted)
        if algorithm != "auto" and not self.call.honours(algorithm):
            call = partial(self._unlinked, call)
        return call if "out" in accepted else lambda: self.out.copy_(call())

    def _unlinked(self, call: Callable[[], object]) -> object:
        """A call of an algorithm that can honour neither links, nor a kernel that copies, nor tiles
        of own rows: with the other options.
        """
        options = self.world.device_options
        self.world.configure(replace(options, links=1, comm_sms=0, own_tile=None))
        try:
            return call()
        finally:
            self.world.configure(options)

    def plan(self) -> Plan:
        """The plan of the communication alone, by the selected variant."""
        return self.call.operator.communicate(self._request(self.choice.variant))

    def products_alone(self) -> Plan:
        """The plan of the products alone, cut as by the algorithm that multiplies while rows
        arrive.
        """
        operator, variant = self.call.operator, self.choice.variant
        streams = self.call.variant(self.streamed) if self.streamed else variant
        plan = products_alone(operator.plan(self._request(streams)), operator.exchanges)
        return replace(plan, rows_multiple=self.call.rows_multiple)

    def view(self, call: Callable[[], object]) -> View:
        """The view of a call of the complete operator."""
        return View(call, (self.out,), self.check)

    def _baseline(self, name: str) -> View:
        call = call_of(
            name,
            self.settings.operator,
            self.a,
            self.problem.weight,
            self.out,
            self.rows,
            self.world,
            self.problem.bias,
        )
        found = [self.out]

        def timed() -> None:
            found[0] = call()

        return View(timed, (self.out,), lambda run: self.check_baseline(found[0], run))

    def _request(self, variant: Variant) -> Request:
        world = self.world
        more: dict[str, Any] = {"hosts": world.hosts.if_several, "remote_reads": world.remote_reads}
        return self.call.operator.request(self.call.workload, variant, **more)

    def _multiply(self, plan: Plan) -> None:
        tensors, weights = {"x": self.x, "product": self.product}, {"product": self.weight}
        bias = self.problem.own_bias
        program = engine(self.world).program(plan, tensors, self.rows)
        program.run(tensors, self.rows, weights, None if bias is None else {"product": bias})

    def _move(self, plan: Plan) -> None:
        engine(self.world).program(plan, self.moved, self.rows, self.dtypes).run(
            self.moved, self.rows, {}
        )


@sums_in_float32()
def measure(
    make_subject: Callable[[FusedSettings, World, Stopwatch, Budget], Subject],
    settings: FusedSettings,
) -> Result:
    """The result on this rank; collective. Only rank 0 has the traces."""
    begun = monotonic()
    with (
        session(
            settings.threads,
            **settings.place,
            comm_threads=settings.comm_threads,
            device_options=settings.device_options,
        ) as world,
        neighbours(world, settings.neighbours),
    ):
        stopwatch, traced = stopwatch_of(world), list[Trace]()
        budget = Budget(world, settings.seconds - (monotonic() - begun))
        with progress("preparing", 1, shown=world.rank == 0):
            subject = make_subject(settings, world, stopwatch, budget)

        def trace() -> None:
            if settings.trace or settings.timeline:
                traced.extend(_traces(subject, stopwatch, budget))

        times, checks = timed(subject, stopwatch, settings, trace, settings.graph, budget)
        cascade = []
        if settings.return_gathered:
            cascade = compare_with_cascade(subject, world, 2 * len(subject.views))
            checks["fused = cascade"] = Check(sum(one.wrong for one in cascade))
        if settings.save_outputs:
            torch.save(
                subject.views["pipelined"].outputs[0].cpu(),
                settings.save_outputs / f"rank{world.rank}.pt",
            )
        if settings.save_data:
            data.save(settings.save_data, world, settings.operator, subject.rows, subject.tensors())
        return Result(
            settings,
            subject.choice,
            subject.call.operator.chunk_rows(subject.rows, subject.choice.variant),
            times={name: times[name] for name in _SHOWN if name in times},
            baselines={name: times[name] for name in _BASELINES if name in times},
            ablation={step: times[name] for step, name in subject.ablation.items()},
            checks=checks,
            environment={
                "ranks": world.ranks,
                "hosts": world.hosts.number,
                "link": link_of(world),
                "neighbours": settings.neighbours,
                **environment(world, settings),
            },
            traces=traced,
            notes=(*subject.notes, *subject.general_notes),
            multiplied_in=subject.multiplied_in,
            slow={
                name: scaled(times[name], settings.shape.m / subject.few_rows)
                for name in subject.slow
            },
            measured_rows=subject.few_rows,
            streamed={name: times[name] for name in filter(None, [subject.streamed])},
            without_gathered={name: times[name] for name in (WITHOUT_GATHERED,) if name in times},
            cascade=cascade,
        )


def balanced_gbps(
    plan: Plan, row_bytes: Mapping[str, int], compute: float, latency_us: float
) -> float:
    """The bandwidth in Gbit/s at which the copies to and from peers take `compute` seconds on the
    rank with the most bytes; `row_bytes` are those of a row of each buffer. Raises `ValueError` if
    the copies' latency alone takes longer.
    """
    bits = 0.0
    for lanes in plan.lanes:
        moved = [
            i.src.rows * row_bytes[i.src.buffer]
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
        bits = max(bits, sum(moved) * 8 / left)
    return float(f"{bits / 1e9:.4g}")


def _traces(subject: Subject, stopwatch: Stopwatch, budget: Budget) -> list[Trace]:
    """The traces on rank 0, none elsewhere, titled by the names of the views; collective.

    ``sequential`` is the first and ``pipelined`` the last. Between them are the steps of the
    ablation, and the algorithm that streams where auto selected to communicate first.
    """
    names = "sequential", *subject.ablation.values(), subject.streamed, "pipelined"
    found = [
        trace(subject.views[name], stopwatch, name, budget)
        for name in dict.fromkeys(filter(None, names))
    ]
    return [one for one in found if one]
