"""The plans that tests go through: every schedule with every choice it offers, and what each must compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.engines.reference import Call
from weft.plan import Plan
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather import eager as eager_all_gather
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.all_reduce import ALGORITHMS as PLAIN_ALL_REDUCES
from weft.schedules.all_reduce import all_reduce
from weft.schedules.all_reduce import eager as eager_all_reduce
from weft.schedules.all_to_all import all_to_all
from weft.schedules.broadcast import broadcast
from weft.schedules.broadcast import eager as eager_broadcast
from weft.schedules.levels import flat, nested
from weft.schedules.matmul_all_reduce import ALGORITHMS as ALL_REDUCES
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.matmul_reduce_scatter import ALGORITHMS as REDUCE_SCATTERS
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter
from weft.schedules.reduce_scatter import eager as eager_reduce_scatter
from weft.schedules.reduce_scatter import reduce_scatter

COLUMNS = 3


def interleaved_gather(rows: Sequence[int], algorithm: str, **choices: Any) -> Plan:
    """All-gather whose ranks use the first chunk of every peer first, and send over two links."""
    return all_gather(rows, algorithm, order="interleaved", links=2, **choices)


def interleaved(rows: Sequence[int], algorithm: str, **choices: Any) -> Plan:
    """All-gather + matmul in that order."""
    return all_gather_matmul(rows, algorithm, order="interleaved", **choices)


def linked(rows: Sequence[int], algorithm: str, **choices: Any) -> Plan:
    """All-gather + matmul over two links."""
    return all_gather_matmul(rows, algorithm, links=2, **choices)


def scattered(rows: Sequence[int], algorithm: str, **choices: Any) -> Plan:
    """Matmul + reduce-scatter that makes the first piece for every peer first, over two links."""
    return matmul_reduce_scatter(rows, algorithm, order="interleaved", links=2, **choices)


def reduced(rows: Sequence[int], algorithm: str, *, chunk_rows: int, symmetric_a: bool, symmetric_out: bool) -> Plan:
    """The all-reduce of as many rows as there are in all."""
    return all_reduce(sum(rows), len(rows), algorithm, symmetric_a=symmetric_a, symmetric_out=symmetric_out, chunk_rows=chunk_rows)


def collected(rows: Sequence[int], algorithm: str, *, chunk_rows: int, symmetric_a: bool) -> Plan:
    """A collective that has but one algorithm; `chunk_rows` tells broadcasts apart."""
    if algorithm == "reduce_scatter":
        return reduce_scatter(rows, symmetric_a=symmetric_a, chunk_rows=chunk_rows)
    if algorithm == "broadcast":
        choices = {"symmetric_a": symmetric_a, "shared": symmetric_a and chunk_rows > 2, "chunk_rows": chunk_rows}
        return broadcast(max(rows), len(rows), chunk_rows % len(rows), **choices)
    counts = [[share if odd else 0 for odd in _odd(r, len(rows))] for r, share in enumerate(rows)]
    return all_to_all(counts, symmetric_a=symmetric_a, chunk_rows=chunk_rows)


def handed_out(rows: Sequence[int], algorithm: str, *, chunk_rows: int, several: bool) -> Plan:
    """A collective of a few rows through eager buffers, among ranks that meet at once or by as many levels as there can be."""
    levels = nested(len(rows), hop=0.0) if several else flat(len(rows))
    if algorithm == "all_gather":
        return eager_all_gather(tuple(max(1, n) for n in rows), levels)
    if algorithm == "all_reduce":
        return eager_all_reduce(max(1, *rows), levels)
    if algorithm == "reduce_scatter":
        return eager_reduce_scatter(tuple(max(1, n) for n in rows), levels)
    return eager_broadcast(max(1, *rows), chunk_rows % len(rows), levels)


def _odd(rank: int, ranks: int) -> list[int]:
    """Of each rank whether it is an odd number away: these get the rows of an all-to-all, in equal shares."""
    return [(rank + other) % 2 for other in range(ranks)]


SCHEDULES: dict[Callable[..., Plan], tuple[Sequence[str], Sequence[str]]] = {
    all_gather: (("pull", "push", "ring"), ("symmetric_a", "symmetric_gathered")),
    all_gather_matmul: (ALGORITHMS, ("symmetric_a", "gathered", "own_first", "joined")),
    interleaved_gather: (("push",), ("symmetric_gathered",)),
    interleaved: (("push", "sequential"), ("gathered",)),
    linked: (("push", "sequential"), ("gathered", "joined")),
    matmul_reduce_scatter: (REDUCE_SCATTERS, ("remote_reads",)),
    scattered: (("push", "sequential"), ("remote_reads",)),
    matmul_all_reduce: (ALL_REDUCES, ("remote_reads",)),
    reduced: (PLAIN_ALL_REDUCES, ("symmetric_a", "symmetric_out")),
    handed_out: (("all_gather", "all_reduce", "broadcast", "reduce_scatter"), ("several",)),
    collected: (("reduce_scatter", "broadcast", "all_to_all"), ("symmetric_a",)),
}
"""Planners with their algorithms and flags."""


def every(rows: Sequence[int], chunk_rows: int) -> list[Plan]:
    """The distinct plans that all schedules make of these sizes."""
    found = [
        schedule(rows, algorithm, chunk_rows=chunk_rows, **dict(zip(flags, choice, strict=True)))
        for schedule, (algorithms, flags) in SCHEDULES.items()
        for algorithm in algorithms
        for choice in product((False, True), repeat=len(flags))
    ]
    return [plan for i, plan in enumerate(found) if plan not in found[:i]]


@st.composite
def row_counts(draw: st.DrawFn, max_ranks: int = 16) -> tuple[int, ...]:
    """Rows of each rank: ragged, with zeros, fewer where there are many ranks."""
    ranks = draw(st.integers(1, max_ranks))
    return tuple(draw(st.lists(st.integers(0, 7 if ranks <= 4 else 2), min_size=ranks, max_size=ranks)))


@st.composite
def any_plan(draw: st.DrawFn, rows: st.SearchStrategy[Sequence[int]] | None = None) -> Plan:
    """Any plan that a schedule can make."""
    schedule = draw(st.sampled_from([*SCHEDULES]))
    algorithms, flags = SCHEDULES[schedule]
    chosen = {flag: draw(st.booleans()) for flag in flags}
    sizes = draw(row_counts() if rows is None else rows)
    return schedule(sizes, draw(st.sampled_from(algorithms)), chunk_rows=draw(st.integers(1, 8)), **chosen)


def call(plan: Plan, seed: int) -> Call:
    """A call with random whole numbers, whose products and sums float64 holds exactly."""
    numbers = torch.Generator().manual_seed(seed)

    def matrix(rows: int) -> Tensor:
        return torch.randint(-(2**20), 2**20, (rows, COLUMNS), generator=numbers).double()

    inputs = [{"a": matrix(rows)} for rows in plan.buffers["a"].rows]
    return Call(plan, inputs, [dict.fromkeys(["out", *plan.buffers], matrix(COLUMNS)) for _ in inputs])


def expected(call: Call) -> list[dict[str, Tensor]]:
    """What the operator of a call means, without any plan."""
    plan, inputs = call.plan, [inputs["a"] for inputs in call.inputs]
    gathered = torch.cat(inputs)
    kept = plan.buffers["out"].rows if "out" in plan.buffers else ()
    match plan.operator:
        case "matmul_reduce_scatter" | "matmul_all_reduce":
            terms = [a @ weights["out"] for a, weights in zip(inputs, call.weights, strict=True)]
        case "reduce_scatter" | "all_reduce":
            terms = inputs
        case _:
            terms = []
    if plan.operator.endswith("reduce_scatter"):
        meaning = [{"out": block} for block in torch.split(sum(terms), kept)]
    elif plan.operator.endswith("all_reduce"):
        meaning = [{"out": sum(terms)} for _ in inputs]
    elif plan.operator == "broadcast":
        meaning = [{"out": gathered[:rows]} for rows in kept]
    elif plan.operator == "all_to_all":
        shares = [
            [len(a) // sum(odd) if x else 0 for x in odd] for a, odd in ((a, _odd(r, plan.ranks)) for r, a in enumerate(inputs))
        ]
        blocks = [torch.split(a, share) for a, share in zip(inputs, shares, strict=True)]
        meaning = [{"out": torch.cat([of_rank[p] for of_rank in blocks])} for p in range(plan.ranks)]
    else:
        meaning = [{"gathered": gathered, "out": gathered @ weights["out"]} for weights in call.weights]
    outputs = [name for name, buffer in plan.buffers.items() if buffer.role == "output"]
    return [{name: of_rank[name] for name in outputs} for of_rank in meaning]


def equal(found: Sequence[dict[str, Tensor]], wanted: Sequence[dict[str, Tensor]]) -> bool:
    """Whether all ranks have the same outputs, bit by bit."""
    return len(found) == len(wanted) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, wanted, strict=True)
    )
