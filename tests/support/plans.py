"""Plans for tests: every schedule with all of its choices, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.engines import engine
from weft.engines.reference import Call
from weft.ops.operator import find
from weft.plan import Plan
from weft.plan.binding import bind
from weft.schedules.all_gather import all_gather
from weft.schedules.all_gather import eager as eager_all_gather
from weft.schedules.all_gather_matmul import ALGORITHMS, all_gather_matmul
from weft.schedules.all_reduce import ALGORITHMS as PLAIN_ALL_REDUCES
from weft.schedules.all_reduce import all_reduce
from weft.schedules.all_reduce import eager as eager_all_reduce
from weft.schedules.all_to_all import all_to_all
from weft.schedules.all_to_all import eager as eager_all_to_all
from weft.schedules.broadcast import broadcast
from weft.schedules.broadcast import eager as eager_broadcast
from weft.schedules.levels import flat, nested
from weft.schedules.operators import OPERATORS
from weft.schedules.reduce_scatter import eager as eager_reduce_scatter
from weft.schedules.reduce_scatter import reduce_scatter
from weft.schedules.workload import Operator, Request
from weft_tools.bench.ablation import own_rows_last, split_arrivals

COLUMNS = 3


def interleaved_gather(ranks: int, pieces: int, algorithm: str, **choices: Any) -> Plan:
    """All-gather whose ranks use the first piece of every peer first, and send over two links."""
    return all_gather(ranks, pieces, algorithm, order="interleaved", links=2, **choices)


def multiplied(
    ranks: int,
    pieces: int,
    algorithm: str,
    own_first: bool = True,
    joined: bool = True,
    **choices: Any,
) -> Plan:
    """All-gather + matmul."""
    plan = all_gather_matmul(Request(ranks, pieces, algorithm, **choices))
    plan = plan if joined else split_arrivals(plan)
    return plan if own_first else own_rows_last(plan)


def fused(operator: Operator, ranks: int, pieces: int, algorithm: str, **choices: Any) -> Plan:
    """A fused operator."""
    return operator.plan(Request(ranks, pieces, algorithm, **choices))


def flags_of(operator: Operator) -> list[str]:
    """The choices of a request to a fused operator."""
    if operator.exchanges == "out":
        return ["remote_reads"]
    return ["symmetric", "gathered"] if operator.several_weights else ["symmetric"]


def collected(ranks: int, pieces: int, algorithm: str, *, symmetric_a: bool) -> Plan:
    """A collective with only one algorithm; for broadcasts, `pieces` selects the source."""
    if algorithm == "reduce_scatter":
        return reduce_scatter(ranks, pieces, symmetric_a=symmetric_a)
    if algorithm == "broadcast":
        return broadcast(
            ranks,
            pieces,
            pieces % ranks,
            symmetric_a=symmetric_a,
            shared=symmetric_a and pieces > 1,
        )
    return all_to_all(ranks, pieces, symmetric_a=symmetric_a)


def eager_collective(ranks: int, pieces: int, algorithm: str, *, several: bool) -> Plan:
    """A collective of a few rows through eager buffers, among ranks that synchronize flat or by the
    most levels.
    """
    levels = nested(ranks, latency=0.0) if several else flat(ranks)
    if algorithm == "broadcast":
        return eager_broadcast(pieces % ranks, levels)
    return {
        "all_gather": eager_all_gather,
        "all_reduce": eager_all_reduce,
        "reduce_scatter": eager_reduce_scatter,
        "all_to_all": eager_all_to_all,
    }[algorithm](levels)


SCHEDULES: dict[Callable[..., Plan], tuple[Sequence[str], Sequence[str]]] = {
    all_gather: (("pull", "push", "ring", "kernel"), ("symmetric_a", "symmetric_gathered")),
    multiplied: (ALGORITHMS, ("gathered", "own_first", "joined")),
    interleaved_gather: (("push",), ("symmetric_gathered",)),
    **{
        partial(fused, operator): (operator.algorithms, flags_of(operator))
        for operator in OPERATORS.values()
    },
    **{
        partial(fused, operator, order="interleaved", links=links): (
            (*operator.ordered, operator.baseline),
            flags_of(operator),
        )
        for operator in OPERATORS.values()
        if operator.ordered
        for links in (1, 2)
    },
    partial(fused, OPERATORS["matmul_all_reduce"], links=2): (("push",), ("symmetric_out",)),
    all_reduce: (PLAIN_ALL_REDUCES, ("symmetric_a", "symmetric_out")),
    eager_collective: (
        ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "all_to_all"),
        ("several",),
    ),
    collected: (("reduce_scatter", "broadcast", "all_to_all"), ("symmetric_a",)),
}
"""Planners with their algorithms and flags."""


def every(ranks: int, pieces: int) -> list[Plan]:
    """The distinct plans of all schedules for a number of ranks and pieces."""
    found = [
        schedule(ranks, pieces, algorithm, **dict(zip(flags, choice, strict=True)))
        for schedule, (algorithms, flags) in SCHEDULES.items()
        for algorithm in algorithms
        for choice in product((False, True), repeat=len(flags))
    ]
    return [plan for i, plan in enumerate(found) if plan not in found[:i]]


@st.composite
def any_plan(draw: st.DrawFn, ranks: st.SearchStrategy[int] = st.integers(1, 16)) -> Plan:  # noqa: B008
    """Any plan of a schedule, with fewer pieces for many ranks."""
    schedule, many = draw(st.sampled_from([*SCHEDULES])), draw(ranks)
    algorithms, flags = SCHEDULES[schedule]
    chosen = {flag: draw(st.booleans()) for flag in flags}
    return schedule(
        many,
        draw(st.integers(1, 5 if many <= 4 else 2)),
        draw(st.sampled_from(algorithms)),
        **chosen,
    )


def row_counts(ranks: int) -> st.SearchStrategy[list[int]]:
    """Rows of each rank: ragged, with zeros, fewer for many ranks."""
    return st.lists(st.integers(0, 7 if ranks <= 4 else 2), min_size=ranks, max_size=ranks)


@st.composite
def bound_plan(draw: st.DrawFn, ranks: st.SearchStrategy[int] = st.integers(1, 16)) -> Plan:  # noqa: B008
    """Any plan, bound to rows."""
    plan = draw(any_plan(ranks))
    return bound(plan, draw(row_counts(plan.ranks)))


def bound(plan: Plan, rows: Sequence[int]) -> Plan:
    """A plan bound to rows: `rows` are the rows that each rank gives or keeps."""
    if plan.operator == "broadcast":
        return bind(plan, [max(rows)])
    if plan.operator == "all_to_all":
        return bind(
            plan,
            [share if odd else 0 for r, share in enumerate(rows) for odd in _odd(r, len(rows))],
        )
    return bind(plan, rows)


def _odd(rank: int, ranks: int) -> list[int]:
    """For each rank whether its distance is odd: these ranks get the rows of an all-to-all, in
    equal shares.
    """
    return [(rank + other) % 2 for other in range(ranks)]


def call(plan: Plan, seed: int) -> Call:
    """A call with random whole numbers, whose products and sums float64 holds exactly."""
    numbers = torch.Generator().manual_seed(seed)

    def matrix(rows: int) -> Tensor:
        return torch.randint(-(2**20), 2**20, (rows, COLUMNS), generator=numbers).double()

    inputs = [{"a": matrix(rows)} for rows in plan.buffers["a"].rows]
    return Call(
        plan, inputs, [dict.fromkeys(["out", *plan.buffers], matrix(COLUMNS)) for _ in inputs]
    )


def expected(call: Call) -> list[dict[str, Tensor]]:
    """The results of a call's operator, computed without a plan."""
    plan, inputs = call.plan, [inputs["a"] for inputs in call.inputs]
    gathered = torch.cat(inputs)
    kept = plan.buffers["out"].rows if "out" in plan.buffers else ()
    if plan.operator in OPERATORS:
        weights = [each["out"] for each in call.weights]
        reference = find(plan.operator).reference
        results = reference(inputs, weights, kept)
        if plan.operator == "all_to_all_matmul_all_to_all":  # its parts may be of any sizes
            parts = [rows // plan.ranks for rows in plan.buffers["inbox"].rows]
            results = [
                torch.cat([x @ b for x, b in zip(a.split(parts), weights, strict=True)])
                for a in inputs
            ]
        meaning = [{"out": result, "gathered": gathered} for result in results]
        if plan.operator == "all_to_all_matmul":  # a product by one is the rows themselves
            ones = [torch.eye(COLUMNS).double()] * plan.ranks
            arrived = reference(inputs, ones, kept)
            for each, rows in zip(meaning, arrived, strict=True):
                each["gathered"] = rows
    elif plan.operator == "reduce_scatter":
        meaning = [{"out": block} for block in torch.split(sum(inputs), kept)]
    elif plan.operator == "all_reduce":
        meaning = [{"out": sum(inputs)} for _ in inputs]
    elif plan.operator == "broadcast":
        meaning = [{"out": gathered[:rows]} for rows in kept]
    elif plan.operator == "all_to_all":
        shares = [
            [len(a) // sum(odd) if x else 0 for x in odd]
            for a, odd in ((a, _odd(r, plan.ranks)) for r, a in enumerate(inputs))
        ]
        blocks = [torch.split(a, share) for a, share in zip(inputs, shares, strict=True)]
        meaning = [
            {"out": torch.cat([of_rank[p] for of_rank in blocks])} for p in range(plan.ranks)
        ]
    else:
        meaning = [{"gathered": gathered} for _ in inputs]
    outputs = [name for name, buffer in plan.buffers.items() if buffer.role == "output"]
    return [{name: of_rank[name] for name in outputs} for of_rank in meaning]


def equal(found: Sequence[dict[str, Tensor]], wanted: Sequence[dict[str, Tensor]]) -> bool:
    """Whether all ranks have the same outputs, bit by bit."""
    return len(found) == len(wanted) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, wanted, strict=True)
    )


def execute_unproved(
    world: weft.World, plan: Plan, tensors: dict[str, Tensor], rows: Sequence[int] = ()
) -> None:
    """Execute a plan that `Engine.execute` would refuse, since it is not right or promises no result:
    to test the errors of engines.
    """
    engine(world).program(plan, tensors, rows).run(tensors, rows, {})
