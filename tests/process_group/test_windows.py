"""Windows of process groups of torch 2.14."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch._C import _distributed_c10d as c10d

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="torch before 2.14 has no windows"
)


def puts(pg):
    assert dist._supports_window()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    whole = torch.full((4 + rank, 2), -1.0)
    part = whole[rank:]  # a view, elsewhere in its storage on each rank
    for given in (None, part):
        window = dist._new_window(given)
        if given is None:
            window.tensor_register(part)
        for step in range(3):
            asynchronous = step == 1
            values = torch.full((2,), 10.0 * step + rank)
            for work in (
                window.put(values, following, 2 * step, asynchronous),
                window.signal(following, asynchronous),
                window.wait_signal(before, asynchronous),
            ):
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()
            assert whole[rank + step].tolist() == [10.0 * step + before] * 2
            assert window.map_remote_tensor(rank).data_ptr() == part.data_ptr()
        dist.barrier()
        theirs = window.map_remote_tensor(before)
        assert theirs.shape == (4, 2)
        assert theirs[1].tolist() == [10.0 + (before - 1) % ranks] * 2
        assert window.get_attr(following).access_type == c10d.WindowAccessType.UNIFIED
        window.tensor_deregister()
    return whole[:rank].flatten().tolist()


def test_puts_and_signals_reach_a_tensor_and_its_views():
    assert on_ranks(puts, 3, context=group) == [[], [-1.0] * 2, [-1.0] * 4]


def refuses(pg):
    window, x = dist._new_window(), torch.ones(4)
    for call in (lambda: window.put(x, 0, 0, False), lambda: window.signal(0, False)):
        with pytest.raises(RuntimeError, match="not registered"):
            call()
    with pytest.raises(ValueError, match="contiguous"):
        window.tensor_register(torch.ones(4, 4).t())
    window.tensor_register(x)
    with pytest.raises(RuntimeError, match="double registration"):
        window.tensor_register(x)
    with pytest.raises(RuntimeError, match="another window"):
        dist._new_window(x)
    with pytest.raises(RuntimeError, match="exceeds the window size"):
        window.put(torch.ones(4), 1, 2, False)
    with pytest.raises(TypeError, match="float32"):
        window.put(torch.ones(1, dtype=torch.int8), 1, 0, False)
    short = c10d.WaitSignalOptions()
    short.timeout = timedelta(seconds=0.05)
    with pytest.raises(RuntimeError, match=r"waited 0\.05 s"):
        window.wait_signal(1 - dist.get_rank(), False, short)
    dist.barrier()
    window.signal(1 - dist.get_rank(), False)
    window.wait_signal(1 - dist.get_rank(), False)


def test_wrong_calls_are_refused_and_leave_the_window_as_it_is():
    on_ranks(refuses, 2, context=group)
