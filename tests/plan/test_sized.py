"""Sizes that are data: one matrix of counts gives every block its place, and what the proof refuses
of plans that would bind another.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engines.reference import Call, run
from weft.plan import Copy, Region
from weft.plan.binding import bind
from weft.plan.proof import verify
from weft.plan.sized import problems
from weft.schedules.all_to_all import all_to_all
from weft.schedules.counts import counts
from weft.schedules.exchanges import Blocks, Direction
from weft.schedules.levels import flat, nested
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Request
from weft_tools.laboratory.mutants import deleted, edited, places

DISPATCH, RETURN, VISIT = (
    OPERATORS[name]
    for name in ("all_to_all_matmul", "matmul_all_to_all", "all_to_all_matmul_all_to_all")
)
EXCHANGES = [
    (operator, algorithm)
    for operator in (DISPATCH, RETURN, VISIT)
    for algorithm in operator.algorithms
]
DIVISIONS = [
    *((number,) * ranks for ranks in (1, 2, 3, 4) for number in (1, 2)),
    (0, 2),
    (3, 1),
    (0, 1, 0),
    (2, 0, 1),
    (1, 0, 3, 0),
]
"""The experts of each rank."""
exchanges = pytest.mark.parametrize(
    ("operator", "algorithm"), EXCHANGES, ids=[f"{o.name} {name}" for o, name in EXCHANGES]
)


def uneven(operator, experts, algorithm, pieces=2, **choices):
    """The plan of an exchange whose sizes are data, of ranks with these numbers of experts."""
    return operator.plan(
        Request(len(experts), pieces, algorithm, experts=experts, uneven=True, **choices)
    )


@exchanges
@pytest.mark.parametrize("experts", DIVISIONS, ids=str)
def test_exchanges_are_right_for_every_matrix(operator, algorithm, experts):
    ranks, plan = len(experts), uneven(operator, experts, algorithm)
    several = nested(ranks, latency=0.0)
    for few in (counts("x", flat(ranks)), counts("x", several), counts("x", several, few=False)):
        assert problems(few, plan) == []
    if algorithm == "push" and operator is DISPATCH:
        assert problems(few, uneven(operator, experts, algorithm, gathered=True)) == []


@exchanges
@pytest.mark.parametrize("experts", [(2, 2, 2), (0, 2, 1), (0, 0, 2)], ids=str)
def test_between_hosts(operator, algorithm, experts):
    hosts = (0, 0, 1)
    plan = uneven(operator, experts, algorithm, hosts=hosts)
    assert problems(counts("x", flat(3), hosts), plan, hosts) == []


@exchanges
@pytest.mark.parametrize("experts", [(2, 2), (0, 2), (1, 0, 2)], ids=str)
def test_no_instruction_is_too_much(operator, algorithm, experts):
    plan = uneven(operator, experts, algorithm)
    for change, changed in deleted(plan):
        assert problems(counts("x", flat(len(experts))), changed), change


def test_a_plain_all_to_all_is_one():
    assert problems(counts("x", flat(3)), all_to_all(3, 2)) == []


PLAN = uneven(DISPATCH, (1, 1, 1), "push")
COUNTS = counts("x", flat(3))


def test_every_wait_and_every_count_is_needed():
    """Without one of them a rank would bind before it has all rows of the matrix."""
    for few in (COUNTS, counts("x", flat(3), few=False)):
        for change, changed in deleted(few):
            assert problems(changed, PLAN), change


def test_a_wrong_prefix():
    """A row of the matrix in the place of another, and the rows of a rank in another order than
    it counts them, would give blocks places that overlap.
    """
    for place, copy in places(COUNTS):
        if isinstance(copy, Copy) and copy.dst.buffer == "gathered":
            for row in {0, 1, 2} - {copy.dst.start}:
                elsewhere = replace(copy, dst=copy.dst._replace(start=row, stop=row + 1))
                assert problems(edited(COUNTS, place, elsewhere), PLAN)
    regions = [*COUNTS.result]
    of_next = [*regions[1:], regions[0]]
    swapped = {one: COUNTS.result[other] for one, other in zip(regions, of_next, strict=True)}
    assert problems(replace(COUNTS, result=swapped), PLAN) == [
        f"row {source} of the matrix of rank {rank} is not that of rank {source}"
        for rank in range(3)
        for source in range(3)
    ]
    a = PLAN.buffers["a"]
    turned = replace(a, blocks=tuple([*numbers[2:], *numbers[:2]] for numbers in a.blocks))
    assert problems(COUNTS, replace(PLAN, buffers={**PLAN.buffers, "a": turned})) == [
        f"a@{rank}[0:6] does not have the blocks of row {rank} of the matrix, in its order"
        for rank in range(3)
    ]


def test_a_transposed_matrix():
    """A rank that knows what it receives knows its own places, not those at its peers."""
    columns = all_to_all(3, 1)
    assert problems(columns, PLAN) == ["each rank has one row of counts, not 3"]
    a, out = PLAN.buffers["a"], PLAN.buffers["out"]
    given = replace(PLAN, buffers={**PLAN.buffers, "a": replace(a, blocks=out.blocks)})
    assert problems(COUNTS, given)[0].startswith("a@0[0:6] does not have the blocks of row 0")


def test_memory_that_is_used_again_before_it_was_read():
    """Counts travel in memory of which the next call's counts may be ahead."""
    through_workspace = counts("x", flat(3), few=False)
    for kind in ("wait", "notify"):
        found = [
            problems(mutant, PLAN)
            for change, mutant in deleted(through_workspace)
            if f"without {kind}" in change and "free" in change
        ]
        assert found, kind
        assert all(found), kind
    assert problems(replace(COUNTS, synchronizes=False), PLAN) == [
        "a plan with eager buffers must synchronize"
    ]


def test_a_block_with_two_places():
    inbox = PLAN.buffers["inbox"]
    twice = replace(inbox, blocks=tuple([*n[:-1], n[0]] for n in inbox.blocks))
    found = problems(COUNTS, replace(PLAN, buffers={**PLAN.buffers, "inbox": twice}))
    assert "a block has two places in inbox of rank 0" in found


@st.composite
def matrices(draw):
    """Numbers of experts of each rank and of pieces, and a matrix of counts of each way."""
    experts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    there, back = [
        [draw(st.lists(st.integers(0, 5), min_size=number, max_size=number)) for number in numbers]
        for numbers in ([sum(experts)] * len(experts), [len(experts) * n for n in experts])
    ]
    return tuple(experts), draw(st.integers(1, 3)), there, back


@given(matrices(), st.sampled_from(EXCHANGES), st.booleans())
@settings(max_examples=60)
def test_any_matrix(drawn, exchange, gathered):
    """Blocks are side by side at prefix sums, and the results are those of products and copies."""
    (experts, pieces, there, back), (operator, algorithm) = drawn, exchange
    matrix = back if operator is RETURN else there
    ranks, gathered = len(matrix), gathered and operator is DISPATCH
    plan = uneven(operator, experts, algorithm, pieces, gathered=gathered)
    verify(plan)
    sizes = [count for row in matrix for count in row]
    bound = bind(plan, sizes)
    blocks = [
        share
        for count, cut in zip(sizes, plan.pieces, strict=True)
        for share in (count // cut + (piece < count % cut) for piece in range(cut))
    ]
    for name, buffer in plan.buffers.items():
        for rank in range(ranks):
            ends = [0, *accumulate(blocks[number] for number in buffer.numbers(rank))]
            assert bound.buffers[name].rows[rank] == ends[-1]
            assert all(one <= other for one, other in pairwise(ends))
    made = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randint(-99, 99, shape, generator=made).double()

    inputs = [numbers(sum(row), 3) for row in matrix]
    name = "partial" if operator is RETURN else "out"
    weights = [[numbers(3, 3) for _ in range(number)] for number in experts]
    named = [{f"{name}{at or ''}": b for at, b in enumerate(own)} for own in weights]
    (results,) = run(Call(bound, [{"a": a} for a in inputs], named))
    definition = {DISPATCH.name: dispatch, RETURN.name: give_back, VISIT.name: visit}
    wanted = definition[operator.name](inputs, matrix, weights)
    assert all(torch.equal(one["out"], rows) for one, rows in zip(results, wanted, strict=True))
    if gathered:
        eye = [[torch.eye(3).double()] * number for number in experts]
        rows = dispatch(inputs, matrix, eye)
        assert all(torch.equal(one["gathered"], r) for one, r in zip(results, rows, strict=True))


def dispatch(inputs, matrix, weights):
    """The rows for each rank's weights, multiplied."""
    parts = [a.split(row) for a, row in zip(inputs, matrix, strict=True)]
    firsts = [0, *accumulate(map(len, weights))]
    return [
        joined(of[first + at] @ b for at, b in enumerate(own) for of in parts)
        for first, own in zip(firsts, weights, strict=False)
    ]


def give_back(inputs, matrix, weights):
    """The products of each rank's weights for every rank."""
    ranks = range(len(inputs))
    parts = [a.split(row) for a, row in zip(inputs, matrix, strict=True)]
    return [
        joined(
            parts[owner][at * len(ranks) + rank] @ b
            for owner in ranks
            for at, b in enumerate(weights[owner])
        )
        for rank in ranks
    ]


def joined(rows):
    return torch.cat([torch.empty(0, 3).double(), *rows])


def visit(inputs, matrix, weights):
    """The rows of each rank, each times the weight for which it is."""
    every = [b for own in weights for b in own]
    return [
        torch.cat([part @ b for part, b in zip(a.split(row), every, strict=True)])
        for a, row in zip(inputs, matrix, strict=True)
    ]


@given(matrices())
def test_what_returns_is_what_was_given(drawn):
    experts, _, there, back = drawn
    assert Direction(experts, back=True).received(Direction(experts).received(there)) == there
    assert Direction(experts).received(Direction(experts, back=True).received(back)) == back
    for direction, matrix in ((Direction(experts), there), (Direction(experts, back=True), back)):
        received = direction.received(matrix)
        assert [direction.parts(rank) for rank in range(len(experts))] == [
            (len(given), len(taken)) for given, taken in zip(matrix, received, strict=True)
        ]


def test_places_of_experts():
    of = Blocks(experts=(3, 0, 2), pieces=4, uneven=True)
    assert of.targets_first(0, "a", 2, 1, 1, 2) == Region(0, "a", 17, 18)
    assert of.experts_first(0, "out", 1, 2) == Region(0, "out", 28, 32)
    assert of.of_peer(0, "back", 2) == Region(0, "back", 12, 20)
    assert of.by_target(2, 2, 1) == 14
    assert of.by_expert(2, 1, 1) == 13
