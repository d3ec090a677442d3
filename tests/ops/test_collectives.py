"""Collectives on real ranks, compared with torch on one process."""

from __future__ import annotations

import contextlib
import itertools
import random
from functools import partial

import pytest
import torch
from support.checks.collectives import (
    in_the_background,
    late_in_the_background,
    mixed_back_to_back,
    moving,
    reducing,
    the_same_tensors_again,
    uneven,
)
from support.pairs import pairs
from support.ranks import another_world, die, everyones, meet, on_ranks, start

import weft
import weft._native as _native

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.data
@pairs(("ranks", "symmetric"), (2, 3), (False, True), [(2, True), (3, False)])
def test_moving(ranks, symmetric):
    on_ranks(moving, ranks, symmetric)


@pytest.mark.data
@pairs(("ranks", "symmetric"), (2, 3), (False, True), [(2, False), (3, True)])
def test_reducing(ranks, symmetric):
    on_ranks(reducing, ranks, symmetric)


@pytest.mark.data
def test_uneven_sizes():
    on_ranks(uneven, 3)


def without_rows(world):
    """A rank without rows passes a view whose columns have distances; others have rows, or none."""
    nothing, some = torch.empty(4, 6)[:0, ::2], torch.randn(2, 3)
    theirs = everyones(some)[1]
    mine = some if world.rank else nothing
    assert torch.equal(weft.all_gather(mine, shard_rows=[0, 2]), theirs)
    b = torch.randn(3, 2)
    product = weft.all_gather_matmul(mine, everyones(b)[0], shard_rows=[0, 2])
    torch.testing.assert_close(product, theirs @ everyones(b)[0])
    for none in (nothing, torch.empty(0, 3)):
        mine = nothing if world.rank else none
        assert weft.all_reduce(mine).shape == (0, 3)
        assert weft.all_to_all(mine).shape == (0, 3)
        assert weft.broadcast(mine, 0).shape == (0, 3)
        out = torch.empty(4, 6)[:0, ::2] if world.rank else torch.empty(0, 3)
        assert weft.reduce_scatter(mine, shard_rows=[0, 0], out=out) is out
    for shape, dim in itertools.product([(0, 5), (0, 2, 3), (2, 0, 3), (2, 3, 0)], (0, 1, -1)):
        expected = list(shape)
        expected[dim] *= world.ranks
        for algorithm, chunk_rows in itertools.product(("pull", "push", "ring"), (1, 3)):
            gathered = weft.all_gather(
                torch.empty(shape), dim=dim, chunk_rows=chunk_rows, algorithm=algorithm
            )
            assert list(gathered.shape) == expected


def test_tensors_without_elements():
    on_ranks(without_rows, 2)


def same_bits(world):
    for dtype in FLOATS:
        a = torch.randn(5000).to(dtype)
        exact = torch.stack(everyones(a)).double()
        unit = torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps
        for algorithm, op in itertools.product(("one_shot", "two_shot", "ring"), ("sum", "avg")):
            first = weft.all_reduce(a, op=op, algorithm=algorithm)
            assert all(torch.equal(first, other) for other in everyones(first)), (
                "equal bits on all ranks"
            )
            roundings = world.ranks if algorithm == "ring" else 1
            right = exact.sum(0) if op == "sum" else exact.mean(0)
            bound = (world.ranks * unit + roundings * torch.finfo(dtype).eps) * exact.abs().sum(0)
            assert ((first.double() - right).abs() <= bound).all()
            for _ in range(20):
                assert torch.equal(weft.all_reduce(a, op=op, algorithm=algorithm), first)


@pytest.mark.data
def test_same_bits_everywhere_and_always():
    on_ranks(same_bits, 3)


@pytest.mark.data
def test_collectives_in_the_background():
    on_ranks(in_the_background, 2)


@pytest.mark.data
def test_a_handle_can_be_waited_for_again():
    assert on_ranks(late_in_the_background, 2) == [20.0, 20.0]


def lost_in_the_background(world):
    weft.all_reduce(torch.ones(3))
    if world.rank == 1:
        die()
    handle = weft.all_reduce_async(torch.ones(10))
    with pytest.raises(
        weft.PeerLost,
        match=r"rank 1 \(pid \d+\) died while rank 0 waited for rows 0:10 of all_reduce call",
    ):
        handle.wait()
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        weft.all_reduce(torch.ones(3))


def test_a_lost_peer_in_the_background():
    assert start(lost_in_the_background, 2)[0].error is None


@pytest.mark.data
def test_the_same_tensors_again():
    on_ranks(the_same_tensors_again, 2)


CHANGES = (
    lambda a: a.t_(),
    lambda a: a.resize_(3, 2),
    lambda a: a.unsqueeze_(0),
    lambda a: setattr(a, "data", a.data.view(torch.int32)),
)


def test_the_native_view_of_a_tensor(tensor_access):
    def seen(a):
        return _native.layouts((a, None))

    for change in CHANGES:
        a = torch.empty(2, 3)
        was = seen(a)
        assert was == seen(torch.zeros(2, 3)), "the layout, not the address"
        assert was != seen(a.t())
        change(a)
        assert was != seen(a)
    assert seen(torch.empty(2, device="meta")) is None


def elsewhere(world):
    """Symmetric tensors at an offset that differs between ranks: right results, or both ranks name
    the difference.
    """
    at, ours, theirs = (
        8 * world.rank,
        torch.arange(8.0) + 100 * world.rank,
        torch.arange(8.0) + 100 * (1 - world.rank),
    )
    parts = [theirs, ours] if world.rank else [ours, theirs]
    total, half = ours + theirs, slice(4 * world.rank, 4 * world.rank + 4)
    found = []
    for symmetric, again in itertools.product(("a", "out", "both"), (False, True)):
        for call, size, right in (
            [
                (partial(weft.all_gather, algorithm=which), 16, torch.cat(parts))
                for which in ("auto", "pull", "push", "ring")
            ]
            + [
                (partial(weft.all_reduce, algorithm=which), 8, total)
                for which in ("one_shot", "two_shot", "ring")
            ]
            + [
                (weft.reduce_scatter, 4, total[half]),
                (weft.all_to_all, 8, torch.cat([part[half] for part in parts])),
                (lambda a, out, world: weft.broadcast(out.copy_(a), 0, world=world), 8, parts[0]),
            ]
        ):
            with contextlib.suppress(weft.MismatchError), another_world(world) as own:
                shared = own.empty(64).fill_(-1)
                a = shared[at : at + 8] if symmetric != "out" else torch.empty(8)
                out = shared[32 + at : 32 + at + size] if symmetric != "a" else torch.empty(size)
                if again:  # first at equal offsets, which caches the call
                    call(
                        shared[:8].clone() if symmetric == "out" else shared[:8],
                        out=out.clone(),
                        world=own,
                    )
                a.copy_(ours)
                found.append(False)
                assert torch.equal(call(a, out=out, world=own), right)
                found[-1] = True
            meet()
    return found


@pytest.mark.data
def test_symmetric_tensors_at_different_offsets():
    first, second = on_ranks(elsewhere, 2)
    assert first == second
    assert any(first), "some need not agree"
    assert not all(first), "the others notice"


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_kinds_back_to_back(ranks):
    on_ranks(mixed_back_to_back, ranks)


def bad_arguments(world):
    a = torch.ones(4, 3)
    bad = [
        (
            ValueError,
            "there is no reduction 'mean'; choose one of sum, avg, max, min",
            lambda: weft.all_reduce(a, op="mean"),
        ),
        (
            TypeError,
            "a has dtype int64; supported are float16",
            lambda: weft.all_reduce(a.long(), op="avg"),
        ),
        (TypeError, "a has dtype bool", lambda: weft.reduce_scatter(a.bool())),
        (TypeError, "a has dtype complex64", lambda: weft.all_gather(a.to(torch.complex64))),
        (ValueError, "there is no dimension 2", lambda: weft.all_gather(a, dim=2)),
        (
            ValueError,
            "there is no algorithm 'magic'",
            lambda: weft.all_gather(a, algorithm="magic"),
        ),
        (ValueError, "there is no rank 7 in a world of 2", lambda: weft.broadcast(a, 7)),
        (ValueError, "tensor must be contiguous", lambda: weft.broadcast(a.t(), 0)),
        (
            ValueError,
            "3 rows do not divide evenly over 2 ranks: give shard_rows",
            lambda: weft.reduce_scatter(a[:3]),
        ),
        (
            ValueError,
            "shard_rows must be 2 counts, none negative, of 4 in all",
            lambda: weft.reduce_scatter(a, shard_rows=[1, 1]),
        ),
        (
            ValueError,
            "3 rows do not divide evenly over 2 ranks: give the split sizes",
            lambda: weft.all_to_all(a[:3]),
        ),
        (
            ValueError,
            "must be 2 sizes each",
            lambda: weft.all_to_all(a, input_split_sizes=[4], output_split_sizes=[4, 0]),
        ),
        (ValueError, "out must not overlap an input", lambda: weft.all_reduce(a[:2], out=a[1:3])),
        (
            ValueError,
            r"out must have shape \(8, 3\)",
            lambda: weft.all_gather(a, out=torch.empty(4, 3)),
        ),
        (ValueError, "timeout must be a positive", lambda: weft.all_reduce(a, timeout=0)),
    ]
    for kind, message, call in bad:
        with pytest.raises(kind, match=message):
            call()
    with pytest.raises(
        ValueError, match=r"rank 0 sends rank 1 3 rows, but rank 1 expects 2 rows from it"
    ):
        weft.all_to_all(
            a, input_split_sizes=[1, 3], output_split_sizes=[2, 2] if world.rank else [1, 1]
        )
    assert torch.equal(weft.all_reduce(a), 2 * a), "nothing was sent: the world continues"


def few_rows(world):
    """Broadcasts of few rows between other collectives, and several of them at a time."""
    for number in range(50):
        source = random.Random(number).randrange(world.ranks)
        assert (
            weft.broadcast(torch.tensor([number if world.rank == source else -1]), source).item()
            == number
        )
        assert weft.all_reduce(torch.ones(number % 3)).tolist() == [world.ranks] * (number % 3)
    for many in (1, *[24] * 5):
        sent = [
            torch.full((3,), number if world.rank == number % world.ranks else -1)
            for number in range(many)
        ]
        handles = [
            weft.broadcast_async(each, number % world.ranks) for number, each in enumerate(sent)
        ]
        assert [handle.wait().tolist() for handle in handles] == [
            [number] * 3 for number in range(many)
        ]


def another_tensor(world):
    """One rank's tensor is found in the call cache; the other rank's is new."""
    # keeps addresses from being reused: a tensor at an earlier one's address would be found
    kept = []
    for many in range(2 * _native.Executor.eager_sets):
        kept.append(small := torch.zeros(3))
        weft.barrier()
        for _ in range(many):
            weft.broadcast(small, 0)
        large = small.resize_(1 << 14) if world.rank else torch.empty(1 << 14)
        weft.broadcast(large.fill_(torch.nan if world.rank else many), 0)
        assert large.eq(many).all()


@pytest.mark.data
def test_another_tensor_in_place_of_a_small_one():
    on_ranks(another_tensor, 2)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 5])
def test_broadcasts_of_few_rows(ranks):
    on_ranks(few_rows, ranks)


@pytest.mark.data
def test_invalid_arguments_are_refused():
    on_ranks(bad_arguments, 2)


def handle_is_dropped(world):
    """The tensors of an asynchronous call live until the call is over: their memory is not reused."""
    for size in (1000, 1 << 20):
        signals, a = world.signals(1), torch.full((size,), 2.0)
        weft.all_reduce(a)  # allocates the workspace
        if world.rank:
            weft.all_reduce_async(a)
            del a
            others = [torch.full((size,), 7.0) for _ in range(8)]
            weft.notify(signals, 0, 0)
        else:
            weft.wait(signals, 0, ">=", 1)
            assert torch.equal(weft.all_reduce_async(a).wait(), torch.full((size,), 4.0))
        weft.barrier()
        if world.rank:
            assert all(torch.equal(other, torch.full((size,), 7.0)) for other in others)


@pytest.mark.data
def test_handle_is_dropped():
    on_ranks(handle_is_dropped, 2)


def closed_during_calls(world):
    """A rank that closes its world first completes its outstanding calls."""
    a, signals = torch.ones(1 << 20), world.signals(1)
    weft.all_reduce(a)
    if world.rank:
        handle = weft.all_reduce_async(a, timeout=600)
        world.close()
        with pytest.raises(weft.WeftError, match=r"rank 1 .*closed its world"):
            handle.wait()
    else:
        with pytest.raises(weft.PeerLost, match=r"rank 1 .*closed its world"):
            weft.wait(signals, 0, ">=", 1)


def test_closing_completes_outstanding_calls():
    on_ranks(closed_during_calls, 2)


def test_the_sizes_of_all_to_all_are_named_in_a_mismatch():
    def differ():
        if weft.init().rank:
            weft.all_reduce(torch.ones(4))
        else:
            weft.all_to_all(torch.ones(4), input_split_sizes=[2, 2], output_split_sizes=[2, 2])

    with (
        weft.local_world(2) as local,
        pytest.raises(weft.MismatchError, match=r"rank 0: sizes of all_to_all"),
    ):
        local.run(differ)
