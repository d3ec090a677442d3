"""The call cache: repeated calls are found, with no stale operands and none kept alive."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from support.ranks import another_world, on_ranks

import weft
import weft._native as _native
from weft.engines import engine
from weft.engines.recording import record
from weft.ops.all_reduce import check as all_reduce_check
from weft.schedules.barrier import barrier

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def expected(world, name, a, b, bias, op):
    """The result on this rank, where all ranks have the same operands."""
    if name == "all_gather_matmul":
        return a.repeat(world.ranks, 1) @ b + bias
    total = world.ranks * (a @ b) + bias * (1 if op == "sum" else world.ranks)
    total = total if op == "sum" else total / world.ranks
    return total.chunk(world.ranks)[world.rank] if name == "matmul_reduce_scatter" else total


def written_in_place(world, name, dtype, op):
    """Weights and biases that are written to in place, and numbers of rows that vary within a size
    class and beyond it.
    """
    numbers = torch.Generator().manual_seed(5)
    b, bias = torch.zeros(4, 6, dtype=dtype), torch.zeros(6, dtype=dtype)
    options = {} if name == "all_gather_matmul" else {"op": op}
    for rows in (8, 8, 6, 8, 40, 38, 8, 0, 8, 4):
        b.copy_(torch.randint(-4, 4, b.shape, generator=numbers))
        bias.copy_(torch.randint(-4, 4, bias.shape, generator=numbers))
        a = torch.randint(-4, 4, (rows, 4), generator=numbers).to(dtype)
        found = getattr(weft, name)(a, b, bias=bias, **options)
        assert torch.equal(found, expected(world, name, a, b, bias, op)), rows


@pytest.mark.parametrize("name", OPERATORS)
def test_operands_may_be_written_to_in_place(name):
    for dtype in (torch.float32, torch.bfloat16):
        for op in ("sum", "avg"):
            on_ranks(written_in_place, 2, name, dtype, op)


def several(world, algorithm):
    """Weights that share a gather, packed and plain, one of them without a bias, and one that is
    replaced in every other call.
    """
    numbers = torch.Generator().manual_seed(7)

    def drawn(*shape):
        return torch.randint(-4, 4, shape, generator=numbers).float()

    kept, plain, others, bias = (
        weft.pack(drawn(4, 6)),
        drawn(4, 3),
        [drawn(4, 5), drawn(4, 5)],
        drawn(5),
    )
    for call, rows in enumerate((8, 8, 40, 8, 0, 40, 8)):
        a, other = drawn(rows, 4), others[call % 2]
        plain.copy_(drawn(4, 3))
        bias.copy_(drawn(5))
        weights = [kept, plain, other]
        results = weft.all_gather_matmul(a, weights, bias=[None, None, bias], algorithm=algorithm)
        whole = a.repeat(world.ranks, 1)
        wanted = [whole @ kept.plain, whole @ plain, whole @ other + bias]
        assert [torch.equal(*pair) for pair in zip(results, wanted, strict=True)] == [True] * 3, (
            rows
        )
    # one for each number of rows; none for 40 rows while variants are tried, nor for no rows
    assert len(engine(world).calls) == (1 if algorithm == "auto" else 2)
    kept.plain.add_(1)
    with pytest.raises(ValueError, match="changed after it was packed"):
        weft.all_gather_matmul(
            drawn(8, 4), [kept, plain, others[0]], bias=[None, None, bias], algorithm=algorithm
        )


@pytest.mark.parametrize("algorithm", ["auto", "push"])
def test_several_weights_may_be_written_to_in_place(algorithm):
    on_ranks(several, 2, algorithm)


def new_views(world):
    """Weights as new views in each call, two of each layout, then some invalid ones."""
    numbers, a = torch.Generator().manual_seed(9), torch.ones(3, 4)
    whole = [torch.randint(-4, 4, (8, 8), generator=numbers).float() for _ in range(2)]
    for call in range(12):
        b = whole[call % 2]
        for view in (b[:4, :4], b[4:, 4:].t(), b[::2, :4], b[:4, ::2], b[:4, :4].contiguous()):
            assert torch.equal(weft.all_gather_matmul(a, view), (a @ view).repeat(world.ranks, 1))
    assert len(engine(world).calls) == 5, "one for each layout"
    for wrong in (b[:4, :4].to_sparse(), b[:4, :4].to("meta"), [b], None, b[:4, :4].double(), b[0]):
        with pytest.raises((TypeError, ValueError)):
            weft.all_gather_matmul(a, wrong)
        if wrong is not None:
            with pytest.raises((TypeError, ValueError)):
                weft.all_gather_matmul(a, b[:4, :4], bias=wrong)
    with pytest.raises(TypeError):
        weft.all_gather_matmul(a, b[:4, :4], bias=weft.pack(b[:4, :4]))


def test_calls_are_found_by_the_layouts_of_weights():
    on_ranks(new_views, 2)


def views_of_another_library(world):
    """Rows of symmetric memory, alternately as a view of torch's and of another library's."""
    whole, b = world.empty(8, 4), torch.randn(4, 3)
    whole.copy_(torch.arange(32).view(8, 4) + world.rank)
    other, every = (
        torch.from_numpy(whole.numpy()[2:]),
        torch.cat([whole[2:] - world.rank, whole[2:] - world.rank + 1]),
    )
    for rows in (whole[2:], whole[2:], other, other, whole[2:], other):
        torch.testing.assert_close(weft.all_gather_matmul(rows, b, algorithm="direct"), every @ b)
        assert torch.equal(weft.all_gather(rows, algorithm="pull"), every)


def test_symmetric_rows_are_found_through_any_view():
    on_ranks(views_of_another_library, 2)


def test_layouts_differ_by_dtype_shape_and_strides(tensor_access):
    """Also where native code cannot read tensors directly."""
    b = torch.zeros(4, 4)
    others = [
        (b.t(),),
        (b[:, :2],),
        (b[:2],),
        (b.view(16),),
        (b.double(),),
        (b.int(),),
        (b, None),
        (None, b),
        (b, b),
        (),
    ]
    found = [_native.layouts(each) for each in [(b,), *others]]
    assert len({*found}) == len(found)
    assert _native.layouts((b.clone(),)) == found[0]
    assert _native.layouts((b, b.to("meta"))) is None


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_are_found_by_the_layout_of_rows(name):
    on_ranks(rows_of_other_layouts, 2, name)


def rows_of_other_layouts(world, name):
    """Rows of one size in several layouts, seven times each, and operands that are refused."""
    call, b, drawn = getattr(weft, name), torch.eye(4), torch.arange(16.0).view(4, 4)
    symmetric = world.empty(4, 4)
    symmetric.copy_(drawn)
    wide = torch.zeros(4, 8)
    wide[:, ::2] = drawn
    for _ in range(7):
        for a in (drawn, drawn.t(), symmetric, wide[:, ::2], wide[:, :4], drawn[:2], drawn):
            assert torch.equal(call(a, b), expected(world, name, a, b, torch.zeros(4), "sum"))
        for wrong in (
            torch._neg_view(drawn),
            drawn.double(),
            drawn[:, :3],
            drawn.to("meta"),
            drawn.to_sparse(),
            [drawn],
            None,
        ):
            with pytest.raises((TypeError, ValueError)):
                call(wrong, b)
    deep = drawn.view(2, 2, 4)
    for _ in range(3):
        if name == "matmul_all_reduce":
            assert torch.equal(call(deep, b), 2 * deep)
        elif name == "all_gather_matmul":
            assert torch.equal(call(deep, b), deep.repeat(2, 1, 1))
        else:
            assert torch.equal(call(deep, b), 2 * deep[world.rank : world.rank + 1])


def many_calls(world):
    """More calls than the cache keeps, with all sorts of options; `most` of them stay cached."""
    own, counted, none = engine(world), [], [None] * 4
    program = own.program(barrier(world.placement.levels), {})
    for number in range(_native.CallCache.most + 10):
        key = counted.append, (number,), *none
        own.calls.add(*key, program, program.bind({}, ()), {}, [], None)
        assert _native.repeat(*key, world, 1.0) is True
        for other in (-1,), ([],):
            assert _native.repeat(counted.append, other, *none, world, 1.0) is None
        counted_now = len(own.calls)
        assert 0 < counted_now <= _native.CallCache.most
    assert counted_now == 10


def companions(world, own):
    """Rows with companions: new ones in each call, and of other dtypes, beside the same rows."""
    numbers = torch.Generator().manual_seed(3)
    experts = weft.pack_experts(
        torch.randn(2, 8, 4, generator=numbers), torch.randn(2, 4, 4, generator=numbers)
    )
    every = weft.Experts(experts.gate_up.repeat(world.ranks, 1, 1), experts.down.repeat(2, 1, 1))
    mine = weft.pack_experts(experts.gate_up, experts.down, first=2 * world.rank)
    options = {"experts_of_ranks": [2] * world.ranks} if own else {}
    x, kept = torch.randn(6, 4, generator=numbers), set()
    for dtype in (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32):
        chosen = torch.randint(0, 2 * world.ranks, (6, 2), generator=numbers).to(dtype)
        scores = torch.rand(6, 2, generator=numbers)
        found = weft.moe(x, chosen, scores, mine, **options)
        torch.testing.assert_close(found, weft.expert_sums(x, chosen, scores, every))
        kept.add(len(engine(world).calls))
    assert max(kept) == len(engine(world).calls) > 0, "repeated calls are found"


@pytest.mark.parametrize("own", [False, True])
def test_companions_may_be_other_tensors(own):
    on_ranks(companions, 2, own)


def limited_calls(world):
    """A call that may be repeated twice, and twice again after it was checked."""
    own = engine(world)
    program = own.program(barrier(world.placement.levels), {})
    key = limited_calls, (), None, None, None, None
    for _ in range(3):
        binding, left = program.bind({}, ()), _native.CallsLeft(2)
        own.calls.add(*key, program, binding, {}, [], None, left)
        assert [_native.repeat(*key, world, 1.0) for _ in range(4)] == [True, True, None, None]


def test_a_call_is_checked_after_a_number_of_repetitions():
    on_ranks(limited_calls, 1)


def test_the_call_cache_is_bounded():
    on_ranks(many_calls, 1)


def output_argument(world, name):
    """Results in the caller's tensors, which must not overlap an operand in a repeated call either."""
    numbers = torch.Generator().manual_seed(11)
    call, b = getattr(weft, name), torch.randint(-4, 4, (4, 4), generator=numbers).float()
    whole = torch.zeros(64, 4)
    for rows in (4, 4, 8, 4, 8):
        a = torch.randint(-4, 4, (rows, 4), generator=numbers).float()
        wanted = expected(world, name, a, b, torch.zeros(4), "sum")
        out = torch.empty_like(wanted)
        assert call(a, b, out=out) is out
        assert torch.equal(out, wanted)
        within = whole[: 2 * len(a)][: len(wanted)]
        for operands in ((whole[:rows], b), (a, whole[:4])):
            with pytest.raises(ValueError, match="must not overlap"):
                call(*operands, out=within)
    with pytest.raises(ValueError, match="out= cannot be recorded"):
        call(a, b, out=torch.empty_like(wanted).requires_grad_())


@pytest.mark.parametrize("name", OPERATORS)
def test_repeated_calls_write_to_the_out_argument(name):
    on_ranks(output_argument, 2, name)


def changed_when_repeated(world, name):
    """A packed weight that is written to between two equal calls, and operands that require a
    gradient in a later call only.
    """
    call, a, b = getattr(weft, name), torch.ones(4, 4), torch.eye(4)
    packed, before = weft.pack(b), world.executor.calls
    for _ in range(3):
        wanted = call(a, packed)
    b.mul_(2)
    before = world.executor.calls
    with pytest.raises(ValueError, match="changed after it was packed"):
        call(a, packed)
    assert world.executor.calls == before, "nothing was sent"
    again = call(a.clone().requires_grad_(), weft.pack(torch.eye(4)))
    assert again.requires_grad
    assert torch.equal(again.detach(), wanted)
    with torch.no_grad():
        assert not call(a.clone().requires_grad_(), weft.pack(torch.eye(4))).requires_grad
    with pytest.raises(ValueError, match="timeout must be a positive"):
        call(a, weft.pack(torch.eye(4)), timeout=-1)
    negative = torch._neg_view(torch.eye(4))
    with pytest.raises(ValueError, match="negative view"):
        call(a, negative)


@pytest.mark.parametrize("name", OPERATORS)
def test_repeated_calls_check_for_changes(name):
    on_ranks(changed_when_repeated, 2, name)


def fails_in_the_middle(world):
    """A product that fails closes the world on all ranks."""
    a, broken = torch.ones(2, 4), []

    def product(rows, out):
        if broken:
            raise RuntimeError("no memory")
        out.copy_(rows)

    b = weft.weight(product, (4, 4), torch.float32)
    for _ in range(2):
        weft.all_gather_matmul(a, b)
    if world.rank == 0:
        broken.append(True)
        with pytest.raises(RuntimeError, match="no memory"):
            weft.all_gather_matmul(a, b)
        assert world.closed
        return
    with pytest.raises(weft.PeerLost, match="no memory"):
        for _ in range(3):  # rank 0 sent its rows of the first call
            weft.all_gather_matmul(a, b)


def test_a_repeated_call_that_fails_closes_the_world():
    on_ranks(fails_in_the_middle, 2)


def traced(world):
    """A recorded repeated call has its instructions in the trace."""
    a, b = torch.ones(2, 4), torch.eye(4)
    for _ in range(2):
        weft.matmul_all_reduce(a, b)
    with record(world) as recording:
        weft.matmul_all_reduce(a, b)
    ((plan, _, spans),) = recording.executions
    return plan.operator, all(stop > 0 for *_, stop in spans)


def test_a_repeated_call_is_traced():
    assert on_ranks(traced, 2) == [("matmul_all_reduce", True)] * 2


def new_tensors(world):
    """Collectives on tensors that are new in each call, in place and not, in ordinary and in
    short-lived symmetric memory.
    """
    drawn, ranks, mine = random.Random(3), world.ranks, world.rank
    for call in range(300):
        size, symmetric = drawn.choice((3, 40, 5000)), drawn.random() < 0.2
        spare = torch.empty(drawn.randint(0, 3))  # varies the addresses

        def empty(*shape, symmetric=symmetric):
            return world.empty(*shape) if symmetric else torch.empty(shape)

        parts = [torch.full((size,), float(call + 1000 * rank)) for rank in range(ranks)]
        a, whole = empty(size).copy_(parts[mine]), empty(ranks, size)
        match drawn.randrange(6):
            case 0:
                assert torch.equal(weft.all_reduce(a), sum(parts))
            case 1:
                assert torch.equal(weft.all_reduce(a, out=a), sum(parts))
                assert torch.equal(a, sum(parts))
            case 2:  # in place: each rank's rows are its part of the result
                own = whole.view(-1)[mine * size : (mine + 1) * size].copy_(a)
                assert torch.equal(weft.all_gather(own, out=whole.view(-1)), torch.cat(parts))
            case 3:
                assert torch.equal(weft.all_gather(a, out=whole.view(-1)), torch.cat(parts))
            case 4:
                whole.copy_(torch.stack(parts))
                assert torch.equal(weft.reduce_scatter(whole.view(-1)), ranks * parts[mine])
            case 5:
                assert torch.equal(weft.broadcast(a, call % ranks), parts[call % ranks])
        del spare
    assert len(engine(world).calls) < 150
    a = torch.ones(40)
    for _ in range(3):
        with pytest.raises(ValueError, match="out requires a gradient"):
            weft.all_reduce(torch.ones(40), out=torch.ones(40, requires_grad=True))
        for wrong in (torch._neg_view(a), a[None].to_sparse(), a.to("meta")):
            with pytest.raises((TypeError, ValueError)):
                weft.all_reduce(wrong)
            with pytest.raises((TypeError, ValueError)):
                weft.all_reduce(a, out=wrong)
        assert torch.equal(weft.all_reduce(a), torch.full((40,), float(ranks)))
        assert torch.equal(weft.all_reduce(torch.ones(80)[::2]), torch.full((40,), float(ranks)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_on_new_tensors(ranks):
    on_ranks(new_tensors, ranks)


def forgotten(world):
    """Weights that are new in each call, as if computed from others."""
    gone = []
    for call in range(6):
        b = torch.full((3, 2), float(call))
        gone.append(weakref.ref(b))
        for _ in range(2):
            assert weft.matmul_all_reduce(torch.ones(2, 3), b)[0, 0] == 3 * call * world.ranks
    del b
    gc.collect()
    return [reference() is None for reference in gone]


def test_weights_are_not_kept_alive():
    for outcome in on_ranks(forgotten, 2):
        assert all(outcome)


def concurrent(world):
    """A link that is emulated from some call on, and new tensors with the layouts of earlier ones
    during an asynchronous call.
    """
    a, b = torch.ones(64, 4), torch.ones(4, 4)
    for _ in range(2):
        weft.all_gather_matmul(a, b)
    world.emulate_link(0.1)
    assert torch.equal(weft.all_gather_matmul(a, b), torch.full((128, 4), 4.0))
    world.emulate_link(0.0)
    sums = []
    for call in range(8):
        handle = weft.all_reduce_async(torch.full((5,), float(call)))
        sums.append(weft.all_reduce(torch.full((5,), 10.0 * call)))
        assert torch.equal(handle.wait(), torch.full((5,), 2.0 * call))
    assert [total[0].item() for total in sums] == [20.0 * call for call in range(8)]
    assert len({total.data_ptr() for total in sums}) == len(sums)
    return len(engine(world).programs)


def test_cached_calls_between_asynchronous_ones():
    assert all(programs < 16 for programs in on_ranks(concurrent, 2))


def in_and_out_of_inference(world, name, within):
    """Calls of one size, the first of them inside or outside of inference mode, the later ones in
    the other mode; the results are equal.
    """
    numbers = torch.Generator().manual_seed(world.rank)
    a, b = torch.randn(6, 8, generator=numbers), torch.randn(8, 5, generator=numbers)
    results = []
    for inside in (within, not within, within, not within):
        with torch.inference_mode(inside):
            results.append(getattr(weft, name)(a, b).clone())
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("within", [True, False], ids=["inference first", "inference later"])
@pytest.mark.parametrize("name", OPERATORS)
def test_cached_calls_work_in_and_out_of_inference_mode(name, within):
    on_ranks(in_and_out_of_inference, 2, name, within)


def many_shapes(world):
    """Shapes that are all different do not leave one program each."""
    b, counts = torch.eye(3), []
    for rows in range(1, 400):
        a = torch.full((rows, 3), float(rows))
        assert torch.equal(weft.all_gather_matmul(a, b), a.repeat(world.ranks, 1))
        assert weft.all_reduce(a[:, 0].contiguous()).sum() == world.ranks * rows * rows
        if rows in (100, 399):
            counts.append(len(engine(world).programs))
    return counts


@pytest.mark.data
def test_the_number_of_programs_is_bounded():
    for few, all_of_them in on_ranks(many_shapes, 2):
        assert all_of_them <= few + 8 < 48


def test_a_process_with_cached_calls_exits_cleanly():
    """Also without closing its world: native code keeps no object beyond Python's end."""
    code = (
        "import torch, weft; weft.init(); a, b = torch.ones(2, 4), torch.eye(4)\n"
        "for _ in range(3): weft.all_reduce(a), weft.matmul_all_reduce(a, weft.pack(b))"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, env={**os.environ, **place, "MASTER_PORT": "0"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def a_thread_runs_while_a_peer_is_late(world, fifo):
    """Rank 1 makes its calls only after a thread of rank 0, which runs Python while rank 0 waits in
    repeated calls.
    """
    a = torch.ones(2)
    for call in (weft.barrier, lambda: weft.all_reduce(a, out=a)):
        for _ in range(3):
            call()
        waiting = threading.Event()

        def tell(waiting=waiting):
            waiting.wait()
            with open(fifo, "w") as to:
                to.write("go")

        if world.rank == 0:
            thread = threading.Thread(target=tell)
            thread.start()
            waiting.set()
        else:
            with open(fifo) as told:
                assert told.read() == "go"
        call()
        if world.rank == 0:
            thread.join()
    assert torch.equal(a, torch.full((2,), 2.0**4))


def test_repeated_small_calls_let_other_threads_run_while_they_wait(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    on_ranks(a_thread_runs_while_a_peer_is_late, 2, fifo)


def a_handler_makes_calls(world):
    """A signal handler makes calls in another world while rank 0 waits in a repeated one."""
    other, handled = another_world(world), []

    def handle(*_):
        for _ in range(3):
            weft.barrier(world=other)
        handled.append(True)

    for _ in range(3):
        weft.barrier(world=other)
        weft.barrier()
    if world.rank:
        handle()
    else:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    weft.barrier()
    assert handled
    other.close()


def test_a_signal_handler_may_call_in_another_world_while_a_call_waits():
    on_ranks(a_handler_makes_calls, 2)


def not_repeated(world):
    """Calls that were cached, in the states in which none may be repeated unchecked."""
    a = torch.ones(2)
    key = all_reduce_check, ("sum", "auto"), a, a, None, None
    for _ in range(3):
        weft.all_reduce(a, out=a)
    assert _native.repeat(*key, None, None) is a
    with record(world) as recording:
        assert _native.repeat(*key, None, None) is None
        weft.all_reduce(a, out=a)
    assert len(recording.executions) == 1
    for timeout in (0, -1.0, float("nan"), float("inf"), "1", True):
        assert _native.repeat(*key, world, timeout) is None
    with pytest.raises(ValueError, match="timeout"):
        weft.all_reduce(a, out=a, timeout=-1.0)
    with pytest.raises(TypeError, match=r"world must be a weft\.World"):
        weft.all_reduce(a, out=a, world=3)
    handle = weft.all_reduce_async(a, out=a)
    assert _native.repeat(*key, world, None) is None
    handle.wait()
    assert _native.repeat(*key, world, 5) is a
    weft.barrier()
    world.close()
    assert _native.repeat(*key, world, None) is None
    with pytest.raises(weft.WeftError, match="closed"):
        weft.all_reduce(a, out=a)


def test_calls_are_not_repeated_unchecked():
    on_ranks(not_repeated, 2)
