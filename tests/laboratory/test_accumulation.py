"""Plans whose kernels need all rows of a source, and accumulate: what the proof accepts of them, and
what it rejects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.engines.reference import Call, run
from weft.kernels.matmul import MATMUL
from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Kernel,
    Notify,
    Plan,
    Region,
    Signal,
    Term,
    Wait,
    reduced,
)
from weft.plan.binding import bind
from weft.plan.language import ANY_BLOCK, ROW, accumulates
from weft.plan.proof import problems
from weft.plan.values import Value, Whole, ordered, shifted, whole
from weft_tools.laboratory.accumulation import FOLD, gathered, in_turn
from weft_tools.laboratory.mutation import score
from weft_tools.laboratory.random_plans import Choices, random_plan


def rows(buffer: str, start: int = 0, stop: int = 2, rank: int = 0) -> Region:
    return Region(rank, buffer, start, stop)


X, Y, Z, OUT, SPACE = (rows(name) for name in ("x", "y", "z", "out", "space"))
ONE: Value = (Term(0, "x", 0),)


def every(buffer: str, start: int = 0, stop: int = 2) -> Value:
    """All of these rows of an input."""
    return whole([((ROW,) * (stop - start), (Term(0, buffer, start),))])


def alone(
    *lane: Any, result: Value, comm: Sequence[Any] = (), output: Region = OUT, **buffers: Buffer
) -> Plan:
    """A plan of one rank with inputs, a workspace and an output of two rows each."""
    kinds = {name: Buffer("input", (2,)) for name in ("x", "y", "z")}
    kinds |= {"space": Buffer("workspace", (2,)), "out": Buffer("output", (2,)), **buffers}
    lanes = {"compute": lane, "comm": tuple(comm)}
    return Plan("example", "made up", kinds, (lanes,), {output: result})


FIRST, SECOND = Compute(FOLD, (X, Y), OUT), Compute(FOLD, (X, Z, OUT), OUT)
FOLDED = FOLD.value([ONE, every("y")], None)
BOTH = FOLD.value([ONE, every("z"), FOLDED], None)


class Highest(Kernel):
    """The highest number of the sources: the same bits in any order of accumulation."""

    name = "highest"
    accumulates = True

    def value(self, sources: Sequence[Value], weight: Any) -> Value:
        return reduced("max", sources, 1)

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        return torch.stack([*sources]).amax(0)


class Sums(Kernel):
    """One row: the sums of all rows of the source."""

    name = "sums"
    whole = (0,)

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        return sources[0].sum(0, keepdim=True)


HIGHEST = Highest()
HIGHER = Compute(HIGHEST, (X, Y), OUT), Compute(HIGHEST, (Z, OUT), OUT)


@pytest.mark.parametrize(
    "right",
    [
        pytest.param(alone(FIRST, result=FOLDED), id="all rows of a source"),
        pytest.param(alone(FIRST, SECOND, result=BOTH), id="accumulation into an output"),
        pytest.param(
            alone(
                *(Compute(FOLD, (X, Y), SPACE), Compute(FOLD, (X, Z, SPACE), SPACE)),
                Copy(SPACE, OUT),
                result=BOTH,
            ),
            id="accumulation into a workspace",
        ),
        pytest.param(
            alone(
                *(Copy(rows("y", i, i + 1), rows("space", i, i + 1)) for i in range(2)),
                Compute(FOLD, (X, SPACE), OUT),
                result=FOLDED,
            ),
            id="all rows of two copies",
        ),
        pytest.param(
            alone(
                *(Compute(FOLD, (rows("x", i, i + 1), Y), rows("out", i, i + 1)) for i in range(2)),
                SECOND,
                result=BOTH,
            ),
            id="accumulation into two results",
        ),
        pytest.param(
            alone(
                *(FIRST, Notify(0, Signal("first", 0))),
                comm=(Wait(Signal("first", 0), 1), SECOND),
                result=BOTH,
            ),
            id="accumulations of two lanes in order",
        ),
        pytest.param(
            alone(
                Compute(HIGHEST, (Z, Y), OUT),
                Compute(HIGHEST, (X, OUT), OUT),
                result=reduced("max", [ONE, (Term(0, "y", 0),), (Term(0, "z", 0),)], 1),
            ),
            id="accumulations whose order does not matter",
        ),
    ],
)
def test_right_plans_are_accepted(right):
    weft.verify(right)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        pytest.param(alone(FIRST, result=BOTH), "holds fold(", id="dropped"),
        pytest.param(alone(FIRST, SECOND, SECOND, result=BOTH), "holds fold(", id="twice"),
        pytest.param(alone(FIRST, FIRST, result=FOLDED), "is written 2 times", id="begun twice"),
        pytest.param(
            alone(SECOND, result=BOTH),
            "out@0[0:2] was not written in this execution",
            id="no begin",
        ),
        pytest.param(
            alone(
                *(Compute(FOLD, (X, Z), OUT), Compute(FOLD, (X, Y, OUT), OUT)),
                result=BOTH,
            ),
            "holds fold(",
            id="in another order",
        ),
        pytest.param(
            alone(FIRST, comm=(SECOND,), result=BOTH), "race on out@0[0:2]", id="not ordered"
        ),
        pytest.param(
            alone(HIGHER[0], comm=(HIGHER[1],), result=reduced("max", [ONE], 1)),
            "race on out@0[0:2]",
            id="not ordered, though the order does not matter",
        ),
        pytest.param(
            alone(Compute(FOLD, (X, rows("y", 0, 1)), OUT), result=FOLDED),
            "holds fold(",
            id="fewer rows",
        ),
        pytest.param(
            alone(
                *(Copy(rows("y", i, i + 1), rows("space", 1 - i, 2 - i)) for i in range(2)),
                Compute(FOLD, (X, SPACE), OUT),
                result=FOLDED,
            ),
            "1 of y@0[row+1]; 1 of y@0[row+0]",
            id="rows in another order",
        ),
        pytest.param(
            alone(Compute(FOLD, (rows("x", 0, 1), Y), OUT), result=FOLDED),
            "the numbers of rows differ",
            id="rows of their own",
        ),
        pytest.param(
            alone(FIRST, Compute(FOLD, (X, OUT), OUT), result=FOLDED),
            "source and destination overlap",
            id="all rows of the destination",
        ),
        pytest.param(
            alone(FIRST, Compute(FOLD, (OUT, Y, OUT), OUT), result=FOLDED),
            "source and destination overlap",
            id="the destination as another source",
        ),
        pytest.param(
            alone(
                *(Copy(X, SPACE), Compute(MATMUL, (SPACE,), SPACE, "w"), Copy(SPACE, OUT)),
                result=FOLDED,
            ),
            "source and destination overlap",
            id="a kernel that does not accumulate",
        ),
        pytest.param(
            alone(Compute(FOLD, (X,), OUT), result=FOLDED),
            "a source of the kernel is missing",
            id="no source",
        ),
        pytest.param(
            alone(
                *(Copy(Y, rows("slot")), Compute(FOLD, (X, rows("slot")), OUT)),
                result=FOLDED,
                slot=Buffer("workspace", (2,), ((ANY_BLOCK,) * 2,)),
            ),
            "the number of rows is not defined",
            id="slots",
        ),
        pytest.param(
            alone(FIRST, result=FOLD.value([ONE, whole([((0, 1), (Term(0, "y", 0),))])], None)),
            "the result promises all rows of y@0[0:2] as those of other blocks",
            id="blocks of other sizes",
        ),
    ],
)
def test_wrong_plans_are_refused(wrong, complaint):
    assert any(complaint in problem for problem in problems(wrong)), problems(wrong)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(-3, 3))
def test_all_rows_have_one_value_however_they_are_cut(parts, start):
    value: Value = (Term(0, "y", start), Term(1, "y", 0))
    starts = [sum(parts[:i]) for i in range(len(parts))]
    cut = [
        (
            range(at, at + many),
            shifted(value if i % 2 else value[::-1], at),
        )
        for i, (at, many) in enumerate(zip(starts, parts, strict=True))
    ]
    assert ordered(whole(cut)) == ordered(whole([(range(sum(parts)), value)]))
    assert shifted(whole(cut), 5) == whole(cut)
    assert whole([((), value)]) == (Whole(()),)


@settings(max_examples=25)
@given(st.sampled_from([gathered, in_turn]), st.integers(2, 3), st.integers(1, 3), st.data())
def test_plans_that_accumulate_are_right_for_every_size(plan, ranks, pieces, data):
    blocks = plan(ranks, pieces)
    weft.verify(blocks)
    many = len(blocks.pieces)
    weft.verify(bind(blocks, data.draw(st.lists(st.integers(0, 5), min_size=many, max_size=many))))


@pytest.mark.parametrize("plan", [gathered, in_turn])
def test_no_mutant_is_missed(plan):
    found = score(plan(2, 2), seed=0)
    assert not any(each.missed for each in found.values())
    assert found["deleted"].rejected == found["deleted"].mutants


def test_a_value_that_was_made_of_all_rows_may_be_needed_whole():
    """All rows of one row that was made of all rows of another source: its number is known, though
    no row of an input corresponds to it.
    """
    blocks = Plan(
        "example",
        "made up",
        {
            "x": Buffer.of("input", [range(2)]),
            "space": Buffer("workspace", (1,)),
            "out": Buffer.of("output", [range(2)]),
        },
        (
            {
                "compute": (
                    Compute(Sums(), (rows("x"),), rows("space", 0, 1)),
                    Compute(FOLD, (rows("x"), rows("space", 0, 1)), OUT),
                )
            },
        ),
        {
            OUT: FOLD.value(
                [ONE, whole([((ROW,), Sums().value([whole([((0, 1), ONE)])], None))])], None
            )
        },
        (2,),
    )
    weft.verify(blocks)
    for size in (0, 1, 5):
        weft.verify(bind(blocks, [size]))
    x = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    [[outputs]] = run(Call(bind(blocks, [3]), [{"x": x}]))
    assert outputs["out"].tolist() == [[36.0], [37.0], [39.0]]


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 0, 0, 0)], ids=str)
def test_random_plans_that_accumulate_are_right(hosts):
    found = 0
    for seed in range(60):
        choices = Choices(hosts, 8, kernel=MATMUL, fold=FOLD)
        plan = random_plan(random.Random(seed), choices)
        assert not problems(plan), (seed, problems(plan))
        found += sum(accumulates(instruction) for _, instruction in plan.instructions())
    assert found


@pytest.mark.parametrize("read", [0, 1])
def test_slots_are_read_as_the_block_that_they_hold(read):
    """The sums have no row of an input that would show it: they are equal in rows of any block."""
    slot, block = rows("slot", 0, 1), rows("space", 0, 1)
    plan = Plan(
        "example",
        "made up",
        {
            "x": Buffer.of("input", [range(2)]),
            "space": Buffer.of("workspace", [range(2)]),
            "slot": Buffer.of("workspace", [[ANY_BLOCK]]),
            "out": Buffer.of("output", [[read]]),
        },
        ({"compute": (Compute(Sums(), (X,), block), Copy(block, slot), Copy(slot, OUT_BLOCK))},),
        {OUT_BLOCK: Sums().value([whole([((0, 1), ONE)])], None)},
        (1, 1),
    )
    found = problems(plan)
    assert found == [] if read == 0 else "slot@0[0:1] holds other blocks" in found[0]


OUT_BLOCK = rows("out", 0, 1)
