"""Handles of asynchronous collectives: each is of its own call, whatever is called after it."""

from __future__ import annotations

import random

import pytest
import torch
from support.ranks import on_ranks, start

import weft


def ended(world):
    """A handle whose call another call has waited for is done, though its program runs again."""
    signals = world.signals(1)
    first = weft.all_reduce_async(torch.ones(100))
    weft.barrier()  # waits for it
    if world.rank == 0:
        second = weft.all_reduce_async(torch.full((100,), 2.0))
        assert first.done()
        assert first.wait(timeout=5.0).tolist() == [2.0] * 100
        assert not second.done()
        weft.notify(signals, 0, 1)  # only now does rank 1 make the second call
    else:
        weft.wait(signals, 0, ">=", 1)
        second = weft.all_reduce_async(torch.full((100,), 2.0))
    assert second.wait().tolist() == [4.0] * 100
    assert first.wait().tolist() == [2.0] * 100


def test_a_handle_is_of_its_own_call():
    on_ranks(ended, 2)


def failed(world):
    """A call that failed while another call waited for it has no result."""
    if world.rank == 0:
        handle = weft.all_reduce_async(torch.ones(3))
        with pytest.raises(weft.PeerLost):  # rank 1 leaves
            weft.barrier()
        for _ in range(2):
            with pytest.raises(weft.PeerLost):
                handle.wait()
        assert handle.done()


def test_the_error_of_a_call_is_that_of_its_handle():
    on_ranks(failed, 2)


def exchanged(world, step, rows):
    """An exchange of `rows[r][p]` rows from r to p: its handle, and the result to expect."""

    def sent(rank):
        return torch.arange(3.0 * sum(rows[rank])).view(-1, 3) + 100 * rank + 10_000 * step

    expected = [sent(rank).split(rows[rank])[world.rank] for rank in range(world.ranks)]
    handle = weft.all_to_all_async(
        sent(world.rank),
        input_split_sizes=rows[world.rank],
        output_split_sizes=[each[world.rank] for each in rows],
    )
    return handle, torch.cat(expected)


def not_awaited(world):
    """The call returns while peers have not made it; what is called next does not matter."""
    signals, rows = world.signals(1), [[0, 2], [3, 1]]
    if world.rank:
        weft.wait(signals, 0, ">=", 1)
    handle, expected = exchanged(world, 0, rows)
    if world.rank == 0:
        assert not handle.done()
        with pytest.raises(weft.PeerTimeout, match="all_to_all is not done"):
            handle.wait(0.01)
        weft.notify(signals, 0, 1)
    assert torch.equal(handle.wait(), expected)
    assert handle.done()
    draw = random.Random(7)
    for step in range(1, 30):
        rows = [[draw.choice((0, 1, 4000)) for _ in range(2)] for _ in range(2)]
        calls = [exchanged(world, step, rows) for _ in range(draw.choice((1, 1, 2)))]
        mine = random.Random(10 * step + world.rank)
        if mine.random() < 0.5:  # on some ranks
            while not calls[0][0].done():
                pass
        if mine.random() < 0.3:
            assert torch.equal(calls[0][0].wait(5.0), calls[0][1])
        if step % 3:
            assert weft.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
        if step % 5 == 0:
            del calls[0]  # it is made nonetheless
        later = weft.all_gather_async(torch.tensor([step]))
        for handle, expected in mine.sample(calls, len(calls)):
            assert torch.equal(handle.wait(), expected)
        assert later.wait().tolist() == [step, step]


@pytest.mark.data
def test_an_exchange_of_uneven_parts_is_not_awaited():
    on_ranks(not_awaited, 2)


def contradictory(world):
    """All ranks raise the error, from the handle and from no other call."""
    for poll in (False, True):
        handle = weft.all_to_all_async(
            torch.zeros(3), input_split_sizes=[1, 2], output_split_sizes=[2 * world.rank, 1]
        )
        assert weft.all_reduce(torch.ones(1)).item() == 2
        if poll:
            assert handle.done()
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 0 sends rank 0 1 rows, but rank 0 expects"):
                handle.wait()
    for sizes in ([1], [1, 1]):
        with pytest.raises(ValueError, match="must add up to 3 rows"):
            weft.all_to_all_async(
                torch.zeros(3), input_split_sizes=sizes, output_split_sizes=[1, 2]
            )
    handle, expected = exchanged(world, 0, [[0, 2], [3, 1]])
    assert torch.equal(handle.wait(), expected)


def test_split_sizes_that_contradict_each_other():
    on_ranks(contradictory, 2)


def lost(world):
    handle = exchanged(world, 0, [[0, 2], [3, 1]])[0]
    if world.rank == 1:
        return
    for _ in range(2):
        with pytest.raises(weft.PeerLost, match="rank 1"):
            handle.wait()


def test_a_peer_that_leaves_before_the_rows_move():
    assert start(lost, 2)[0].error is None
