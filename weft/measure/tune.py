"""Measurement of the variants that `auto` chooses from, on this machine: for ``weft tune``, and to
compare predictions with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from weft.engines import engine
from weft.host.placement import waited_for_core
from weft.kernels.packed import pack
from weft.measure.launched import on_ranks
from weft.measure.progress import progress
from weft.measure.timing import Statistics, Stopwatch, largest, session, stopwatch_of
from weft.ops import driver, stored
from weft.ops.autotune import disturbed
from weft.ops.call import Call
from weft.ops.fused import FusedCall
from weft.ops.operator import CollectiveOperator, find, find_any, function
from weft.ops.options import Operands, made
from weft.plan.binding import bind
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload
from weft.world import World

_PIECES = (1, 2, 4, 8, 16)
"""Pieces of a rank's rows that are tried on streams."""


class TuningCase(NamedTuple):
    """A workload, its variants to measure (if none, those that `auto` measures, and one of each
    other algorithm), and the Gbit/s and latency in microseconds of an emulated link, if any.
    """

    workload: Workload
    variants: list[Variant]
    link: tuple[float, float] | None = None


class VariantTime(NamedTuple):
    """Milliseconds of one variant on the slowest rank: the median and the least of all runs."""

    variant: Variant
    median: float
    least: float


class CaseTimes(NamedTuple):
    """The times of the variants of a case, the name of the class of calls that they are true for,
    the work of the call (`Call.work`), and whether ranks had to wait for cores meanwhile.
    """

    times: list[VariantTime]
    name: str
    work: int
    busy: bool = False


def measure(cases: list[TuningCase], iterations: int, threads: int) -> list[CaseTimes]:
    """Measure the variants of all cases, and the one that the rule of `auto` selects; collective.
    The variants of a case are interleaved.
    """
    found = list[CaseTimes]()
    steps = len(cases) * iterations
    with (
        session(threads) as world,
        progress("tuning", steps, shown=world.rank == 0) as advance,
    ):
        stopwatch = Stopwatch(world)
        for workload, requested, link in cases:
            world.emulate_link(*link or (0.0, 0.0))
            call = _prepare(workload, world)
            first = call.rule().variant
            variants = dict.fromkeys([*(requested or _every(call, first)), first])
            views = {
                str(number): partial(driver.execute, call, variant)
                for number, variant in enumerate(variants)
            }
            before, begin = waited_for_core(), monotonic_ns()
            measured = stopwatch.interleave(views, 1, iterations, advance).values()
            took = monotonic_ns() - begin
            (waited,) = largest(world, [waited_for_core() - before])
            busy = disturbed(waited, took) and not world.placement.oversubscribed
            times = [
                VariantTime(variant, time.median, time.min)
                for variant, time in zip(variants, measured, strict=True)
            ]
            name = stored.key(call.own_class, engine(world).setting)
            found.append(CaseTimes(times, name, call.work, busy))
            engine(world).programs.clear()
    return found


def _every(call: Call, first: Variant) -> list[Variant]:
    """The variants that `auto` measures, and one of each other algorithm that is possible here."""
    found = call.candidates(first)
    if isinstance(call, FusedCall):
        found += map(call.variant, filter(call.possible, call.operator.algorithms))
    return found


def tune(cases: list[TuningCase], iterations: int, threads: int) -> list[CaseTimes]:
    """Measure, and store the fastest variant of every case. Times are sorted, fastest first."""
    ranks = cases[0].workload.ranks
    found = on_ranks(measure, ranks, cases, iterations, threads, threads=threads)
    return _remembered(found)


def measure_streams(
    cases: list[Workload], iterations: int, place: dict[str, Any]
) -> list[CaseTimes]:
    """Measure cases in a world whose lanes are streams, at the `place` of a `session`;
    collective.
    """
    found = list[CaseTimes]()
    with (
        session(None, **place) as world,
        progress("tuning", len(cases), shown=world.rank == 0) as advance,
    ):
        for case in cases:
            call = _fused(case, world)
            measured = _by_groups(call, iterations)
            times = [VariantTime(variant, time.median, time.min) for variant, time in measured]
            found.append(CaseTimes(times, stored.key(case, engine(world).setting), call.work))
            advance()
    return found


def _by_groups(call: FusedCall, iterations: int) -> list[tuple[Variant, Statistics]]:
    """The variants of a call that this world can execute, with their times, fastest first;
    collective. Raises `ValueError` if it can execute none.

    Each group is measured interleaved, and starts from the fastest variant so far, which is
    measured again with it.
    """
    times: dict[Variant, Statistics] = {}
    fastest: list[Variant] = []
    for group in (_algorithms, *engine(call.world).groups()):
        found = [*dict.fromkeys([*fastest[:1], *group(call, fastest)])]
        possible = list(_possible(call, found, last_resort=not fastest))
        if len(possible) > len(fastest[:1]):
            times |= _interleaved(call, possible, iterations)
        fastest = sorted(times, key=lambda variant: times[variant].median)
    return [(variant, times[variant]) for variant in fastest]


def _interleaved(
    call: FusedCall, variants: Iterable[Variant], iterations: int
) -> dict[Variant, Statistics]:
    names = {str(number): variant for number, variant in enumerate(variants)}
    views = {name: partial(driver.execute, call, each) for name, each in names.items()}
    times = stopwatch_of(call.world).interleave(views, 1, iterations)
    engine(call.world).programs.clear()
    return {variant: times[name] for name, variant in names.items()}


def _possible(call: FusedCall, variants: Iterable[Variant], last_resort: bool) -> Iterator[Variant]:
    """The variants that the device and the kernels do not reject; if they reject all and this is
    the `last_resort`, the error.
    """
    rejected = None
    for variant in variants:
        try:
            engine(call.world).check_options(variant.device)
            driver.prepare(call, variant)
        except ValueError as error:
            rejected = error
        else:
            last_resort = False
            yield variant
    if last_resort and rejected:
        raise rejected


def _algorithms(call: FusedCall, _: Sequence[Variant]) -> Iterator[Variant]:
    operator, most = call.operator, max(call.workload.rows)
    for algorithm in filter(call.possible, operator.algorithms):
        uncut = algorithm in operator.uncut
        for pieces in _PIECES[:1] if uncut else (n for n in _PIECES if n <= most):
            yield Variant(algorithm, pieces)


def tune_streams(cases: list[Workload], iterations: int, place: dict[str, Any]) -> list[CaseTimes]:
    """`tune` on the device and by the engine of a `place`."""
    found = on_ranks(measure_streams, cases[0].ranks, cases, iterations, place)
    return _remembered(found)


def _remembered(found: list[CaseTimes]) -> list[CaseTimes]:
    """The cases with sorted times, the fastest variant of each stored."""
    for times, name, work, busy in found:
        times.sort(key=lambda time: time.median)
        ns = 1e6 * times[0].median / work
        stored.remember(name, stored.Measured(times[0].variant, ns, busy))
    return found


def _prepare(workload: Workload, world: World) -> Call:
    """A call of this workload: of a collective rows of one byte each."""
    if workload.operator in OPERATORS:
        return _fused(workload, world)
    operator = find_any(workload.operator)
    assert isinstance(operator, CollectiveOperator)
    defaults = {
        name: parameter.default
        for name, parameter in signature(function(workload.operator)).parameters.items()
    }
    a = torch.ones(max(workload.rows), dtype=torch.uint8, device=world.device)
    return operator.call(world, a, defaults | {"source": 0})


def _fused(workload: Workload, world: World) -> FusedCall:
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
    found = find(workload.operator)
    options = made(
        found.options, out_dtype=getattr(torch, workload.out_dtype), shard_rows=workload.rows
    )
    operands = Operands(a, [pack(b) if workload.packed else b], [None], [None])
    return found.check(world, operands, options)
