"""Windows of process groups of torch 2.14."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch._C import _distributed_c10d as c10d

import weft
from weft.process_group import worlds
from weft.process_group.windows import Window

needs_windows = pytest.mark.skipif(
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


@needs_windows
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


@needs_windows
def test_wrong_calls_are_refused_and_leave_the_window_as_it_is():
    on_ranks(refuses, 2, context=group)


def tensors_of_two_dtypes(pg, of_torch):
    own = torch.full((8,), 3.0, dtype=(torch.float32, torch.float64)[dist.get_rank()])
    address, moved = own.data_ptr(), []
    operations = worlds.operations_of(pg)
    window = Window(operations, lambda *_: moved.append(1))
    register = dist._new_window().tensor_register if of_torch else lambda x: window.register(x, 0)
    for _ in range(2):
        with pytest.raises(weft.MismatchError, match="dtype") as refused:
            register(own)
        assert str(refused.value).splitlines()[1:] == ["  rank 0: float32", "  rank 1: float64"]
    assert (own.data_ptr(), moved) == (address, [])
    assert own.tolist() == [3.0] * 8
    if dist.get_rank():
        # a call that a rank made late would be taken for a refused one
        operations.world.failure.check()
        pg.get_group_store().wait(["late"])
    else:
        pg.get_group_store().set("late", "")
    dist.barrier()
    register(own.float())  # the window is as it was


@pytest.mark.parametrize("of_torch", [False, pytest.param(True, marks=needs_windows)])
def test_tensors_of_different_dtypes_are_refused_on_all_ranks(of_torch):
    on_ranks(tensors_of_two_dtypes, 2, of_torch, context=group)


def refused_on_one_rank(pg):
    window = Window(worlds.operations_of(pg), lambda *_: None)
    store, strided = pg.get_group_store(), torch.ones(4, 4).t()
    if dist.get_rank():
        with pytest.raises(weft.MismatchError, match="a window's tensor must be contiguous"):
            window.register(torch.ones(4, 4), False)
        store.set("told", "")
    else:
        with pytest.raises(ValueError, match="contiguous"):
            window.register(strided, False)
        store.wait(["told"])


def test_peers_of_a_rank_that_is_refused_learn_why():
    on_ranks(refused_on_one_rank, 2, context=group)
