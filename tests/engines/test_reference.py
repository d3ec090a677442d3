"""The reference engine, with which other engines are compared: it follows the rules of plans, and
shows violations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from weft.engines import reference
from weft.engines.reference import Call, run
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
    Wait,
)
from weft.schedules.broadcast import eager
from weft.schedules.levels import flat

Lanes = Mapping[str, Sequence[Instruction]]
GO = Signal("go", 1)


def plan(*ranks: Lanes, **roles: Role) -> Plan:
    """A plan whose buffers have two rows on every rank."""
    buffers = {name: Buffer(role, (2,) * len(ranks)) for name, role in roles.items()}
    lanes = tuple({name: tuple(lane) for name, lane in lanes.items()} for lanes in ranks)
    return Plan("example", "made up", buffers, lanes)


def rows(rank: int, buffer: str, start: int = 0, stop: int = 2) -> Region:
    return Region(rank, buffer, start, stop)


def numbers(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def outcomes(*calls: Call) -> set[tuple[float, ...]]:
    """The values that `out` of rank 0 may have after the last call, over many interleavings; -1
    stands for NaN.
    """
    outs = (run(*calls, order=random.Random(seed))[-1][0]["out"] for seed in range(100))
    return {tuple(out.nan_to_num(-1).flatten().tolist()) for out in outs}


def test_each_instruction_has_its_effect():
    buffers: dict[str, Role] = {
        "a": "input",
        "product": "workspace",
        "sum": "output",
        "out": "output",
    }
    moves = [
        matmul(rows(0, "a"), rows(0, "product")),
        Copy(rows(0, "product", 0, 1), rows(0, "out", 1, 2)),
        Copy(rows(0, "product", 1, 2), rows(0, "out", 0, 1)),
        Reduce((rows(0, "out"), rows(0, "product"), rows(0, "out")), rows(0, "sum")),
    ]
    a, weight = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 3.0]]),
    )
    ((found,),) = run(Call(plan({"compute": moves}, **buffers), [{"a": a}], [{"product": weight}]))
    assert found["out"].equal((a @ weight).flip(0))
    assert found["sum"].equal(a @ weight + 2 * (a @ weight).flip(0))


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        (torch.float16, (2048.0, 1.0, 1.0), 2050.0),
        (torch.float32, (2.0**24, 1.0, -(2.0**24)), 0.0),
        (torch.float32, (2.0**24, -(2.0**24), 1.0), 1.0),
        (torch.float64, (2.0**53, 1.0, -(2.0**53)), 0.0),
        (torch.int32, (2**31 - 1, 2, -2), 2**31 - 1),
    ],
)
def test_sums_are_taken_in_order_in_the_accumulation_type(dtype, values, total):
    srcs = tuple(Region(0, "a", i, i + 1) for i in range(3))
    buffers = {"a": Buffer("input", (3,)), "out": Buffer("output", (1,))}
    sums = Plan("sum", "made up", buffers, ({"compute": (Reduce(srcs, Region(0, "out", 0, 1)),)},))
    ((found,),) = run(Call(sums, [{"a": numbers(*values, dtype=dtype)}]))
    assert found["out"].dtype == dtype
    assert found["out"].item() == total


def test_products_have_the_type_of_the_weight():
    product = plan({"compute": [matmul(rows(0, "a"), rows(0, "out"))]}, a="input", out="output")
    a = numbers(1, 2, dtype=torch.float16)
    ((found,),) = run(Call(product, [{"a": a}], [{"out": torch.full((1, 5), 0.1)}]))
    assert found["out"].equal(a.float() @ torch.full((1, 5), 0.1))


def exchange(*, ready: bool = True, done: bool = True) -> Plan:
    """Rank 0 reads the input of rank 1; each of the two handshakes can be left out."""
    get = Copy(rows(1, "a"), rows(0, "out"))
    first = [*[Wait(GO, 1)] * ready, get, *[Notify(1, Signal("done", 0))] * done]
    second = [*[Notify(0, GO)] * ready, *[Wait(Signal("done", 0), 1)] * done]
    return plan({"compute": first}, {"compute": second}, a="input", out="output")


def calls(exchanged: Plan, many: int = 3) -> list[Call]:
    return [Call(exchanged, [{"a": numbers(0, 0)}, {"a": numbers(i, i + 1)}]) for i in range(many)]


def test_lanes_interleave_arbitrarily():
    assert [outputs[0]["out"].flatten().tolist() for outputs in run(*calls(exchange()))] == [
        [0, 1],
        [1, 2],
        [2, 3],
    ]


def test_a_right_plan_has_one_outcome():
    assert outcomes(*calls(exchange())) == {(2, 3)}


@pytest.mark.parametrize("missing", ["ready", "done"])
def test_a_race_has_several_outcomes(missing):
    """Rank 0 reads the input of rank 1 too early, or too late."""
    assert outcomes(*calls(exchange(**{missing: False}))) == {(2, 3), (-1, -1)}


def test_writes_to_an_output_before_its_call_are_lost():
    put = plan(
        {"compute": []}, {"compute": [Copy(rows(1, "a"), rows(0, "out"))]}, a="input", out="output"
    )
    assert outcomes(*calls(put)) == {(2, 3), (-1, -1)}


def test_signals_of_different_calls_are_distinguished():
    """Rank 1 may be several calls ahead of rank 0."""
    put = plan(
        {"compute": [Wait(GO, 1), Copy(rows(0, "a"), rows(0, "out")), Wait(GO, 0)]},
        {"compute": [Notify(0, GO)]},
        a="input",
        out="output",
    )
    several = [Call(put, [{"a": numbers(i, i)}] * 2) for i in range(4)]
    for seed in range(20):
        assert [
            outputs[0]["out"][0].item() for outputs in run(*several, order=random.Random(seed))
        ] == [0, 1, 2, 3]


def test_a_wait_without_new_notifies_waits_for_earlier_calls():
    late = plan(
        {"compute": [Wait(GO, 0), Copy(rows(0, "a"), rows(0, "out"))]},
        {"compute": [Copy(rows(1, "a"), rows(0, "kept")), Notify(0, GO)]},
        a="input",
        kept="workspace",
        out="output",
    )
    keep = plan(
        {"compute": [Wait(GO, 0), Copy(rows(0, "kept"), rows(0, "out"))]},
        {"compute": []},
        kept="workspace",
        a="input",
        out="output",
    )
    inputs = [{"a": numbers(1, 2)}, {"a": numbers(3, 4)}]
    assert outcomes(Call(late, inputs), Call(keep, inputs)) == {(3, 4)}


def test_calls_share_the_workspace_without_clearing_it():
    leave = plan(
        {"compute": [Copy(rows(0, "a"), rows(0, "first"))]},
        a="input",
        first="workspace",
        unused="workspace",
    )
    find = plan(
        {"compute": [Copy(rows(0, "other"), rows(0, "out"))]},
        a="input",
        other="workspace",
        out="output",
    )
    assert outcomes(Call(leave, [{"a": numbers(1, 2)}]), Call(find, [{"a": numbers(3, 4)}])) == {
        (1, 2)
    }


def broadcasts(many: int) -> list[Call]:
    """Broadcasts of the calls' numbers through eager buffers."""
    return [
        Call(
            eager(0, flat(3)),
            [{"a": numbers(i)} if r == 0 else {"a": numbers()} for r in range(3)],
        )
        for i in range(many)
    ]


@pytest.mark.parametrize("enough", [True, False])
def test_eager_buffers_are_reused_after_all_ranks_have_read_them(enough, monkeypatch):
    if not enough:  # the end of a call only shows that other ranks have begun it
        monkeypatch.setattr(reference, "EAGER_SETS", 1)
    many = 6
    found = {
        tuple(of[2]["out"].item() for of in run(*broadcasts(many), order=random.Random(seed)))
        for seed in range(200)
    }
    assert (found == {tuple(range(many))}) == enough


def test_unwritten_rows_are_nan():
    ((found,),) = run(Call(plan({"compute": []}, a="input", out="output"), [{"a": numbers(1, 2)}]))
    assert found["out"].isnan().all()


def test_a_deadlock_names_the_lanes_that_are_stuck():
    stuck = plan(
        {"compute": [], "comm": [Wait(GO, 2)]},
        {"compute": [Notify(0, GO), Wait(Signal("done", 0), 1)]},
        a="input",
    )
    inputs = [{"a": numbers(1, 2)}] * 2
    with pytest.raises(
        PlanError,
        match=r"deadlock: rank 0 comm in call 0: wait   go<1 >= 2; rank 1 compute in call 0: wait   done<0 >= 1",
    ):
        run(Call(stuck, inputs), Call(stuck, inputs))
