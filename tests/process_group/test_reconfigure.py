"""Groups of torch 2.14 that are connected anew, shrunk, split and aborted."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks, start
from torch._C import _distributed_c10d as c10d

import weft

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="torch before 2.14 does not reconfigure groups"
)
CPU = torch.device("cpu")
LIMIT = timedelta(seconds=20)


def unconnected():
    return group(enable_reconfigure=True)


@contextlib.contextmanager
def connected():
    dist.init_process_group("weft", timeout=LIMIT)
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def handles_of(name, ranks):
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {os.environ['RANK']}", dist._get_reconfigure_handle())
    return [store.get(f"{name} {rank}").decode() for rank in ranks]


def total():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def changes(pg):
    rank, backend = int(os.environ["RANK"]), pg._get_backend(CPU)
    with pytest.raises(dist.DistBackendError, match="made with enable_reconfigure=True"):
        dist.all_reduce(torch.ones(1))
    assert backend.get_error() == c10d.ErrorType.SUCCESS
    handles = handles_of("all", range(3))
    dist._reconfigure(1, handles[::-1], timeout=LIMIT).wait()
    assert (dist.get_rank(), dist.get_world_size(), total()) == (2 - rank, 3, 6.0)
    with pytest.raises(RuntimeError, match="already used"):
        dist._reconfigure(1, handles)
    handles = handles_of("set", range(3))
    dist._reconfigure(2, set(handles)).wait()
    assert total() == 6.0
    assert dist.get_rank() == sorted(handles).index(handles[rank])

    called = []
    backend.register_abort_hook(1, lambda: called.append(1))
    backend.register_abort_hook(2, lambda: called.append(2))
    backend.unregister_abort_hook(2)
    handles = handles_of("after abort", range(3))
    backend.abort()
    assert called == [1]
    assert backend.get_error() == c10d.ErrorType.SUCCESS
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(torch.ones(1))
    dist._reconfigure(3, handles).wait()
    assert total() == 6.0


def test_a_group_is_connected_in_the_order_of_handles_and_after_an_abort():
    on_ranks(changes, 3, context=unconnected)


def goes_on(pg):
    rank, backend = int(os.environ["RANK"]), pg._get_backend(CPU)
    dist._reconfigure(1, handles_of("all", range(3))).wait()
    handles = handles_of("left", range(3))
    assert total() == 6.0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    called = []
    backend.register_abort_hook(0, lambda: called.append(0))
    with pytest.raises(weft.PeerLost):
        while True:
            total()
    assert called == [0]
    assert backend.get_error() == c10d.ErrorType.REMOTE_ERROR
    dist._reconfigure(2, [handles[0], handles[2]]).wait()
    assert backend.get_error() == c10d.ErrorType.SUCCESS
    return dist.get_rank(), dist.get_world_size(), total()


def test_ranks_that_are_left_go_on():
    first, lost, last = start(goes_on, 3, context=unconnected)
    assert lost is None
    assert [each.error and each.trace for each in (first, last)] == [None, None]
    assert (first.result, last.result) == ((0, 2, 3.0), (1, 2, 3.0))


def shrinks(pg):
    if dist.get_rank() == 1:
        total()
        return None
    total()
    assert pg._get_backend(CPU).supports_shrinking
    dist.shrink_group([1])
    return dist.get_rank(), dist.get_world_size(), total()


def test_a_group_shrinks():
    assert on_ranks(shrinks, 3, context=connected) == [(0, 2, 3.0), None, (1, 2, 3.0)]


def splits(pg):
    ranks = [0, 2] if dist.get_rank() != 1 else [1]
    part = pg.split_group(ranks, timeout=LIMIT, group_name=f"part {ranks}")
    x = torch.tensor([dist.get_rank() + 1.0])
    part.allreduce([x]).wait()
    part.shutdown()
    return part.rank(), part.size(), x.item()


def test_a_group_splits():
    assert on_ranks(splits, 3, context=connected) == [(0, 2, 4.0), (0, 1, 2.0), (1, 2, 4.0)]


def single(pg):
    rank, x = float(dist.get_rank()), torch.empty(4)
    dist.all_gather_single(x, torch.full((2,), rank))
    out = torch.empty(2)
    dist.reduce_scatter_single(out, x)
    moved = torch.empty(2)
    dist.all_to_all_single(moved, torch.full((2,), rank), [1, 1], [1, 1])
    return x.tolist(), out.tolist(), moved.tolist()


def test_the_names_of_single_tensors():
    rows = [0.0, 0.0, 1.0, 1.0]
    assert on_ranks(single, 2, context=connected) == [
        (rows, [0.0, 0.0], [0.0, 1.0]),
        (rows, [2.0, 2.0], [0.0, 1.0]),
    ]
