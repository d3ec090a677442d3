"""Rows that cross to a host once: the plans of all-gather + matmul + reduce-scatter of uneven rows,
for every matrix of sizes, on one host and on several, and what the proof refuses of them.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.over_hosts import groupings

from weft.engines.reference import Call, run
from weft.experts import dispatch
from weft.plan import Copy
from weft.plan.binding import bind
from weft.plan.messages import lower_to_messages
from weft.plan.proof import accepts, problems, verify
from weft.plan.sized import problems as problems_of_sizes
from weft.schedules.counts import counts
from weft.schedules.levels import flat
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request
from weft_tools.laboratory.mutants import deleted, moved

OPERATOR = OPERATORS["all_gather_matmul_reduce_scatter"]
WORLDS = [
    (0,),
    (0, 0),
    (0, 0, 0, 0),
    (0, 1),
    (0, 1, 2),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 1),
    (0, 1, 1),
    (0, 0, 0, 1, 1, 1),
    (0, 0, 1, 1, 2, 2),
    (0, 0, 0, 1, 2, 2),
]
"""The hosts of ranks: one, several of equally many ranks, and of different numbers."""
worlds = pytest.mark.parametrize("hosts", WORLDS, ids=str)
algorithms = pytest.mark.parametrize("algorithm", OPERATOR.algorithms)


@cache
def plan_of(hosts, algorithm, pieces=2, **choices):
    several = hosts if max(hosts) else None
    choices = {"uneven": True, **choices}
    return OPERATOR.plan(Request(len(hosts), pieces, algorithm, hosts=several, **choices))


@worlds
@algorithms
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_right_for_every_matrix(hosts, algorithm, pieces):
    several = hosts if max(hosts) else None
    few = counts("x", flat(len(hosts)), several)
    plan = plan_of(hosts, algorithm, pieces)
    assert problems_of_sizes(few, plan, several) == []
    verify(lower_to_messages(plan, hosts))
    verify(plan_of(hosts, algorithm, pieces, uneven=False), hosts=several)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_that_cannot_be_read_in_place(ranks):
    plan = plan_of((0,) * ranks, "gathered", remote_reads=False)
    assert problems_of_sizes(counts("x", flat(ranks)), plan) == []
    assert not any(src.rank != rank for rank, i in plan.instructions() for src in summed(i))


def summed(instruction):
    return getattr(instruction, "srcs", ())


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 1), (0, 0, 1, 1)], ids=str)
@algorithms
def test_no_instruction_is_too_much(hosts, algorithm):
    plan = plan_of(hosts, algorithm)
    for change, changed in deleted(plan):
        assert problems(changed) or problems(lower_to_messages(changed, hosts)), change


@algorithms
def test_moved_instructions_are_refused_or_harmless(algorithm):
    """An accepted change has the results of the plan, in random orders."""
    hosts = (0, 0, 1)
    plan = plan_of(hosts, algorithm)
    changed = random.Random(0).sample([*moved(plan)], 60)
    refused = [change for change, mutant in changed if not accepts(mutant)]
    assert len(refused) > len(changed) / 3
    matrix = [[3, 1], [0, 4], [2, 2]]
    for change, mutant in changed:
        if change not in refused:
            inputs, weights = numbers(matrix)
            found = results(mutant, matrix, inputs, weights, order=random.Random(1))
            assert all(map(torch.equal, found, defined(hosts, matrix, inputs, weights))), change


def numbers(matrix, columns=3):
    """Rows of each rank and a weight of each, of whole numbers."""
    g = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randint(-99, 99, shape, generator=g).double()

    return [made(sum(row), columns) for row in matrix], [made(columns, columns) for _ in matrix]


def results(plan, matrix, inputs, weights, order=None):
    bound = bind(plan, [count for row in matrix for count in row])
    named = [{"out": b} for b in weights]
    (found,) = run(Call(bound, [{"a": a} for a in inputs], named), order=order)
    return [each["out"] for each in found]


def defined(hosts, matrix, inputs, weights):
    """Of the rows for each host the sum of the products by the weights of its ranks."""
    total = [sum(b for b, of in zip(weights, hosts, strict=True) if of == h) for h in {*hosts}]
    return [
        torch.cat([part @ b for part, b in zip(a.split(row), total, strict=True)])
        for a, row in zip(inputs, matrix, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(st.data(), groupings(), st.sampled_from(OPERATOR.algorithms), st.integers(1, 3))
def test_any_matrix(data, hosts, algorithm, pieces):
    row = st.lists(st.integers(0, 6), min_size=max(hosts) + 1, max_size=max(hosts) + 1)
    matrix = data.draw(st.lists(row, min_size=len(hosts), max_size=len(hosts)))
    inputs, weights = numbers(matrix)
    plan = plan_of(hosts, algorithm, pieces)
    for each in (plan, lower_to_messages(plan, hosts)):
        found = results(each, matrix, inputs, weights, order=random.Random(len(matrix)))
        assert all(map(torch.equal, found, defined(hosts, matrix, inputs, weights)))


def crossing(plan, matrix, hosts):
    """The rows that a plan moves to other hosts."""
    bound = bind(plan, [count for row in matrix for count in row])
    return sum(
        i.src.rows
        for _, i in bound.instructions()
        if isinstance(i, Copy) and hosts[i.src.rank] != hosts[i.dst.rank]
    )


@algorithms
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 1, 0, 1)], ids=str)
def test_a_row_crosses_once_each_way(hosts, algorithm):
    """However many ranks of a host have experts that its token chose."""
    ranks, g = range(len(hosts)), torch.Generator().manual_seed(0)
    sizes = [2] * len(hosts)
    chosen = [torch.rand(50, 12, generator=g)[:, : 2 * len(hosts)].topk(3).indices for _ in ranks]
    of_ranks = [dispatch.find(each, sizes, hosts).counts for each in chosen]
    of_hosts = [dispatch.find(each, sizes, hosts, True).counts for each in chosen]
    once = sum(
        len({hosts[expert // 2] for expert in token} - {hosts[rank]})
        for rank in ranks
        for token in chosen[rank].tolist()
    )
    plan = plan_of(hosts, algorithm)
    assert crossing(plan, of_hosts, hosts) == 2 * once
    push = OPERATORS["all_to_all_matmul_all_to_all"].plan(
        Request(len(hosts), 2, "push", hosts=hosts, uneven=True)
    )
    several = sum(
        count
        for rank, row in enumerate(of_ranks)
        for count, host in zip(row, hosts, strict=True)
        if host != hosts[rank]
    )
    assert crossing(push, of_ranks, hosts) == 2 * several > 2.2 * once
