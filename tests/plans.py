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
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.matmul_all_reduce import ALGORITHMS as ALL_REDUCES
from weft.schedules.matmul_all_reduce import matmul_all_reduce
from weft.schedules.matmul_reduce_scatter import ALGORITHMS as REDUCE_SCATTERS
from weft.schedules.matmul_reduce_scatter import matmul_reduce_scatter

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


SCHEDULES: dict[Callable[..., Plan], tuple[Sequence[str], Sequence[str]]] = {
    all_gather: (("pull", "push", "ring"), ("symmetric_a", "symmetric_gathered")),
    all_gather_matmul: (ALGORITHMS, ("symmetric_a", "gathered", "own_first", "joined")),
    interleaved_gather: (("push",), ("symmetric_gathered",)),
    interleaved: (("push", "sequential"), ("gathered",)),
    linked: (("push", "sequential"), ("gathered", "joined")),
    matmul_reduce_scatter: (REDUCE_SCATTERS, ("moved",)),
    scattered: (("push", "sequential"), ("moved",)),
    matmul_all_reduce: (ALL_REDUCES, ("moved",)),
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
    gathered = torch.cat([inputs["a"] for inputs in call.inputs])
    meaning = [{"gathered": gathered, "out": gathered @ weights["out"]} for weights in call.weights]
    if call.plan.operator in ("matmul_reduce_scatter", "matmul_all_reduce"):
        total = sum(inputs["a"] @ weights["out"] for inputs, weights in zip(call.inputs, call.weights, strict=True))
        kept = call.plan.buffers["out"].rows
        blocks = torch.split(total, kept) if call.plan.operator == "matmul_reduce_scatter" else [total] * len(kept)
        meaning = [{"out": block} for block in blocks]
    outputs = [name for name, buffer in call.plan.buffers.items() if buffer.role == "output"]
    return [{name: of_rank[name] for name in outputs} for of_rank in meaning]


def equal(found: Sequence[dict[str, Tensor]], wanted: Sequence[dict[str, Tensor]]) -> bool:
    """Whether all ranks have the same outputs, bit by bit."""
    return len(found) == len(wanted) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, wanted, strict=True)
    )
