"""`Engine.execute`, the entry for plans of one's own: what it executes was proved as it runs, with the
tensors that are given, and what does not fit is refused before anything is sent.
"""

from __future__ import annotations

import pytest
import torch
from support.ranks import stream_world

import weft
from weft.engines import engine, reference
from weft.errors import PlanError
from weft.kernels.matmul import matmul
from weft.plan import Buffer, Copy, Notify, Plan, Reduce, Region, Signal, Term, Wait
from weft.plan.language import ANY_BLOCK
from weft.plan.proof import problems
from weft.schedules.lanes import enter, leave
from weft_tools.laboratory.accumulation import gathered

ENGINES = [{}, {"streams": True}]
engines = pytest.mark.parametrize("options", ENGINES, ids=["processes", "streams"])


def rows(buffer, start, stop, rank=0):
    return Region(rank, buffer, start, stop)


def alone(*lane, result=None, **buffers):
    """A plan of one rank and one lane."""
    promised = result or {rows("out", 0, 2): (Term(0, "a", 0),)}
    return Plan("mine", "x", buffers, ({"compute": lane},), promised)


A, B, OUT = (Buffer(role, (2,)) for role in ("input", "input", "output"))
SPACE = Buffer("workspace", (3,))
COPY = alone(Copy(rows("a", 0, 2), rows("out", 0, 2)), a=A, out=OUT)
ADD = alone(
    Reduce((rows("a", 0, 2), rows("b", 0, 2)), rows("out", 0, 2)),
    result={rows("out", 0, 2): (Term(0, "a", 0), Term(0, "b", 0))},
    a=A,
    b=B,
    out=OUT,
)
MULTIPLY = alone(
    matmul(rows("a", 0, 2), rows("out", 0, 2)),
    result={rows("out", 0, 2): (Term(0, "a", 0, (0, "out")),)},
    a=A,
    out=OUT,
)
SHIFTED = {
    "two copies": alone(
        Copy(rows("a", 0, 2), rows("space", 0, 2)),
        Copy(rows("a", 0, 2), rows("space", 1, 3)),
        Copy(rows("space", 0, 2), rows("out", 0, 2)),
        result={rows("out", 0, 1): (Term(0, "a", 0),), rows("out", 1, 2): (Term(0, "a", -1),)},
        a=A,
        space=SPACE,
        out=OUT,
    ),
    "a copy of a sum over one of its terms": alone(
        Copy(rows("a", 0, 2), rows("space", 0, 2)),
        Reduce((rows("space", 0, 2), rows("a", 0, 2)), rows("out", 0, 2)),
        Copy(rows("out", 0, 2), rows("space", 1, 3)),
        result={rows("out", 0, 2): (Term(0, "a", 0),) * 2},
        a=A,
        space=SPACE,
        out=OUT,
    ),
}


def executed(plan, tensors, weights=None, **options):
    """Execute a plan on a rank alone, whose world must remain usable after an error."""

    def call():
        world = weft.init()
        try:
            engine(world).execute(plan, tensors, weights)
        finally:
            assert weft.all_reduce(torch.ones(3)).tolist() == [1.0] * 3

    with weft.local_world(1, **options) as local:
        local.run(call)


@engines
@pytest.mark.parametrize("columns", [16, 12_000, 70_000])
@pytest.mark.parametrize("plan", SHIFTED)
def test_writes_that_overlap_by_a_shift_keep_the_order_of_the_lane(plan, columns, options):
    """Engines may write all targets of a source in one pass over its rows, but not these."""
    plan = SHIFTED[plan]
    weft.verify(plan)
    a, out = torch.randn(2, columns), torch.full((2, columns), torch.nan)
    executed(plan, {"a": a, "out": out}, **options)
    [[wanted]] = reference.run(reference.Call(plan, [{"a": a}]))
    assert torch.equal(out, wanted["out"])


def through_slots():
    """Rank 0 sends two blocks through a slot of its own, and the second one again to a slot of rank
    1, which multiplies it.
    """
    slot, blocks = rows("slot", 0, 1), range(2)
    send = [
        instruction
        for at in blocks
        for instruction in (
            Copy(rows("a", at, at + 1), slot),
            Copy(slot, rows("inbox", at, at + 1, rank=1)),
        )
    ]
    to = slot._replace(rank=1)
    lanes = (
        (*enter(0, 2), *send, Copy(rows("a", 1, 2), to), Notify(1, Signal("arrived", 0))),
        (
            Wait(Signal("arrived", 0), 1),
            Copy(rows("inbox", 0, 2, rank=1), rows("out", 0, 2, rank=1)),
            matmul(to, rows("out", 2, 3, rank=1)),
            *leave(1, 2),
        ),
    )
    return Plan(
        "mine",
        "x",
        {
            "a": Buffer.of("input", [blocks, []]),
            "slot": Buffer.of("workspace", [[ANY_BLOCK]] * 2),
            "inbox": Buffer.of("workspace", [[], blocks]),
            "out": Buffer.of("output", [[], [0, 1, 1]]),
        },
        tuple({"compute": lane} for lane in lanes),
        {
            rows("out", 0, 2, rank=1): (Term(0, "a", 0),),
            rows("out", 2, 3, rank=1): (Term(0, "a", -1, (1, "out")),),
        },
        (1, 1),
    )


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"streams": True}, {"hosts": (0, 1)}], ids=["processes", "streams", "hosts"]
)
def test_a_slot_has_the_rows_of_the_block_that_it_holds(sizes, options):
    plan, total = through_slots(), sum(sizes)
    weft.verify(plan)
    a = torch.arange(2.0 * total).view(total, 2)
    whole = torch.full((total + sizes[1] + 4, 2), -1.0)
    out = whole[: total + sizes[1]]

    def call():
        world = weft.init()
        first = world.rank == 0
        tensors = {"a": a if first else a[:0], "out": out[:0] if first else out}
        engine(world).execute(plan, tensors, {"out": torch.eye(2) * 2}, rows=sizes)

    with weft.local_world(2, timeout=20, **options) as local:
        local.run(call)
    assert torch.equal(out, torch.cat([a, 2 * a[sizes[0] :]]))
    assert (whole[len(out) :] == -1).all()


@engines
def test_a_kernel_reads_only_symmetric_rows_of_peers(options):
    plan = gathered(2, 1)

    def call(symmetric):
        world = weft.init()
        x, y, out = (torch.full((rows, 2), 2.0).double() for rows in (3, 4, 3))
        if symmetric:
            ordinary, y = y, world.empty(4, 2, dtype=torch.float64)
            y.copy_(ordinary)
        engine(world).execute(plan, {"x": x, "y": y, "out": out}, rows=[3, 3, 4, 4])
        return out

    with weft.local_world(2, timeout=20, **options) as local:
        for out in local.run(call, True):
            assert (out == 2 + 100 + 3 * (2 + 100)).all()
    with (
        pytest.raises(ValueError, match="peers access 'y' in this plan, so it must be symmetric"),
        weft.local_world(2, timeout=20, **options) as local,
    ):
        local.run(call, False)


def guarded(columns, dtype):
    """A matrix of two rows, and the bytes behind it."""
    whole = torch.full((4096,), 7, dtype=torch.uint8)
    size = 2 * columns * dtype.itemsize
    return whole[:size].view(dtype).view(2, columns), whole[size:]


@engines
@pytest.mark.parametrize(
    ("plan", "a", "b", "out", "problem"),
    [
        (COPY, (64, torch.float32), None, (64, torch.bfloat16), "a copy does not convert"),
        (COPY, (64, torch.float32), None, (8, torch.float32), "must have equal columns"),
        (ADD, (64, torch.float32), (64, torch.float64), (64, torch.float64), "are combined with"),
        (ADD, (64, torch.int32), (64, torch.int64), (64, torch.int64), "are combined with"),
        (ADD, (64, torch.float32), (64, torch.float32), (8, torch.float32), "equal columns"),
        (ADD, (64, torch.float32), (8, torch.float32), (64, torch.float32), "equal columns"),
        (
            ADD,
            (8, torch.complex64),
            (8, torch.complex64),
            (8, torch.complex64),
            "are combined with",
        ),
    ],
    ids=lambda value: "plan" if isinstance(value, Plan) else str(value),
)
def test_tensors_that_do_not_fit_each_other_are_refused(plan, a, b, out, problem, options):
    written, behind = guarded(*out)
    tensors = {"a": torch.ones(2, a[0], dtype=a[1]), "out": written}
    if b is not None:
        tensors["b"] = torch.ones(2, b[0], dtype=b[1])
    with pytest.raises(ValueError, match=problem):
        executed(plan, tensors, **options)
    assert (behind == 7).all()


@engines
def test_floating_terms_may_differ_in_dtype(options):
    out = torch.empty(2, 3, dtype=torch.bfloat16)
    executed(ADD, {"a": torch.ones(2, 3), "b": torch.ones(2, 3).half(), "out": out}, **options)
    assert (out == 2).all()


@engines
def test_averages_of_integers_are_refused(options):
    average = alone(
        Reduce((rows("a", 0, 2), rows("b", 0, 2)), rows("out", 0, 2), "avg"),
        result=ADD.result,
        a=A,
        b=B,
        out=OUT,
    )
    numbers = torch.ones(3, 2, 4, dtype=torch.int8)
    with pytest.raises(TypeError, match="averages rows of 'out', which has dtype int8"):
        executed(average, dict(zip(("a", "b", "out"), numbers, strict=True)), **options)


@engines
def test_names_and_places_of_tensors(options):
    a = torch.ones(3, 4)
    with pytest.raises(ValueError, match="needs a tensor for the output 'out'"):
        executed(COPY, {"a": a[:2]}, **options)
    with pytest.raises(ValueError, match="takes tensors for a, out; got one for 'b'"):
        executed(COPY, {"a": a[:2], "out": torch.empty(2, 4), "b": a}, **options)
    with pytest.raises(ValueError, match="the output 'out' overlaps 'a'"):
        executed(COPY, {"a": a[:2], "out": a[1:]}, **options)
    with pytest.raises(ValueError, match="takes tensors for a, out; got one for 'space'"):
        plan = SHIFTED["two copies"]
        executed(plan, {"a": a[:2], "out": torch.empty(2, 4), "space": torch.empty(3, 4)})


def test_programs_of_one_plan_do_not_mistake_names():
    """Two calls with the same dtypes in the same order, of other buffers."""
    a, out = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4)

    def calls():
        own = engine(weft.init())
        summed = alone(Reduce((rows("a", 0, 2),) * 2, rows("out", 0, 2)), a=A, out=OUT)
        run = lambda tensors: own.program(summed, tensors, ()).run(tensors, (), {})  # noqa: E731
        run({"a": a, "out": out})
        assert (out == 2).all()
        run({"out": a, "a": out})  # a is now float32, and out bfloat16
        assert (a == 4).all()

    with weft.local_world(1) as local:
        local.run(calls)


@engines
@pytest.mark.parametrize(
    ("weights", "error", "problem"),
    [
        ({}, ValueError, "needs a weight named 'out'"),
        ({"out": torch.ones(5, 3)}, ValueError, r"rows of 4 columns times a weight \(5, 3\)"),
        ({"out": torch.ones(4, 2)}, ValueError, "are no rows of 3 columns"),
        ({"out": torch.ones(4, 3).half()}, TypeError, "multiplied by weights of that dtype"),
        ({"out": weft.quantize(torch.ones(5, 3))}, ValueError, r"a weight \(5, 3\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, error, problem, options):
    with pytest.raises(error, match=problem):
        executed(MULTIPLY, {"a": torch.ones(2, 4), "out": torch.empty(2, 3)}, weights, **options)


@engines
def test_a_workspace_of_unknown_columns(options):
    """It is only computed and multiplied, so no tensor says how many columns it has."""
    plan = alone(
        matmul(rows("a", 0, 2), rows("space", 0, 2)),
        matmul(rows("space", 0, 2), rows("out", 0, 2)),
        a=A,
        space=SPACE,
        out=OUT,
    )

    def call():
        own, tensors = engine(weft.init()), {"a": torch.ones(2, 4), "out": torch.empty(2, 4)}
        own.program(plan, tensors, ())

    with (
        weft.local_world(1, **options) as local,
        pytest.raises(PlanError, match="columns of the workspace 'space' are not known"),
    ):
        local.run(call)


def test_a_plan_that_is_not_correct_is_not_executed():
    racing = alone(
        Copy(rows("space", 0, 2), rows("out", 0, 2)),
        Copy(rows("a", 0, 2), rows("space", 0, 2)),
        a=A,
        space=SPACE,
        out=OUT,
    )
    out = torch.full((2, 3), 5.0)
    with pytest.raises(PlanError, match="was not written in this execution"):
        executed(racing, {"a": torch.ones(2, 3), "out": out})
    assert (out == 5).all()


HOSTS = (0, 0, 1, 1)


def put_to_two(ranks=4):
    """Rank 0 puts rows to rank 2 and to rank 3, and notifies rank 3, which reads both: ranks 2 and 3
    share memory, but their rows travel by two connections.
    """
    lanes = []
    for rank in range(ranks):
        lane = [*enter(rank, ranks)]
        if rank == 0:
            lane += [
                Copy(rows("a", 0, 2), rows("inbox", 0, 2, 2)),
                Copy(rows("b", 0, 1), rows("note", 0, 1, 3)),
                Notify(3, Signal("arrived", 0)),
            ]
        if rank == 3:
            lane += [
                Wait(Signal("arrived", 0), 1),
                Copy(rows("inbox", 0, 2, 2), rows("out", 0, 2, 3)),
                Copy(rows("note", 0, 1, 3), rows("first", 0, 1, 3)),
            ]
        lanes.append({"compute": (*lane, *leave(rank, ranks))})
    buffers = {
        "a": Buffer("input", (2,) * ranks),
        "b": Buffer("input", (1,) * ranks),
        "inbox": Buffer("workspace", (2,) * ranks),
        "note": Buffer("workspace", (1,) * ranks),
        "out": Buffer("output", (0, 0, 0, 2)),
        "first": Buffer("output", (0, 0, 0, 1)),
    }
    result = {
        rows("out", 0, 2, 3): (Term(0, "a", 0),),
        rows("first", 0, 1, 3): (Term(0, "b", 0),),
    }
    return Plan("two_puts", "mine", buffers, tuple(lanes), result)


def test_a_plan_is_proved_as_it_runs_between_hosts():
    plan = put_to_two()
    weft.verify(plan)
    weft.verify(plan, hosts=(0,) * 4)
    with pytest.raises(PlanError, match=r"4 ranks over 2 hosts: .*\n  race on inbox@2\[0:2\]"):
        weft.verify(plan, hosts=HOSTS)
    assert problems(plan, hosts=(0, 1)) == ["hosts of 2 ranks for plans of 4"]

    def call():
        world = weft.init()
        last = int(world.rank == 3)
        a, b = torch.full((2, 5), 1.0 + world.rank), torch.ones(1, 5)
        tensors = {"a": a, "b": b, "out": torch.zeros(2 * last, 5), "first": torch.ones(last, 5)}
        engine(world).execute(plan, tensors)
        return tensors["out"].tolist()

    with weft.local_world(4) as local:
        assert local.run(call)[3] == [[1.0] * 5] * 2
    with (
        weft.local_world(4, hosts=HOSTS) as local,
        pytest.raises(PlanError, match=r"race on inbox@2\[0:2\]: rank 3 compute"),
    ):
        local.run(call)


def test_stream_worlds_too():
    """Plans of several ranks are proved once for each world."""
    with stream_world() as world:
        own, out = engine(world), torch.empty(2, 3)
        for _ in range(2):
            own.execute(COPY, {"a": torch.ones(2, 3), "out": out})
        assert [*own.proved] == [id(COPY)]
