"""Sizes that are data: the rows of a plan's shards are numbers that ranks know only when they make
the call, and exchange by a separate plan.

Such a call is two plans. The first, of *counts*, brings the row of numbers of each rank to every
rank, so all have one matrix, with a row of each rank. Then each rank binds the second plan by it:
its shards have the numbers of the matrix, row after row, and the rows of an input on a rank are
those that this rank has counted. A rank that gives fewer parts than others has fewer numbers, which
are the first ones of its row.

*Lemma.* Every rank knows the place of each block on each rank, and blocks of different names are
disjoint there, also empty ones. For a block begins where the blocks before it in its buffer end: at
a prefix sum of numbers of one matrix, which are not negative. Prefix sums of the same numbers in
the same order are equal on all ranks, so writer and reader of a block mean the same rows; and of
two blocks of a buffer one ends where the other begins, or before. Which blocks a buffer has, and in
which order, is the plan's and not the data's.

So the proof of the second plan, which is over names of blocks, holds for all numbers, and needs of
the first plan only that every rank ends it with the same matrix; and nothing else is read at run
time. `problems` checks what the lemma needs of both plans, and proves the second alone and both one
after the other, twice: so the memory in which counts travel is not written again before all have
read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from weft.plan import proof
from weft.plan.language import ANY_BLOCK, ROW, Buffer, Plan, Region
from weft.plan.values import Term


def problems(counts: Plan, plan: Plan, hosts: Sequence[int] | None = None) -> list[str]:
    """The defects of a call that binds `plan` by the matrix that `counts` exchanges; empty if it is
    correct for every matrix. `hosts` are those of the ranks, as `weft.verify` takes them.
    """
    found = [*_matrix(counts), *_rows(plan), *_places(plan)]
    if found:
        return found
    alone = proof.problems(plan, hosts=hosts)  # after plans that synchronize less than counts do
    return alone or proof.problems(counts, plan, counts, plan, hosts=hosts)


def _matrix(counts: Plan) -> Iterator[str]:
    """The defects of a plan that is to bring the row of each rank to every rank."""
    given, made = _of_role(counts, "input"), _of_role(counts, "output")
    if len(given) != 1 or len(made) != 1:
        yield "a plan of counts has one input and one output"
        return
    (name, row), (matrix, _) = *given.items(), *made.items()
    if {*row.rows} != {1}:
        yield f"each rank has one row of counts, not {max(row.rows)}"
        return
    values = dict[tuple[int, int], object]()
    for region, value in counts.result.items():
        if region.buffer == matrix:
            for place in range(region.start, region.stop):
                values[region.rank, place] = _row(value, place)
    for rank in range(counts.ranks):
        for source in range(counts.ranks):
            if values.get((rank, source)) != (source, name, 0):
                yield f"row {source} of the matrix of rank {rank} is not that of rank {source}"


def _row(value: object, place: int) -> object:
    """The row of an input that a promised value is at this place of the matrix."""
    match value:
        case (Term(rank, buffer, shift, None),):
            return rank, buffer, place + shift
    return None


def _rows(plan: Plan) -> Iterator[str]:
    """The defects of the shards of a plan whose sizes are the numbers of a matrix: the shards of
    each rank are those of its own inputs, and follow those of the rank before.
    """
    shards = [0, *accumulate(plan.pieces)]
    for name, buffer in _of_role(plan, "input").items():
        end = 0
        for rank in range(plan.ranks):
            whole = Region(rank, name, 0, buffer.rows[rank])
            begin, end = end, end + buffer.rows[rank]
            if [*buffer.numbers(rank)] != [*range(begin, end)] or end not in shards:
                yield f"{whole} does not have the blocks of row {rank} of the matrix, in its order"
        if end != shards[-1]:
            yield f"{len(plan.pieces)} shards are not the numbers of the rows of {name}"


def _places(plan: Plan) -> Iterator[str]:
    """The buffers of a plan in which a block has two places."""
    for name, buffer in plan.buffers.items():
        for rank in range(plan.ranks):
            numbers = [n for n in buffer.numbers(rank) if n not in (ANY_BLOCK, ROW)]
            if len({*numbers}) < len(numbers):
                yield f"a block has two places in {name} of rank {rank}"


def _of_role(plan: Plan, role: str) -> dict[str, Buffer]:
    return {name: buffer for name, buffer in plan.buffers.items() if buffer.role == role}
