"""The proof finds and reports every defect of a plan; the plans that it accepts are right."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plans
from support.mutants import lowered, mutant

from weft.engines.reference import run
from weft.errors import PlanError
from weft.kernels.matmul import matmul
from weft.plan import (
    Buffer,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Role,
    Signal,
    Term,
    Value,
    Wait,
)
from weft.plan.language import ANY_BLOCK
from weft.plan.proof import accepts, problems, verify
from weft_tools.laboratory.equivalence import Equivalence
from weft_tools.laboratory.mutants import Mutant, aimed_elsewhere, deleted, moved

Lane = Iterable[Instruction]

# Ranks and pieces, and the number of mutants of each kind per plan: all mutants of small plans,
# some of larger ones.
PATTERNS = {(1, 3): 99, (2, 1): 60, (2, 3): 60, (3, 2): 8, (4, 1): 2, (4, 2): 4, (5, 1): 4}
SLOW = [(2, 3), (4, 1), (4, 2), (5, 1)]
patterns = pytest.mark.parametrize(
    ("ranks", "pieces"),
    [pytest.param(*sizes, marks=[pytest.mark.slow] * (sizes in SLOW)) for sizes in PATTERNS],
    ids=str,
)


def some(mutants: Iterable[Mutant], most: int, seed: int) -> list[Mutant]:
    found = [*mutants]
    return random.Random(seed).sample(found, min(len(found), most))


@patterns
@pytest.mark.parametrize("mutation", [deleted, lowered])
def test_no_instruction_is_too_much(mutation, ranks, pieces):
    for seed, plan in enumerate(plans.every(ranks, pieces)):
        for change, changed in some(mutation(plan), PATTERNS[ranks, pieces], seed):
            assert not accepts(changed), f"{plan.operator}/{plan.algorithm}, {change}"


@patterns
@pytest.mark.parametrize("mutation", [moved, aimed_elsewhere])
def test_accepted_mutants_differ_in_no_run(mutation, ranks, pieces):
    for seed, plan in enumerate(plans.every(ranks, pieces)):
        found = some(mutation(plan), max(1, PATTERNS[ranks, pieces] // 8), seed)
        accepted = [each for each in found if accepts(each.plan)]
        differing = Equivalence(plan, seed).differing([each.plan for each in accepted])
        assert not [(plan.operator, plan.algorithm, accepted[at].change) for at in differing]


@settings(max_examples=50)
@given(st.data(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_accepted_plans_are_right(data, ranks, seed):
    """Plans of any origin, with any plans before and after them."""
    changed, other = (
        data.draw(plans.bound_plan(st.just(ranks)).filter(does_something)) for _ in range(2)
    )
    dice = random.Random(seed)
    for _ in range(8):
        if does_something(candidate := mutant(changed, dice)) and not problems(candidate):
            changed = candidate
    assert are_right([changed, other, changed, changed, other], seed, tries=4), changed


def does_something(plan: Plan) -> bool:
    return any(lane for lanes in plan.lanes for lane in lanes.values())


def are_right(several: list[Plan], seed: int, tries: int) -> bool:
    """Whether the plans compute their operators one after the other, in some random interleavings."""
    calls = [plans.call(plan, seed + i) for i, plan in enumerate(several)]
    return all(
        plans.equal(outputs, plans.expected(call))
        for i in range(tries)
        for call, outputs in zip(calls, run(*calls, order=random.Random(seed + i)), strict=True)
    )


def rows(rank: int, buffer: str, start: int = 0, stop: int = 2) -> Region:
    return Region(rank, buffer, start, stop)


def go(source: int) -> Signal:
    return Signal("go", source)


def free(source: int) -> Signal:
    return Signal("free", source)


KEEP = [Copy(rows(r, "a"), rows(r, "out")) for r in range(2)]
KEPT = {rows(r, "out"): (Term(r, "a", 0),) for r in range(2)}
ENTER = [Wait(free(1), 0), Wait(free(0), 0)]
LEAVE = [Notify(1, free(0)), Notify(0, free(1))]
STAGE = Copy(rows(0, "a"), rows(0, "staged"))


def plan(
    first: Lane | Mapping[str, Lane],
    second: Lane = (KEEP[1],),
    result: Mapping[Region, Value] = KEPT,
) -> Plan:
    """Two ranks that have two rows each of an input, two workspaces and an output, which they
    promise to make equal to the input.
    """
    kinds: dict[str, Role] = {
        "a": "input",
        "staged": "workspace",
        "inbox": "workspace",
        "out": "output",
    }
    lanes = first if isinstance(first, Mapping) else {"compute": first}
    return Plan(
        "example",
        "made up",
        {name: Buffer(role, (2, 2)) for name, role in kinds.items()},
        ({name: tuple(lane) for name, lane in lanes.items()}, {"compute": tuple(second)}),
        result,
    )


SUM = {rows(0, "out"): (Term(0, "a", 0), Term(1, "a", 0)), rows(1, "out"): KEPT[rows(1, "out")]}
MEET = [[Notify(1, go(0)), Wait(go(1), 1)], [Notify(0, go(1)), Wait(go(0), 1)]]
READY = [KEEP[1], Notify(0, go(1)), Wait(go(0), 1)]


@pytest.mark.parametrize(
    "right",
    [
        pytest.param(plan([KEEP[0]]), id="copy"),
        pytest.param(
            plan([ENTER[0], STAGE, Copy(rows(0, "staged"), rows(0, "out")), LEAVE[0]]),
            id="through a workspace",
        ),
        pytest.param(
            plan(
                [
                    Wait(go(1), 1),
                    Reduce((rows(1, "a"), rows(0, "a")), rows(0, "out")),
                    Notify(1, go(0)),
                ],
                READY,
                SUM,
            ),
            id="sum",
        ),
        pytest.param(
            plan(
                [
                    *(ENTER[0], Wait(go(1), 1), STAGE),
                    Reduce((rows(0, "staged"), rows(1, "a")), rows(0, "staged")),
                    *(Copy(rows(0, "staged"), rows(0, "out")), LEAVE[0], Notify(1, go(0))),
                ],
                READY,
                SUM,
            ),
            id="sum in place",
        ),
        pytest.param(
            plan(
                [matmul(rows(0, "a"), rows(0, "out"))],
                result=KEPT | {rows(0, "out"): (Term(0, "a", 0, (0, "out")),)},
            ),
            id="product",
        ),
    ],
)
def test_right_plans_are_accepted(right):
    verify(right)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        pytest.param(
            plan(
                [KEEP[0], Wait(go(1), 1), Notify(1, go(0))],
                [KEEP[1], Wait(go(0), 1), Notify(0, go(1))],
            ),
            "deadlock: rank 0 compute waits for 1 of go<1, 0 arrive",
            id="deadlock",
        ),
        pytest.param(
            plan(
                [KEEP[0], Wait(Signal("arrived", 1), 2)], [KEEP[1], Notify(0, Signal("arrived", 1))]
            ),
            "deadlock: rank 0 compute waits for 2 of arrived<1, 1 are promised",
            id="wait for more than is promised",
        ),
        pytest.param(
            plan([KEEP[0], Wait(go(1), -1)]),
            "rank 0 compute waits for -1 of go<1",
            id="negative wait",
        ),
        pytest.param(
            plan(
                {
                    "compute": [ENTER[0], STAGE, Notify(0, go(0)), LEAVE[0]],
                    "comm": [Copy(rows(0, "staged"), rows(0, "out"))],
                }
            ),
            "race on staged@0[0:2]: rank 0 comm (copy   staged@0[0:2] -> out@0[0:2]) is not "
            "ordered after rank 0 compute",
            id="read before write",
        ),
        pytest.param(
            plan(
                {
                    "compute": [
                        ENTER[0],
                        STAGE,
                        Notify(0, go(0)),
                        Copy(rows(0, "staged"), rows(0, "out")),
                        LEAVE[0],
                    ],
                    "comm": [Wait(go(0), 1), Copy(rows(0, "a", 0, 1), rows(0, "staged", 1, 2))],
                }
            ),
            "race on staged@0[1:2]: rank 0 comm (copy   a@0[0:1] -> staged@0[1:2]) is not ordered "
            "after rank 0 compute",
            id="write before read",
        ),
        pytest.param(
            plan(
                {
                    "compute": [ENTER[0], STAGE, KEEP[0], LEAVE[0]],
                    "comm": [Copy(rows(0, "a", 1, 2), rows(0, "staged", 0, 1))],
                }
            ),
            "race on staged@0[0:1]: rank 0 comm (copy   a@0[1:2] -> staged@0[0:1]) is not ordered "
            "after rank 0 compute",
            id="concurrent writes",
        ),
        pytest.param(
            plan([Copy(rows(1, "a"), rows(0, "out"))]),
            "race on a@1[0:2]: rank 0 compute (copy   a@1[0:2] -> out@0[0:2]) is not ordered after "
            "rank 1 compute",
            id="peer's input read too early",
        ),
        pytest.param(
            plan(
                [KEEP[0], *MEET[0]],
                [*MEET[1], Copy(rows(0, "a"), rows(1, "out"))],
                KEPT | {rows(1, "out"): (Term(0, "a", 0),)},
            ),
            "race on a@0[0:2]: rank 0 compute (the caller's use) is not ordered after rank 1 "
            "compute",
            id="input still read at the end",
        ),
        pytest.param(
            plan(
                MEET[0],
                [KEEP[1], *MEET[1], Copy(rows(1, "a"), rows(0, "out"))],
                KEPT | {rows(0, "out"): (Term(1, "a", 0),)},
            ),
            "race on out@0[0:2]: rank 0 compute (the caller's use) is not ordered after rank 1 "
            "compute",
            id="output still written at the end",
        ),
        pytest.param(
            plan({"compute": [KEEP[0], Notify(1, go(0))], "comm": [Notify(1, go(0))]}),
            "counter go<0 of rank 1 has a second writer: rank 0 comm and rank 0 compute",
            id="two writers",
        ),
        pytest.param(
            plan([KEEP[0], Notify(1, go(1))]),
            "counter go<1 of rank 1 has a second writer: rank 0 compute",
            id="another's signal",
        ),
        pytest.param(
            plan([KEEP[0], Notify(2, go(0))]),
            "rank 0 compute: notify go<0 on 2: the plan has no rank 2; its ranks are 0 to 1",
            id="no such rank",
        ),
        pytest.param(plan([]), "output out@0[0:2] is written 0 times", id="output not written"),
        pytest.param(
            plan([KEEP[0], Copy(rows(0, "a", 1, 2), rows(0, "out", 1, 2))]),
            "output out@0[1:2] is written 2 times",
            id="output twice",
        ),
        pytest.param(
            plan([Copy(rows(0, "a", i, i + 1), rows(0, "out", 1 - i, 2 - i)) for i in range(2)]),
            "output out@0[0:1] holds a@0[row+1] instead of a@0[row+0]",
            id="wrong rows",
        ),
        pytest.param(
            plan(
                [matmul(rows(0, "a"), rows(0, "out"))],
                result=KEPT | {rows(0, "out"): (Term(0, "a", 0, (1, "out")),)},
            ),
            "output out@0[0:2] holds a@0[row+0] @ B0 instead of a@0[row+0] @ B1",
            id="wrong weights",
        ),
        pytest.param(
            plan(
                [Wait(go(1), 1), Copy(rows(1, "a"), rows(0, "out")), Notify(1, go(0))], READY, SUM
            ),
            "output out@0[0:2] holds a@1[row+0] instead of a@0[row+0] + a@1[row+0]",
            id="half a sum",
        ),
        pytest.param(
            plan(
                [
                    Wait(go(1), 1),
                    Reduce((rows(0, "a"), rows(1, "a")), rows(0, "out"), "max"),
                    Notify(1, go(0)),
                ],
                READY,
                SUM,
            ),
            "output out@0[0:2] holds max(a@0[row+0], a@1[row+0]) instead of a@0[row+0] + a@1[row+0]",
            id="maximum instead of a sum",
        ),
        pytest.param(
            plan(
                [
                    Wait(go(1), 1),
                    Reduce((rows(0, "a"), rows(1, "a")), rows(0, "out"), "avg"),
                    Notify(1, go(0)),
                ],
                READY,
                SUM,
            ),
            "output out@0[0:2] holds avg(a@0[row+0] + a@1[row+0]) instead of a@0[row+0] + a@1[row+0]",
            id="average instead of a sum",
        ),
        pytest.param(
            plan(
                [
                    ENTER[0],
                    matmul(rows(0, "a"), rows(0, "inbox")),
                    matmul(rows(0, "inbox"), rows(0, "out")),
                    LEAVE[0],
                ]
            ),
            "output out@0[0:2] holds matmul(a@0[row+0] @ B0, out@0) instead of a@0[row+0]",
            id="product of a product",
        ),
        pytest.param(
            plan([Copy(rows(0, "a", 1, 3), rows(0, "out"))]),
            "rank 0 compute: copy   a@0[1:3] -> out@0[0:2]: a@0[1:3]: that buffer has 2 rows",
            id="out of bounds",
        ),
        pytest.param(
            plan([Copy(rows(0, "b"), rows(0, "out"))]),
            "rank 0 compute: .*: b@0[0:2]: the plan has no buffer 'b'; it has a",
            id="no such buffer",
        ),
        pytest.param(
            plan({"compute": [KEEP[0]], "com": []}),
            "rank 0: there is no lane 'com': lanes are compute, comm, comm1, …",
            id="no such lane",
        ),
        pytest.param(
            plan([Copy(rows(2, "a"), rows(0, "out"))]),
            "rank 0 compute: .*: a@2[0:2]: the plan has no rank 2; its ranks are 0 to 1",
            id="a buffer of no rank",
        ),
        pytest.param(
            plan([Copy(rows(0, "a", 0, 1), rows(0, "out"))]),
            "rank 0 compute: copy   a@0[0:1] -> out@0[0:2]: the numbers of rows differ",
            id="row counts differ",
        ),
        pytest.param(
            plan([ENTER[0], Copy(rows(0, "staged"), rows(0, "out")), LEAVE[0]]),
            "rank 0 compute: copy   staged@0[0:2] -> out@0[0:2]: staged@0[0:2] was not written in "
            "this execution",
            id="leftovers of an earlier plan",
        ),
        pytest.param(
            plan([KEEP[0], Copy(rows(0, "a", 0, 1), rows(0, "a", 1, 2))]),
            "rank 0 compute: copy   a@0[0:1] -> a@0[1:2]: an input is only read",
            id="input written",
        ),
        pytest.param(
            plan(
                [
                    Copy(rows(0, "a", 0, 1), rows(0, "out", 0, 1)),
                    Copy(rows(0, "out", 0, 1), rows(0, "out", 0, 1)),
                ]
            ),
            "rank 0 compute: copy   out@0[0:1] -> out@0[0:1]: source and destination overlap",
            id="overlap",
        ),
        pytest.param(
            plan([KEEP[0], Reduce((), rows(0, "inbox"))]),
            "rank 0 compute: .*: there is nothing to add",
            id="empty sum",
        ),
        pytest.param(
            plan([KEEP[0], Reduce((rows(0, "a"), rows(0, "a")), rows(0, "inbox"), "median")]),
            "rank 0 compute: .*: there is no such reduction",
            id="no such reduction",
        ),
        pytest.param(
            plan([STAGE, KEEP[0], LEAVE[0]]),
            "workspace of rank 0: rank 0 compute in example does not wait until rank 1 compute is "
            "done with it",
            id="workspace not entered",
        ),
        pytest.param(
            plan([ENTER[0], STAGE, KEEP[0]]),
            "workspace of rank 0: .* rank 0 compute is done with it",
            id="workspace not left",
        ),
        pytest.param(
            plan([KEEP[0], Notify(0, Signal("go", 7)), Wait(Signal("go", 7), 1)]),
            "rank 0: notify go<7 on 0: the plan has no rank 7; its ranks are 0 to 1",
            id="signal of no rank",
        ),
        pytest.param(
            plan([KEEP[0], Notify(0, Signal("go", 0, -1)), Wait(Signal("go", 0, -1), 1)]),
            "rank 0: notify go -1<0 on 0: the plan has no rank -1",
            id="signal for no peer",
        ),
        pytest.param(
            plan([KEEP[0], Notify(1, Signal("go", 0, 1))], [KEEP[1], Wait(Signal("go", 0, 1), 1)]),
            "rank 0: notify go 1<0 on 1: only a rank's own signals may have a peer",
            id="signal of another rank with a peer",
        ),
        pytest.param(
            plan(
                [
                    KEEP[0],
                    Notify(0, Signal("go", 0, 1)),
                    Wait(Signal("go", 0, 1), 1),
                    Wait(go(1), 1),
                ],
                [KEEP[1], Notify(0, go(1))],
            ),
            "rank 0: wait   go<1 >= 1: of one name all signals have a peer, or none has",
            id="two signals of one counter",
        ),
        pytest.param(
            plan([KEEP[0]], result={rows(0, "out"): KEPT[rows(0, "out")]}),
            "the result does not have each of the 2 rows of output out of rank 1 once",
            id="no result promised",
        ),
        pytest.param(
            plan([KEEP[0]], result=KEPT | {rows(0, "out", 0, 1): (Term(0, "a", 0),)}),
            "the result does not have each of the 2 rows of output out of rank 0 once",
            id="a result promised twice",
        ),
        pytest.param(
            plan([KEEP[0]], result=KEPT | {rows(0, "inbox"): ()}),
            "the result has inbox@0[0:2], which is no output",
            id="result",
        ),
    ],
)
def test_wrong_plans_are_refused(wrong, complaint):
    pattern = ".*".join(map(re.escape, complaint.split(".*")))
    with pytest.raises(PlanError, match=pattern) as refusal:
        verify(wrong)
    assert str(refusal.value).startswith("example/made up on 2 ranks")


def test_a_buffer_has_rows_on_every_rank():
    with pytest.raises(PlanError, match="buffer a has row counts for 1 ranks"):
        verify(
            replace(
                plan([KEEP[0]]),
                buffers={"a": Buffer("input", (2,)), "out": Buffer("output", (2, 2))},
            )
        )


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (Buffer("workspace", (2, 0), ([0], [])), "has 2 rows or blocks, but the numbers of 1"),
        (Buffer.of("workspace", ([-3], [])), "has blocks [-3]; the plan's are 0 to 1"),
        (Buffer.of("workspace", ([0, 2], [])), "has blocks [2]; the plan's are 0 to 1"),
        (Buffer.of("output", ([ANY_BLOCK], [])), "has slots for any block, as workspaces may"),
        (Buffer.of("workspace", ([ANY_BLOCK, 1], [])), "has slots for any block beside other"),
    ],
)
def test_buffers_have_blocks_of_the_plan_or_slots(buffer, complaint):
    made = plan([KEEP[0]])
    made = replace(made, buffers={**made.buffers, "other": buffer}, pieces=(1, 1))
    with pytest.raises(PlanError, match=re.escape(f"rank 0: buffer other {complaint}")):
        verify(made)


HERE = [Notify(peer, Signal("here", r)) for r, peer in ((0, 1), (1, 0))]
OTHER_IS_HERE = [Wait(Signal("here", peer), 1) for peer in (1, 0)]
TO_EAGER = Copy(rows(0, "a"), rows(1, "eager"))


def eager(*lanes):
    made = plan(*lanes)
    buffers = {**made.buffers, "eager": Buffer("eager", (2, 2))}
    return replace(made, buffers=buffers, synchronizes=True)


def test_no_message_reaches_an_eager_buffer_after_its_plan():
    ends = [[OTHER_IS_HERE[r], KEEP[r]] for r in range(2)]
    late = eager([HERE[0], TO_EAGER, *ends[0]], [HERE[1], *ends[1]])
    verify(late)  # on one host a copy is over before its lane ends
    with pytest.raises(PlanError, match="eager buffer of rank 1: example may end before rank 0"):
        verify(late, hosts=[0, 1])
    verify(eager([TO_EAGER, HERE[0], *ends[0]], [HERE[1], *ends[1]]), hosts=[0, 1])


def test_plans_of_different_sizes_cannot_follow_each_other():
    with pytest.raises(PlanError, match="plans of different sizes: \\[2, 1\\] ranks"):
        verify(plan([KEEP[0]]), Plan("alone", "made up", {}, ({},)))


def test_the_first_twenty_problems_are_reported():
    many = [Copy(rows(0, "a", i, i + 1), rows(0, "out", i, i + 1)) for i in range(2, 30)]
    with pytest.raises(PlanError, match="28 problem") as refusal:
        verify(plan([KEEP[0], *many]))
    assert str(refusal.value).endswith("… and 8 more")
    assert len(str(refusal.value).splitlines()) == 22


def test_ranks_leave_a_workspace_before_the_next_plan_uses_it():
    """One rank notifies half of its peers too early that it has left, another rank the other half;
    the next plan may wait for the wrong halves.
    """

    def four(name: str, lanes: list[Lane]) -> Plan:
        kinds: dict[str, Role] = {"a": "input", "staged": "workspace", "out": "output"}
        one = [(rows(r, "a", 0, 1), rows(r, "out", 0, 1)) for r in range(4)]
        return Plan(
            name,
            "made up",
            {name: Buffer(role, (1,) * 4) for name, role in kinds.items()},
            tuple({"compute": (*lane, Copy(*one[r]))} for r, lane in enumerate(lanes)),
            {out: (Term(r, "a", 0),) for r, (_, out) in enumerate(one)},
        )

    def leave(rank: int, *peers: int) -> Lane:
        return [Notify(peer, free(rank)) for peer in peers]

    here = rows(0, "staged", 0, 1)
    careless = four(
        "careless",
        [
            [
                *leave(0, 3),
                *(Wait(free(p), 0) for p in (1, 2, 3)),
                Copy(rows(0, "a", 0, 1), here),
                Notify(1, go(0)),
                *leave(0, 1, 2),
            ],
            [*leave(1, 2), Wait(go(0), 1), *leave(1, 3, 0)],
            leave(2, 0, 1, 3),
            leave(3, 0, 1, 2),
        ],
    )
    successor = four(
        "successor",
        [
            leave(0, 1, 2, 3),
            leave(1, 0, 2, 3),
            [Wait(free(1), 0), Wait(go(3), 1), Copy(rows(2, "a", 0, 1), here), *leave(2, 0, 1, 3)],
            [Wait(free(0), 0), Notify(2, go(3)), *leave(3, 0, 1, 2)],
        ],
    )
    verify(successor)
    with pytest.raises(
        PlanError,
        match="workspace of rank 0: rank 2 compute in successor does not wait until rank 0 compute is done",
    ):
        verify(careless, successor)
