"""Measuring the candidates that `auto` chooses from, on this machine: for ``weft tune``, and to see how good predictions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft import predict
from weft.bench.harness import Stopwatch
from weft.engines import engine
from weft.engines.weights import Weight, pack
from weft.ops import all_gather_matmul as gathering
from weft.ops import matmul_all_reduce as reducing
from weft.ops import matmul_reduce_scatter as scattering
from weft.ops import partial_sums
from weft.predict import Candidate, Case, tuned
from weft.predict.machine import Machine
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter
from weft.world import World, init

_TIMEOUT = 120.0


class Question(NamedTuple):
    """A case, the ways to measure it in, and the Gbit/s and latency in microseconds of an emulated link, if any."""

    case: Case
    ways: list[Candidate]
    link: tuple[float, float] | None = None


class Answer(NamedTuple):
    """Milliseconds of one way, the slowest rank's: the median and the least of all runs."""

    way: Candidate
    median: float
    least: float


def measure(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure every way of every question on this rank, and the usual one, collectively; the ways of a question in turn."""
    torch.set_num_threads(threads)
    answers = []
    with init(timeout=_TIMEOUT) as world, torch.no_grad():
        stopwatch = Stopwatch(world)
        for case, ways, link in questions:
            world.emulate_link(*link or (0.0, 0.0))
            prepare = _gathering if case.operator == "all_gather_matmul" else _summing
            calls, ways = prepare(case, world), [*dict.fromkeys([*ways, _usual(case, world)])]
            views = {str(number): calls(way) for number, way in enumerate(ways)}
            times = stopwatch.interleave(views, 1, iterations)
            answers.append([Answer(way, times[str(i)].median, times[str(i)].min) for i, way in enumerate(ways)])
            engine(world).compiled.clear()
    return answers


def tune(questions: list[Question], iterations: int, threads: int) -> list[list[Answer]]:
    """Measure, and remember the fastest way of every case. Answers come fastest first."""
    from weft.world.launcher import launch

    answers: list[list[Answer]] = launch(measure, questions[0].case.ranks, questions, iterations, threads, threads=threads)[0]
    for (case, _, link), found in zip(questions, answers, strict=True):
        found.sort(key=lambda answer: answer.median)
        tuned.remember(case, link, found[0].way)
    return answers


def ways(case: Case, machine: Machine) -> list[tuple[Candidate, float]]:
    """What is worth measuring: the best of each algorithm and order, with its predicted seconds."""
    return predict.rank(case, machine, predict.candidates(case, machine))


def show(case: Case, machine: Machine, found: list[Answer]) -> list[dict[str, Any]]:
    """Rows of a table: what is predicted and what was measured."""
    expected = [1e3 * predict.time(case, answer.way, machine) for answer in found]
    return [
        {**answer.way._asdict(), "predicted_ms": ms, "measured_ms": answer.median}
        for ms, answer in zip(expected, found, strict=True)
    ]


def _usual(case: Case, world: World) -> Candidate:
    """The way that ``auto`` begins with."""
    if case.operator == "all_gather_matmul":
        return gathering.choose(case.rows, world).way
    if case.operator == "matmul_reduce_scatter":
        return scattering.choose(case.rows, world, packed=case.packed).way
    return reducing.choose(sum(case.rows), world, packed=case.packed).way


def _gathering(case: Case, world: World) -> Callable[[Candidate], Callable[[], object]]:
    dtype, out_dtype = getattr(torch, case.dtype), getattr(torch, case.out_dtype)
    rows = case.rows[world.rank]
    a = world.empty(max(case.rows), case.k, dtype=dtype)[:rows] if case.symmetric else torch.empty(rows, case.k, dtype=dtype)
    tensors = {"a": a.copy_(torch.randn(rows, case.k)), "out": torch.empty(sum(case.rows), case.n, dtype=out_dtype)}
    weight = _weight(case, dtype)

    def prepare(way: Candidate) -> Callable[[], object]:
        plan = gathering.plan_for(case.rows, way, case.symmetric, gathered=False)
        return lambda: engine(world).execute(plan, tensors, {"out": weight})

    return prepare


def _summing(case: Case, world: World) -> Callable[[Candidate], Callable[[], object]]:
    dtype, out_dtype = getattr(torch, case.dtype), getattr(torch, case.out_dtype)
    scatters = case.operator == "matmul_reduce_scatter"
    x = torch.randn(sum(case.rows), case.k).to(dtype)
    out = torch.empty(case.rows[world.rank] if scatters else len(x), case.n, dtype=out_dtype)
    weight, planner = _weight(case, dtype), matmul_reduce_scatter if scatters else matmul_all_reduce

    def prepare(way: Candidate) -> Callable[[], object]:
        work = partial_sums.Sums(planner, case.rows, way, "sum")
        return lambda: partial_sums.add_up(work, x, weight, None, out, world, None)

    return prepare


def _weight(case: Case, dtype: torch.dtype) -> Weight:
    b = torch.randn(case.k, case.n).to(dtype)
    return pack(b) if case.packed else b
