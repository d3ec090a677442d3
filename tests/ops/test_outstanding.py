"""More asynchronous collectives than a world executes at a time."""

from __future__ import annotations

import pytest
import torch
from support.ranks import on_ranks, start

import weft
from weft.bootstrap import peer_memory

MANY = 60


def many_outstanding(_, reads):
    peer_memory.huge_pages = lambda: reads
    world = weft.init()
    numbers = peer_memory.LEAST_BYTES // 4
    mine = [
        torch.full((numbers if call % 4 == 0 else 5 + call,), 10.0 * call + world.rank)
        for call in range(MANY)
    ]
    handles = [
        (weft.all_gather_async if call % 2 == 0 else weft.all_reduce_async)(each)
        for call, each in enumerate(mine)
    ]
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(1)).tolist()
    for call in order:
        everyones = [torch.full_like(mine[call], 10.0 * call + rank) for rank in range(world.ranks)]
        expected = torch.cat(everyones) if call % 2 == 0 else sum(everyones)
        assert torch.equal(handles[call].wait(), expected), call


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_of_many_outstanding_calls(ranks, reads):
    on_ranks(many_outstanding, ranks, reads)


def one_differs(world):
    weft.barrier()
    ops = ["max" if world.rank and call == 3 else "sum" for call in range(MANY)]
    for handle in [weft.all_reduce_async(torch.ones(3), op=op) for op in ops]:
        handle.wait()


def test_a_mismatch_long_before_the_latest_call():
    for outcome in start(one_differs, 2):
        assert isinstance(outcome.error, weft.MismatchError), outcome
