"""Measuring the candidates that `auto` chooses from, on this machine: for ``weft tune``, and to see
how good predictions are.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from weft.engines import engine
from weft.kernels.weights import pack
from weft.measure.timing import Stopwatch, session
from weft.ops import fused
from weft.ops.call import Call, Given, Options
from weft.ops.operator import find
from weft.plan.binding import bind
from weft.predict import tuned
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload
from weft.world import World


class Question(NamedTuple):
    """A case, the ways to measure it in, and the Gbit/s and latency in microseconds of an emulated
    link, if any.
    """

    case: Workload
    ways: list[Variant]
    link: tuple[float, float] | None = None


class Answer(NamedTuple):
    """Milliseconds of one way, the slowest rank's: the median and the least of all runs."""

    way: Variant
    median: float
    least: float


def measure(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure every way of every question on this rank, and the usual one, collectively; the ways
    of a question in turn.
    """
    answers = []
    with session(threads) as world:
        stopwatch = Stopwatch(world)
        for case, ways, link in questions:
            world.emulate_link(*link or (0.0, 0.0))
            call = _prepare(case, world)
            ways = [*dict.fromkeys([*ways, call.rule("auto").variant])]
            views = {
                str(number): partial(fused.execute, call, way) for number, way in enumerate(ways)
            }
            times = stopwatch.interleave(views, 1, iterations)
            answers.append(
                [Answer(way, times[str(i)].median, times[str(i)].min) for i, way in enumerate(ways)]
            )
            engine(world).programs.clear()
    return answers


def tune(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure, and remember the fastest way of every case. Answers come fastest first."""
    from weft.world.launcher import launch

    answers: list[list[Answer]] = launch(
        measure, questions[0].case.ranks, questions, iterations, threads, threads=threads
    )[0]
    for (case, _, link), found in zip(questions, answers, strict=True):
        found.sort(key=lambda answer: answer.median)
        tuned.remember(case, link, found[0].way)
    return answers


def _prepare(workload: Workload, world: World) -> Call:
    """A call of this workload, on random data."""
    dtype, rank = getattr(torch, workload.dtype), world.rank
    operator = OPERATORS[workload.operator]
    plan = operator.plan(operator.request(workload, Variant(operator.baseline)))
    rows = bind(plan, workload.rows).buffers["a"].rows
    a, b = (
        torch.randn(rows[rank], workload.k).to(dtype),
        torch.randn(workload.k, workload.n).to(dtype),
    )
    if workload.symmetric and operator.exchanges == "a":
        a = world.empty(max(rows), workload.k, dtype=dtype)[: rows[rank]].copy_(a)
    asked = Options(out_dtype=getattr(torch, workload.out_dtype), shard_rows=workload.rows)
    given = Given(a, [pack(b) if workload.packed else b], [None], [None])
    return find(workload.operator).check(world, given, asked)
