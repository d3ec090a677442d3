"""Groups that a library makes itself, without torch.distributed's own functions, as torchft does."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import group, on_ranks
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed.distributed_c10d import PrefixStore

import weft
from weft import process_group
from weft.process_group import worlds


def made(_):
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()

    def make(name, seconds=20.0):
        limit = timedelta(seconds=seconds)
        return process_group.make(PrefixStore(name, store), rank, 2, limit, [5, 7])

    first = make("first")
    x = torch.tensor([1.0 + rank])
    first.allreduce([x], AllreduceOptions()).wait()
    assert x.item() == 3.0
    assert (first.rank(), first.size()) == (rank, 2)
    assert worlds.find(first).global_ranks == [5, 7]
    if rank == 1:
        worlds.find(first).close()
    else:
        with pytest.raises(weft.PeerLost, match="Connection closed by peer"):
            first.allreduce([x], AllreduceOptions()).wait()
    again = make("second")  # in place of the first, as after a new quorum
    x = torch.tensor([1.0 + rank])
    again.allreduce([x], AllreduceOptions()).wait()
    assert x.item() == 3.0
    if rank == 0:
        with pytest.raises(weft.PeerTimeout, match=r"timeout after 10ms"):
            make("alone", 0.01)
    dist.barrier()


def gloo():
    return group("gloo")


def test_a_library_makes_its_groups_anew():
    on_ranks(made, 2, context=gloo)
