"""Predictions for fused operators on a machine: their plans run by the simulator, the figures of
their benchmarks, and the fastest variant.

`time` predicts a variant of a workload, `forecast` the views of a benchmark, `savings` the
bottlenecks of a variant. Plans and figures are the same as in operators and benchmarks; only the
engine differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from weft.plan import Plan
from weft.plan.binding import bind, split
from weft.plan.messages import lower_to_messages
from weft.plan.trace import Trace
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, PIECES, Operator, Request, Variant, Workload
from weft_tools.predict.machine import LinkRate, Machine
from weft_tools.predict.simulator import seconds, simulate

_CUTS = (PIECES, 8, 32, 4, 64, 1)
"""Candidates for the number of pieces of a shard, in order of preference: the operators' own, and
powers of two on either side.
"""
_SAME = 0.02
"""Predictions that differ by a smaller part count as equal: far less than a prediction is wrong."""
_TRANSFERS = 16_384
"""The largest number of simulated transfers: more pieces than fit are no candidates, as for
thousands of ranks. It bounds the time of a prediction.
"""
_MANY = 64
"""The largest number of ranks that are all simulated for every candidate: it bounds the time."""


def workload(
    operator: str,
    ranks: int,
    shape: tuple[int, int, int],
    dtype: str,
    out_dtype: str | None = None,
    packed: bool = True,
) -> Workload:
    """The workload of a benchmark of shape (M, K, N), with M rows divided among the ranks as evenly
    as possible.
    """
    return Workload(
        operator,
        tuple(split(shape[0], ranks)),
        shape[1],
        shape[2],
        dtype,
        out_dtype or dtype,
        packed,
    )


def plan(workload: Workload, variant: Variant, machine: Machine, communicate: bool = False) -> Plan:
    """The plan that an engine of the machine would execute, or that of its communication alone, as
    benchmarks measure it.

    If a rotation of the ranks changes nothing, the lanes of only the first ranks are planned
    (`weft_tools.predict.simulator`).
    """
    links = 1 if machine.hosts else max(1, min(machine.lanes, workload.ranks - 1))
    operator = OPERATORS[workload.operator]
    more: dict[str, Any] = {
        "hosts": machine.hosts,
        "remote_reads": _reads_peers(machine),
        "links": links,
    }
    request = operator.request(workload, variant, **more)
    planner = operator.communicate if communicate else operator.plan
    return _plan(planner, request, workload.rows, planned(workload, variant, machine))


@lru_cache(maxsize=64)
def _plan(
    planner: Callable[[Request], Plan], request: Request, rows: tuple[int, ...], ranks: int
) -> Plan:
    made = bind(planner(request).part(range(ranks)), rows)
    return made if request.hosts is None else lower_to_messages(made, request.hosts, gates=False)


def planned(workload: Workload, variant: Variant, machine: Machine) -> int:
    """The number of ranks to simulate: of one group if all groups do the same, else all."""
    equal = len(set(workload.rows)) == 1 and _uniform(
        workload.operator, workload.ranks, variant.algorithm
    )
    group = machine.group(workload.ranks)
    return group if equal and workload.ranks % group == 0 else workload.ranks


@lru_cache
def _uniform(operator: str, ranks: int, algorithm: str) -> bool:
    """Whether all ranks do the same, given equal rows and equal numbers of ranks per host."""
    return OPERATORS[operator].plan(Request(ranks, 1, algorithm)).uniform


def time(
    workload: Workload, variant: Variant, machine: Machine, communicate: bool = False
) -> float:
    """Predicted seconds of a variant, or of its communication alone."""
    buffers = OPERATORS[workload.operator].buffers(workload)
    return seconds(plan(workload, variant, machine, communicate), machine, buffers, workload.packed)


def trace(workload: Workload, variant: Variant, machine: Machine, title: str) -> Trace:
    """The predicted trace, of the ranks that are `planned`."""
    buffers = OPERATORS[workload.operator].buffers(workload)
    return simulate(plan(workload, variant, machine), machine, buffers, workload.packed, title)


def compute(workload: Workload, machine: Machine) -> float:
    """Predicted seconds of the product alone, over all rows."""
    return machine.launch_us * 1e-6 + machine.product(
        sum(workload.rows), workload.k, workload.n, workload.dtype, workload.packed
    )


def candidates(
    workload: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> list[Variant]:
    """The variants that the machine's engine could run, or the variants of one algorithm, in order
    of preference among equally fast ones.

    With many ranks, algorithms in which ranks differ are left out unless they are requested.
    """
    operator = OPERATORS[workload.operator]
    largest = max(1, *workload.rows)
    most = max(1, _TRANSFERS // (workload.ranks * machine.group(workload.ranks)))
    sizes = (
        [chunk_rows]
        if chunk_rows
        else [-(-largest // pieces) for pieces in _CUTS if pieces <= most]
    )
    variants = []
    for name in dict.fromkeys((operator.baseline, *operator.algorithms)):
        if algorithm not in ("auto", name) or not _possible(name, operator, machine):
            continue
        many = algorithm == "auto" and workload.ranks > _MANY
        if many and not _uniform(operator.name, workload.ranks, name):
            continue
        orders = ORDERS if name in operator.ordered and workload.ranks > 2 else ORDERS[:1]
        cuts = dict.fromkeys(operator.pieces(workload.rows, name, size) for size in sizes)
        variants += [Variant(name, pieces, order) for pieces in cuts for order in orders]
    return variants


def _possible(algorithm: str, operator: Operator, machine: Machine) -> bool:
    """Whether ranks of this machine can execute an algorithm of an operator. An emulated link does
    not delay products that are made in the memory of peers, so they are not made there with one.
    """
    if machine.hosts is not None:
        return algorithm not in operator.shared_memory_only
    if algorithm in operator.writes_products:
        return not machine.links[-1].idle
    return algorithm not in operator.moves_nothing or _reads_peers(machine)


def _reads_peers(machine: Machine) -> bool:
    """Whether products and sums can read peers' memory. An emulated link does not delay these
    reads, so they are not used with one.
    """
    return machine.in_place and not machine.links[-1].idle and machine.hosts is None


class Forecast(NamedTuple):
    """Predicted seconds of a benchmark's views.

    `variants` has the fastest variant of each algorithm and order with its time, fastest first;
    `communicate` belongs to the fastest variant that overlaps.
    """

    compute: float
    communicate: float
    sequential: float
    variants: list[tuple[Variant, float]]


def forecast(
    workload: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> Forecast:
    """The prediction of a workload, over the candidates of all algorithms or of one."""
    baseline = OPERATORS[workload.operator].baseline
    variants = rank(workload, machine, algorithm, chunk_rows)
    [(_, sequential), *_] = rank(workload, machine, baseline)
    overlapping = (variant for variant, _ in variants if variant.algorithm != baseline)
    return Forecast(
        compute(workload, machine),
        time(workload, next(overlapping, variants[0][0]), machine, communicate=True),
        sequential,
        variants,
    )


def rank(
    workload: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> list[tuple[Variant, float]]:
    """The fastest of the `candidates` of each algorithm and order, with its predicted seconds,
    fastest first.

    Of an algorithm the preferred number of pieces counts if predictions are nearly equal. Of equal
    ones the algorithm comes first that the operator lists first, and the baseline last.
    """
    found: dict[tuple[str, str], tuple[Variant, float]] = {}
    for variant in candidates(workload, machine, algorithm, chunk_rows):
        took = time(workload, variant, machine)
        kind = (variant.algorithm, variant.order)
        if kind not in found or took < found[kind][1] * (1 - _SAME):
            found[kind] = variant, took
    operator = OPERATORS[workload.operator]
    preferred = [name for name in operator.algorithms if name != operator.baseline]
    preferred.append(operator.baseline)
    return sorted(found.values(), key=lambda one: (one[1], preferred.index(one[0].algorithm)))


def changes(machine: Machine) -> dict[str, Machine]:
    """Machines that are better in one respect each, by the name of the improvement."""
    faster = {
        name: replace(p, tflops=2 * p.tflops, weight_gbs=2 * p.weight_gbs, fixed_us=p.fixed_us / 2)
        for name, p in machine.products.items()
    }
    return {
        "products twice as fast": replace(machine, products=faster),
        "links of twice the bandwidth": _linked(
            machine, lambda link: replace(link, gbs=2 * link.gbs)
        ),
        "memory twice as fast": replace(
            machine, memory_gbs=2 * machine.memory_gbs, reduce_gbs=2 * machine.reduce_gbs
        ),
        "no latencies": replace(
            _linked(machine, lambda link: replace(link, latency_us=0.0)),
            launch_us=0.0,
            lane_us=0.0,
            wake_us=0.0,
            turn_us=0.0,
            notify_us=0.0,
        ),
        "no interference": replace(
            _linked(machine, lambda link: replace(link, core_gbs=None)),
            compute_slowdown=1.0,
            communicate_slowdown=1.0,
        ),
    }


def _linked(machine: Machine, changed: Callable[[LinkRate], LinkRate]) -> Machine:
    """The machine with all links changed, including the one between hosts."""
    network = changed(machine.network) if machine.network else None
    return replace(machine, links=tuple(map(changed, machine.links)), network=network)


def savings(workload: Workload, variant: Variant, machine: Machine) -> list[tuple[str, float]]:
    """The part of a variant's time, from 0 to 1, that each of `changes` would save, the largest
    first: the first names the bottleneck.
    """
    now = time(workload, variant, machine)
    saved = {
        name: 1 - time(workload, variant, changed) / now
        for name, changed in changes(machine).items()
    }
    return sorted(saved.items(), key=lambda change: -change[1])
