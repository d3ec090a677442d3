"""Worlds and symmetric memory on real ranks."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import beside_gloo, meet, named_memory, none_left, on_ranks, sockets, start

import weft
import weft._native as _native
from weft.launchers.variables import launcher_variables, translated
from weft.world import memory


def peers_see_each_other(world):
    mine = world.empty(3, 5)
    mine.copy_(torch.arange(15.0).view(3, 5) + 100 * world.rank)
    meet()
    for rank in range(world.ranks):
        whole = world.peer(mine, rank)
        assert torch.equal(whole, torch.arange(15.0).view(3, 5) + 100 * rank)
        assert torch.equal(world.peer(mine[1:, ::2], rank), whole[1:, ::2])
        assert torch.equal(world.peer(mine.t()[2:4], rank), whole.t()[2:4])
    assert world.peer(mine, world.rank).data_ptr() == mine.data_ptr()
    meet()
    if world.rank == 0:
        world.peer(mine, world.ranks - 1)[0, 0] = -1
    meet()
    return mine[0, 0].item()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_peers_see_each_others_memory(ranks):
    results = on_ranks(peers_see_each_other if ranks > 1 else only_one, ranks)
    assert results[-1] == -1


def only_one(world):
    mine = world.empty(2, 2, dtype=torch.int64)
    world.peer(mine, 0)[0, 0] = -1
    return mine[0, 0].item()


def every_dtype_and_shape(world):
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ):
        for shape in ((), (0,), (7,), (2, 0, 3), (3, 1, 2)):
            tensor = world.empty(shape, dtype=dtype)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            assert world.peer(tensor, world.ranks - 1).shape == tensor.shape
    assert world.empty(3).dtype == torch.float32


def test_every_dtype_and_shape():
    on_ranks(every_dtype_and_shape, 2)


def symmetric_or_not(world):
    mine = world.empty(4)
    assert world.is_symmetric(mine)
    assert world.is_symmetric(mine[2:])
    assert not world.is_symmetric(torch.empty(4))
    assert not world.is_symmetric(mine.clone())
    mine.copy_(torch.arange(4) + 10 * world.rank)
    weft.barrier()
    for view in (
        torch.from_numpy(mine.numpy()[1:]),
        torch.from_dlpack(mine[1:]),
        torch.from_numpy(mine.numpy())[1:],
    ):
        assert world.is_symmetric(view), (
            "other libraries make storages of their own over the same memory"
        )
        assert not world.is_symmetric(view.clone())
        assert world.peer(view[::2], 1 - world.rank).tolist() == [
            11 - 10 * world.rank,
            13 - 10 * world.rank,
        ]
    with pytest.raises(ValueError, match="not a symmetric tensor"):
        world.peer(torch.empty(4), 0)
    with pytest.raises(ValueError, match="no rank 5 in a world of 2"):
        world.peer(mine, 5)
    with pytest.raises(ValueError, match="negative"):
        world.empty(-1)


def test_symmetric_or_not():
    on_ranks(symmetric_or_not, 2)


def freed_with_the_last_view(world):
    tensor = world.empty(1 << 20)
    address = tensor.data_ptr()
    view = world.peer(tensor, 1 - world.rank)[5:]
    del tensor
    gc.collect()
    assert address in memory.segments, "a view of the peer's part keeps the segment"
    del view
    gc.collect()
    assert address not in memory.segments
    with open("/proc/self/maps") as file:
        return sum("memfd:weft" in line for line in file)


def test_memory_is_freed_with_the_last_view():
    # the counters of the two ranks remain
    assert on_ranks(freed_with_the_last_view, 2) == [
        2,
        2,
    ]


def different_requests(world):
    with pytest.raises(
        weft.MismatchError,
        match=r"shapes differ\n  rank 0: empty\(\(4,\), float32\), at .*\n  rank 1: empty\(\(5,\), float32\), at ",
    ):
        world.empty(4 + world.rank)
    with pytest.raises(weft.WeftError, match="closed: MismatchError"):
        world.empty(4)
    other = weft.init()
    with pytest.raises(
        weft.MismatchError,
        match=r"arguments differ\n  rank 0: signals\(4\), at .*\n  rank 1: signals\(5\), at ",
    ):
        other.signals(4 + world.rank)


@pytest.mark.parametrize(
    ("call", "digest"), [("", 0xCBF29CE484222325), ("foobar", 0x85944171F73967E8)]
)
def test_digests_are_equal_in_all_builds(call, digest):
    assert _native.Compiled(call, 1, [], 1).digest == digest


def test_different_requests_are_a_mismatch():
    on_ranks(different_requests, 2)


def too_much_memory(world):
    with pytest.raises(weft.SymmetricMemoryError, match=r"rank 0: .* bytes requested.*; rank 1: "):
        world.empty(1 << 50, dtype=torch.uint8)
    assert world.empty(4).shape == (4,), "the world continues"


def test_lack_of_memory_is_an_error_on_every_rank():
    on_ranks(too_much_memory, 2)


def two_worlds_and_a_subgroup(world):
    pair = dist.new_group([0, 2])
    other = weft.init(dist.group.WORLD)
    mine, theirs = world.empty(4), other.empty(4)
    assert not world.is_symmetric(theirs)
    assert not other.is_symmetric(mine)
    found = None
    if world.rank != 1:
        sub = weft.init(pair)
        tensor = sub.empty(1, dtype=torch.int64)
        tensor[0] = world.rank
        dist.barrier(pair)
        found = (sub.rank, sub.ranks, [sub.peer(tensor, p).item() for p in range(2)])
        sub.close()
    other.close()
    assert world.empty(3).shape == (3,), "closing one world leaves the others"
    return found


def test_several_worlds_and_strided_subgroups():
    assert on_ranks(two_worlds_and_a_subgroup, 3, context=beside_gloo) == [
        (0, 2, [0, 2]),
        None,
        (1, 2, [0, 2]),
    ]


def closed(world):
    kept = world.empty(4)
    kept.fill_(3)
    meet()
    world.close()
    with pytest.raises(
        weft.WeftError,
        match=r"this world is closed: close\(\) was called, or its with block ended; make a new one with weft.init\(\)",
    ):
        world.empty(4)
    with pytest.raises(weft.WeftError, match=r"closed: close\(\) was called"):
        weft.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
    again = weft.init()
    assert again.empty(2).shape == (2,)
    return kept.sum().item()


def workspaces_end(world):
    """Those of a closed world are unmapped, also if the world is still referred to and its calls
    were cached, outstanding or failed; symmetric tensors stay.
    """
    kept = world.empty(1000).fill_(5.0)
    rows, b = torch.ones(1 << 13, 64), weft.pack(torch.ones(64, 8))
    for _ in range(3):
        weft.all_gather_matmul(rows, b, algorithm="push")
        weft.all_reduce(torch.ones(1 << 18))
    workspace = world.engine.workspace.data_ptr()
    assert workspace in memory.segments
    handle = weft.all_gather_async(torch.ones(5))
    if world.rank == 0:
        weft.barrier()
        world.close()
    else:
        with pytest.raises(weft.PeerLost, match="rank 0"):
            for _ in range(2):
                weft.barrier()
        world.close()
    assert handle.wait().tolist() == [1.0] * 10
    gc.collect()
    assert workspace not in memory.segments
    assert kept.sum() == 5000
    with pytest.raises(weft.WeftError, match="this world is closed"):
        weft.all_gather_matmul(rows, b, algorithm="push")


def test_workspaces_end_with_their_world():
    on_ranks(workspaces_end, 2)


def test_a_closed_world_refuses_calls():
    assert on_ranks(closed, 2) == [12.0, 12.0]


def test_a_world_of_one_needs_no_launcher():
    with weft.init() as world:
        assert (world.rank, world.ranks) == (0, 1)
        y = weft.all_gather_matmul(torch.eye(3), torch.arange(9.0).view(3, 3))
    assert torch.equal(y, torch.arange(9.0).view(3, 3))


def test_invalid_timeouts_are_refused():
    with pytest.raises(ValueError, match="positive"):
        weft.init(timeout=0)


def nothing(world):
    return os.getpid()


def test_ranks_leave_nothing_behind():
    before, open_sockets = named_memory(), sockets()
    pids = on_ranks(nothing, 3)
    assert named_memory() <= before
    assert none_left(open_sockets)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_launchers_variables():
    assert launcher_variables({}) is None
    assert launcher_variables({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}) == {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5",
    }  # fmt: skip
    open_mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
        "PMIX_NAMESPACE": "prterun-7@1",
    }
    found = launcher_variables(open_mpi)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == (
        "3",
        "4",
        "3",
        "localhost",
    )
    assert (
        found["MASTER_PORT"]
        == launcher_variables(open_mpi | {"OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"]
    )
    mpich = launcher_variables({"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_ID": "0"})
    assert (
        mpich["MASTER_PORT"]
        == launcher_variables({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_ID": "1"})["MASTER_PORT"]
    )
    spread = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node0"}
    assert launcher_variables(spread)["MASTER_PORT"] == "29500"
    with pytest.raises(weft.WeftError, match="several hosts without the address of rank 0"):
        translated(
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            }
        )
    slurm = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "node[03-04,9]",
    }
    for nodes, first in (
        ("node[03-04,9]", "node03"),
        ("node[03-04,9]-ib,z", "node03-ib"),
        ("r[1-2]n[01-04]", "r1n01"),
        ("alpha,beta", "alpha"),
    ):
        found = launcher_variables(slurm | {"SLURM_STEP_NODELIST": nodes})
        assert found["MASTER_ADDR"] == first
    slurm |= {"SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2,1"}
    for node, ranks in enumerate("4421"):
        found = launcher_variables(slurm | {"SLURM_NODEID": str(node)})
        assert found["LOCAL_WORLD_SIZE"] == ranks
    # ranks that another launcher has started within a step
    other = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert "LOCAL_WORLD_SIZE" not in launcher_variables(slurm | other)


def test_an_error_of_one_rank_is_reported():
    outcomes = start(raise_on_one, 2)
    assert isinstance(outcomes[1].error, ZeroDivisionError)


def raise_on_one(world):
    return 1 / (1 - world.rank)


def resident(tensor):
    """Bytes of the pages that this process has of the mapping of a tensor."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= tensor.data_ptr() < int(bounds[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {tensor.data_ptr():x}")


def pages(world):
    own = world.empty(1 << 20)
    theirs = world.peer(own, 1 - world.rank)
    assert resident(own) == own.nbytes
    assert resident(theirs) == 0
    assert not theirs.any()
    assert resident(theirs) == theirs.nbytes


def test_own_pages_are_mapped_at_once_and_peers_on_use():
    on_ranks(pages, 2)
