"""What an operator would take on a machine: its plans under the simulator, the figures of a benchmark, and which way is fastest.

A `Case` is what is to be done and a `Candidate` one way to do it. `times` predicts a benchmark's views, `choose` the fastest
candidate, `limits` what holds it up. Plans and figures are those of the real operators and benchmarks; only the engine differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from weft.plan import Plan
from weft.plan.messages import lower_to_messages
from weft.plan.trace import Trace
from weft.predict.machine import Link, Machine
from weft.predict.simulator import Rows, seconds, simulate
from weft.schedules import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from weft.schedules.all_gather import all_gather
from weft.schedules.common import split, without_products
from weft.schedules.operators import SHARED_MEMORY_ONLY

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ALGORITHMS: Mapping[str, tuple[str, ...]] = {  # no machine says yet how fast products write to another's memory, as in put
    "all_gather_matmul": all_gather_matmul.ALGORITHMS,
    "matmul_reduce_scatter": tuple(name for name in matmul_reduce_scatter.ALGORITHMS if name != "put"),
    "matmul_all_reduce": tuple(name for name in matmul_all_reduce.ALGORITHMS if name != "put"),
}
ORDERS = ("peer", "interleaved")
PIECES = (16, 8, 32, 4, 64, 1)
"""Into how many pieces a shard may be cut, the one that is mostly right first."""
_PREFERRED = ("direct", "push", "pull", "ring", "one_shot", "two_shot", "sequential")
_SAME = 0.02  # predictions that differ by less are taken to be equal

UNEQUAL = {
    ("matmul_reduce_scatter", "ring"),  # its sums begin at rank 0
    ("matmul_all_reduce", "ring"),
    ("all_gather_matmul", "pull"),  # it joins products of adjacent peers, which for most ranks are not all peers
}
"""Algorithms in which ranks differ even where their rows do not."""
_TRANSFERS = 16_384  # simulated transfers up to which shards are cut into pieces: among thousands of ranks there are many anyway
_MANY = 64  # ranks from which on it takes too long to simulate them all for every candidate


class Case(NamedTuple):
    """What is to be done: `operator` on ranks with these `rows`, each product by (K, N).

    `rows` are those that each rank gives (all_gather_matmul) or keeps. `symmetric`: the input lies in symmetric memory.
    """

    operator: str
    rows: tuple[int, ...]
    k: int
    n: int
    dtype: str
    out_dtype: str
    packed: bool = True
    symmetric: bool = True

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def buffers(self) -> dict[str, Rows]:
        """What the buffers of its plans hold."""
        given, result = Rows(self.k, self.dtype), Rows(self.n, self.out_dtype)
        if self.operator == "all_gather_matmul":
            return {**dict.fromkeys(("a", "staged", "inbox", "gathered"), given), "out": result}
        wide = "float64" if self.dtype == "float64" else "float32"
        product = Rows(self.n, "bfloat16" if self.dtype == self.out_dtype == "bfloat16" else wide)
        return {
            "a": given,
            "partial": product,
            "hosted": product,
            "inbox": product,
            "running": Rows(self.n, wide),
            "summed": result,
            "out": result,
        }


class Candidate(NamedTuple):
    """A way to do it: the algorithm, the rows of a piece (all where it has none), and the order of a push."""

    algorithm: str
    chunk_rows: int
    order: str = "peer"

    def __str__(self) -> str:
        return self.algorithm + (" interleaved" if self.order == "interleaved" else "")


def case(
    operator: str, ranks: int, shape: tuple[int, int, int], dtype: str, out_dtype: str | None = None, packed: bool = True
) -> Case:
    """The case of a benchmark: `shape` is (M, K, N), M rows shared out over the ranks as evenly as it goes."""
    return Case(operator, tuple(split(shape[0], ranks)), shape[1], shape[2], dtype, out_dtype or dtype, packed)


def plan(case: Case, way: Candidate, machine: Machine, communicate: bool = False) -> Plan:
    """The plan that an engine of the machine would execute, or that of its communication alone, as benchmarks measure it.

    Equal ranks are planned once: of a rotation that changes nothing there is only the first part (`weft.predict.simulator`).
    """
    links = max(1, min(machine.lanes, case.ranks - 1))
    return _plan(case, way, planned(case, way, machine), links, _reads_peers(machine), machine.hosts, communicate)


@lru_cache(maxsize=64)
def _plan(
    case: Case, way: Candidate, ranks_planned: int, links: int, remote_reads: bool, hosts: tuple[int, ...] | None, communicate: bool
) -> Plan:
    if hosts is not None:
        return lower_to_messages(
            _written(case, way, {"ranks_planned": ranks_planned, "hosts": hosts}, 1, False, communicate), hosts
        )
    return _written(case, way, {"ranks_planned": ranks_planned}, links, remote_reads, communicate)


def _written(case: Case, way: Candidate, options: dict[str, Any], links: int, remote_reads: bool, communicate: bool) -> Plan:
    options = {"chunk_rows": way.chunk_rows, **options}
    if case.operator == "matmul_all_reduce":
        made = matmul_all_reduce.matmul_all_reduce(case.rows, way.algorithm, remote_reads=remote_reads, **options)
        return without_products(made) if communicate else made
    if way.algorithm in ("push", "sequential"):
        options |= {"order": way.order, "links": links}
    if case.operator == "matmul_reduce_scatter":
        made = matmul_reduce_scatter.matmul_reduce_scatter(case.rows, way.algorithm, remote_reads=remote_reads, **options)
        return without_products(made) if communicate else made
    if communicate:
        moving = {"direct": "pull", "sequential": "push"}.get(way.algorithm, way.algorithm)
        return all_gather(case.rows, moving, symmetric_a=True, symmetric_gathered=True, **options)
    return all_gather_matmul.all_gather_matmul(case.rows, way.algorithm, symmetric_a=case.symmetric, **options)


def planned(case: Case, way: Candidate, machine: Machine) -> int:
    """How many ranks have to be simulated: those of one group if all ranks do the same, else all."""
    equal = len(set(case.rows)) == 1 and (case.operator, way.algorithm) not in UNEQUAL
    group = machine.group(case.ranks)
    return group if equal and case.ranks % group == 0 else case.ranks


def time(case: Case, way: Candidate, machine: Machine, communicate: bool = False) -> float:
    """Predicted seconds of the case done this way, or of its communication alone."""
    return seconds(plan(case, way, machine, communicate), machine, case.buffers, case.packed)


def trace(case: Case, way: Candidate, machine: Machine, title: str = "") -> Trace:
    """What would run when; of equal ranks the first."""
    return simulate(plan(case, way, machine), machine, case.buffers, case.packed, title or str(way))


def compute(case: Case, machine: Machine) -> float:
    """Predicted seconds of the product alone, over all rows."""
    return machine.launch_us * 1e-6 + machine.product(sum(case.rows), case.k, case.n, case.dtype, case.packed)


def candidates(case: Case, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None) -> list[Candidate]:
    """The ways in which the machine's engine could do it, or those of one algorithm; of equally fast ones the first is taken.

    Ways in which ranks differ are left out where there are many, unless they are asked for.
    """
    largest = max(1, *case.rows)
    most = _TRANSFERS // (case.ranks * machine.group(case.ranks))
    sizes = (
        [chunk_rows] if chunk_rows else list(dict.fromkeys(-(-largest // pieces) for pieces in PIECES if pieces <= max(1, most)))
    )
    found = []
    for name in ("sequential", *(name for name in ALGORITHMS[case.operator] if name != "sequential")):
        if algorithm not in ("auto", name) or (name == "direct" and not _reads_peers(machine)):
            continue
        if machine.hosts is not None and name in SHARED_MEMORY_ONLY:
            continue
        if algorithm == "auto" and (case.operator, name) in UNEQUAL and case.ranks > _MANY:
            continue
        whole = name == "sequential" or (name, case.operator) == ("direct", "all_gather_matmul")
        orders = ORDERS if name == "push" and case.ranks > 2 else ORDERS[:1]
        found += [Candidate(name, size, order) for size in ([largest] if whole else sizes) for order in orders]
    return found


def _reads_peers(machine: Machine) -> bool:
    """Whether products and sums can read what lies on peers. What they read does not pass an emulated link, so not beside one."""
    return machine.in_place and not machine.links[-1].idle and machine.hosts is None


class Forecast(NamedTuple):
    """Predicted seconds of a benchmark's views.

    `ways` has the fastest candidate of each algorithm and order with its time, the fastest of all first; `communicate` is that of
    the fastest that overlaps.
    """

    compute: float
    communicate: float
    sequential: float
    ways: list[tuple[Candidate, float]]

    @property
    def best(self) -> Candidate:
        return self.ways[0][0]

    @property
    def pipelined(self) -> float:
        return self.ways[0][1]


def forecast(case: Case, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None) -> Forecast:
    """Predict a case, over all candidates or those of one algorithm."""
    ways = rank(case, machine, candidates(case, machine, algorithm, chunk_rows))
    [(_, sequential)] = rank(case, machine, candidates(case, machine, "sequential"))
    moving = next((way for way, _ in ways if way.algorithm != "sequential"), ways[0][0])
    return Forecast(compute(case, machine), time(case, moving, machine, communicate=True), sequential, ways)


def rank(case: Case, machine: Machine, ways: list[Candidate]) -> list[tuple[Candidate, float]]:
    """The fastest way of each algorithm and order, with its predicted seconds, the fastest first.

    Where predictions are all but equal the more usual number of pieces comes first, and the way that needs fewer transfers; what
    overlaps comes before what does not.
    """
    found: dict[tuple[str, str], tuple[Candidate, float]] = {}
    for way in ways:
        took, kind = time(case, way, machine), (way.algorithm, way.order)
        if kind not in found or took < found[kind][1] * (1 - _SAME):
            found[kind] = way, took
    equal = min(took for _, took in found.values()) * (1 + _SAME)
    return sorted(found.values(), key=lambda way: (max(way[1], equal), _PREFERRED.index(way[0].algorithm), way[1]))


def changes(machine: Machine) -> dict[str, Machine]:
    """Machines that are better in one respect each, by what is better."""
    faster = {
        name: replace(p, tflops=2 * p.tflops, weight_gbs=2 * p.weight_gbs, fixed_us=p.fixed_us / 2)
        for name, p in machine.products.items()
    }
    return {
        "products twice as fast": replace(machine, products=faster),
        "links of twice the bandwidth": _linked(machine, lambda link: replace(link, gbs=2 * link.gbs)),
        "memory twice as fast": replace(machine, memory_gbs=2 * machine.memory_gbs, reduce_gbs=2 * machine.reduce_gbs),
        "no latencies": replace(
            _linked(machine, lambda link: replace(link, latency_us=0.0)),
            launch_us=0.0,
            lane_us=0.0,
            wake_us=0.0,
            turn_us=0.0,
            notify_us=0.0,
        ),
        "no interference": replace(
            _linked(machine, lambda link: replace(link, core_gbs=None)), compute_slowdown=1.0, communicate_slowdown=1.0
        ),
    }


def _linked(machine: Machine, changed: Callable[[Link], Link]) -> Machine:
    """The machine with other links, that between hosts among them."""
    network = changed(machine.network) if machine.network else None
    return replace(machine, links=tuple(map(changed, machine.links)), network=network)


def savings(case: Case, way: Candidate, machine: Machine) -> list[tuple[str, float]]:
    """What each of `changes` would take off the time of this way, from 0 to 1, the most first: the first names the bottleneck."""
    now = time(case, way, machine)
    saved = {what: 1 - time(case, way, changed) / now for what, changed in changes(machine).items()}
    return sorted(saved.items(), key=lambda change: -change[1])
