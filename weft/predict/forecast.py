"""What an operator would take on a machine: its plans under the simulator, the figures of a
benchmark, the fastest variant.

`time` predicts a variant of a workload, `forecast` the views of a benchmark, `savings` what holds a
variant up. Plans and figures are those of the real operators and benchmarks; only the engine
differs.
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
from weft.predict.machine import Link, Machine
from weft.predict.simulator import seconds, simulate
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, PIECES, Request, Variant, Workload

_CUTS = (
    PIECES,
    8,
    32,
    4,
    64,
    1,
)  # into how many pieces a shard may be cut, the one that is mostly right first
_SAME = 0.02  # predictions that differ by less are taken to be equal
# simulated transfers up to which shards are cut into pieces: among thousands of ranks there are
# many anyway
_TRANSFERS = 16_384
_MANY = 64  # ranks from which on it takes too long to simulate them all for every candidate


def workload(
    operator: str,
    ranks: int,
    shape: tuple[int, int, int],
    dtype: str,
    out_dtype: str | None = None,
    packed: bool = True,
) -> Workload:
    """The workload of a benchmark: `shape` is (M, K, N), M rows shared out over the ranks as evenly
    as it goes.
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

    Equal ranks are planned once: of a rotation that changes nothing there is only the first part
    (`weft.predict.simulator`).
    """
    links = 1 if machine.hosts else max(1, min(machine.lanes, workload.ranks - 1))
    operator, ranks = (
        OPERATORS[workload.operator],
        tuple(range(planned(workload, variant, machine))),
    )
    where: dict[str, Any] = {
        "hosts": machine.hosts,
        "remote_reads": _reads_peers(machine),
        "links": links,
        "planned": ranks,
    }
    request = operator.request(workload, variant, **where)
    return _plan(operator.communicate if communicate else operator.plan, request, workload.rows)


@lru_cache(maxsize=64)
def _plan(planner: Callable[[Request], Plan], request: Request, rows: tuple[int, ...]) -> Plan:
    made = bind(planner(request), rows)
    return made if request.hosts is None else lower_to_messages(made, request.hosts)


def planned(workload: Workload, variant: Variant, machine: Machine) -> int:
    """How many ranks have to be simulated: those of one group if all ranks do the same, else all."""
    equal = (
        len(set(workload.rows)) == 1
        and variant.algorithm not in OPERATORS[workload.operator].asymmetric
    )
    group = machine.group(workload.ranks)
    return group if equal and workload.ranks % group == 0 else workload.ranks


def time(
    workload: Workload, variant: Variant, machine: Machine, communicate: bool = False
) -> float:
    """Predicted seconds of a variant, or of its communication alone."""
    buffers = OPERATORS[workload.operator].buffers(workload)
    return seconds(plan(workload, variant, machine, communicate), machine, buffers, workload.packed)


def trace(workload: Workload, variant: Variant, machine: Machine, title: str) -> Trace:
    """What would run when; of equal ranks the first."""
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
    """The variants that the machine's engine could run, or those of one algorithm; of equally fast
    ones the first is taken.

    Those in which ranks differ are left out where there are many, unless they are asked for.
    """
    operator, largest = OPERATORS[workload.operator], max(1, *workload.rows)
    most = max(1, _TRANSFERS // (workload.ranks * machine.group(workload.ranks)))
    sizes = (
        [chunk_rows]
        if chunk_rows
        else [-(-largest // pieces) for pieces in _CUTS if pieces <= most]
    )
    found = []
    for name in dict.fromkeys((operator.baseline, *operator.predicted)):
        if algorithm not in ("auto", name) or (
            name in operator.moves_nothing and not _reads_peers(machine)
        ):
            continue
        if machine.hosts is not None and name in operator.shared_memory_only:
            continue
        if algorithm == "auto" and name in operator.asymmetric and workload.ranks > _MANY:
            continue
        orders = ORDERS if name in operator.ordered and workload.ranks > 2 else ORDERS[:1]
        cuts = dict.fromkeys(operator.pieces(workload.rows, name, size) for size in sizes)
        found += [Variant(name, pieces, order) for pieces in cuts for order in orders]
    return found


def _reads_peers(machine: Machine) -> bool:
    """Whether products and sums can read what lies on peers. What they read does not pass an
    emulated link, so not beside one.
    """
    return machine.in_place and not machine.links[-1].idle and machine.hosts is None


class Forecast(NamedTuple):
    """Predicted seconds of a benchmark's views.

    `ways` has the fastest variant of each algorithm and order with its time, the fastest of all
    first; `communicate` is that of the fastest that overlaps.
    """

    compute: float
    communicate: float
    sequential: float
    ways: list[tuple[Variant, float]]


def forecast(
    workload: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> Forecast:
    """Predict a workload, over all candidates or those of one algorithm."""
    baseline = OPERATORS[workload.operator].baseline
    ways = rank(workload, machine, algorithm, chunk_rows)
    [(_, sequential), *_] = rank(workload, machine, baseline)
    moving = next((variant for variant, _ in ways if variant.algorithm != baseline), ways[0][0])
    return Forecast(
        compute(workload, machine),
        time(workload, moving, machine, communicate=True),
        sequential,
        ways,
    )


def rank(
    workload: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> list[tuple[Variant, float]]:
    """Of the `candidates` the fastest of each algorithm and order, with its predicted seconds, the
    fastest first.

    Where predictions are all but equal the more usual number of pieces comes first, and then the
    algorithm that the operator names first; the baseline comes last.
    """
    found: dict[tuple[str, str], tuple[Variant, float]] = {}
    for variant in candidates(workload, machine, algorithm, chunk_rows):
        took, kind = time(workload, variant, machine), (variant.algorithm, variant.order)
        if kind not in found or took < found[kind][1] * (1 - _SAME):
            found[kind] = variant, took
    equal = min(took for _, took in found.values()) * (1 + _SAME)
    operator = OPERATORS[workload.operator]
    preferred = [name for name in operator.algorithms if name != operator.baseline]
    preferred.append(operator.baseline)
    return sorted(
        found.values(),
        key=lambda one: (max(one[1], equal), preferred.index(one[0].algorithm), one[1]),
    )


def changes(machine: Machine) -> dict[str, Machine]:
    """Machines that are better in one respect each, by what is better."""
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


def _linked(machine: Machine, changed: Callable[[Link], Link]) -> Machine:
    """The machine with other links, that between hosts among them."""
    network = changed(machine.network) if machine.network else None
    return replace(machine, links=tuple(map(changed, machine.links)), network=network)


def savings(workload: Workload, variant: Variant, machine: Machine) -> list[tuple[str, float]]:
    """What each of `changes` would take off the time of a variant, from 0 to 1, the most first: the
    first names the bottleneck.
    """
    now = time(workload, variant, machine)
    saved = {
        what: 1 - time(workload, variant, changed) / now
        for what, changed in changes(machine).items()
    }
    return sorted(saved.items(), key=lambda change: -change[1])
