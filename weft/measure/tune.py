"""Measurement of the variants that `auto` chooses from, on this machine: for ``weft tune``, and to
compare predictions with.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from weft.engines import engine
from weft.engines.device.options import hardware
from weft.kernels.packed import pack
from weft.measure import tune_device
from weft.measure.launched import on_ranks
from weft.measure.progress import progress
from weft.measure.timing import Stopwatch, session
from weft.ops import fused
from weft.ops.call import Call, Operands, Options
from weft.ops.operator import find
from weft.plan.binding import bind
from weft.predict import tuned
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload
from weft.world import World


class Question(NamedTuple):
    """A case, the variants to measure, and the Gbit/s and latency in microseconds of an emulated
    link, if any.
    """

    case: Workload
    variants: list[Variant]
    link: tuple[float, float] | None = None


class Answer(NamedTuple):
    """Milliseconds of one variant on the slowest rank: the median and the least of all runs."""

    variant: Variant
    median: float
    least: float


def measure(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure the variants of all questions, and the one that the rule of `auto` selects;
    collective. The variants of a question are interleaved.
    """
    answers = []
    steps = len(questions) * iterations
    with (
        session(threads) as world,
        progress("tuning", steps, shown=world.rank == 0) as advance,
    ):
        stopwatch = Stopwatch(world)
        for case, requested, link in questions:
            world.emulate_link(*link or (0.0, 0.0))
            call = _prepare(case, world)
            variants = dict.fromkeys([*requested, call.rule("auto").variant])
            views = {
                str(number): partial(fused.execute, call, variant)
                for number, variant in enumerate(variants)
            }
            times = stopwatch.interleave(views, 1, iterations, advance).values()
            answers.append(
                [
                    Answer(variant, time.median, time.min)
                    for variant, time in zip(variants, times, strict=True)
                ]
            )
            engine(world).programs.clear()
    return answers


def tune(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure, and store the fastest variant of every case. Answers are sorted, fastest first."""
    ranks = questions[0].case.ranks
    answers = on_ranks(measure, ranks, questions, iterations, threads, threads=threads)
    for (case, _, link), found in zip(questions, answers, strict=True):
        found.sort(key=lambda answer: answer.median)
        _remember(case, link, found[0])
    return answers


def measure_streams(
    cases: list[Workload], iterations: int, place: dict[str, Any]
) -> tuple[list[list[Answer]], str]:
    """Measure cases in a world whose lanes are streams, at the `place` of a `session`; collective.
    Answers are sorted, fastest first; with them the hardware that they are true for.
    """
    answers = []
    with session(None, **place) as world:
        with progress("tuning", len(cases), shown=world.rank == 0) as advance:
            for case in cases:
                found = tune_device.measure(_prepare(case, world), iterations)
                answers.append([Answer(variant, time.median, time.min) for variant, time in found])
                advance()
        return answers, hardware(world)


def tune_streams(
    cases: list[Workload], iterations: int, place: dict[str, Any]
) -> list[list[Answer]]:
    """`tune` on the device and by the engine of a `place`."""
    answers, on = on_ranks(measure_streams, cases[0].ranks, cases, iterations, place)
    for case, found in zip(cases, answers, strict=True):
        _remember(case, None, found[0], on)
    return answers


def _remember(
    case: Workload, link: tuple[float, float] | None, fastest: Answer, on: str = ""
) -> None:
    ns = 1e6 * fastest.median / (sum(case.rows) * case.n)
    tuned.remember(case, link, tuned.Measured(fastest.variant, ns), on)


def _prepare(workload: Workload, world: World) -> Call:
    """A call of this workload on random data."""
    dtype, rank = getattr(torch, workload.dtype), world.rank
    operator = OPERATORS[workload.operator]
    plan = operator.plan(operator.request(workload, Variant(operator.baseline)))
    rows = bind(plan, workload.rows).buffers["a"].rows
    a, b = (
        torch.randn(*shape, device="cpu").to(world.device, dtype)
        for shape in ((rows[rank], workload.k), (workload.k, workload.n))
    )
    if workload.symmetric and operator.exchanges == "a":
        a = world.empty(max(rows), workload.k, dtype=dtype)[: rows[rank]].copy_(a)
    options = Options(out_dtype=getattr(torch, workload.out_dtype), shard_rows=workload.rows)
    operands = Operands(a, [pack(b) if workload.packed else b], [None], [None])
    return find(workload.operator).check(world, operands, options)
