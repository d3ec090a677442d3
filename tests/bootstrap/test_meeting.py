"""Ranks meet by a store and nothing else: no process group is made, one that the program makes
later may share the store, and what failed once may be tried again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import meet, on_ranks
from torch.distributed import distributed_c10d

import weft
from weft.bootstrap.rendezvous import StoreRendezvous, rendezvous_of
from weft.bootstrap.shared_store import launched
from weft.gpu.memory import named_group
from weft.world.values import all_gather_texts, all_gather_values


def threads():
    """The names of this process's threads."""
    return {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}


def connections():
    """The number of open TCP sockets of this process that do not listen."""
    inodes = set[str]()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        inodes |= {fields[9] for fields in map(str.split, lines) if fields[3] != "0A"}
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(file).removeprefix("socket:[").removesuffix("]") in inodes
    return found


def made_alone(_):
    with weft.init(timeout=20) as world:
        found = dist.is_initialized(), connections(), threads()
        weft.barrier()
        assert world.ranks == 3
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    by_gloo = threads()
    dist.destroy_process_group()
    return *found, by_gloo


def test_a_world_makes_no_process_group():
    for rank, outcome in enumerate(on_ranks(made_alone, 3, context=contextlib.nullcontext)):
        initialized, connected, before, by_gloo = outcome
        assert not initialized
        assert rank == 0 or connected == 0  # rank 0 serves the store
        assert any("gloo" in name for name in by_gloo)
        assert not any("gloo" in name for name in before)


def sums(rank, ranks, backend):
    """Of the ranks, in a world and in a group that is made while the world is open, and in another
    group after it.
    """
    x = torch.full((3,), float(rank))
    with weft.init(timeout=20) as world:
        assert (world.rank, world.ranks) == (rank, ranks)
        dist.init_process_group(backend)
        found = [weft.all_reduce(x)[0].item()]
        dist.all_reduce(y := x.clone())
        found.append(y[0].item())
    with weft.init(timeout=20):  # by the store of the group
        found.append(weft.all_reduce(x)[0].item())
    dist.destroy_process_group()
    return found


def later_sums(rank):
    """Of the ranks in a world, and then in a group: the store stays for it."""
    x = torch.full((3,), float(rank))
    with weft.init(timeout=20):
        found = [weft.all_reduce(x)[0].item()]
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(place, timeout=20).close()
        weft.barrier()
    dist.init_process_group("gloo")
    dist.all_reduce(x)
    dist.destroy_process_group()
    return [*found, x[0].item()]


def by_torchrun(backend):
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    return sums(int(os.environ["RANK"]), 2, backend)


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_a_group_beside_a_world_under_torchrun(backend):
    assert weft.launch(by_torchrun, 2, backend) == [[1.0] * 3] * 2


@contextlib.contextmanager
def under_mpirun():
    """The variables of Open MPI alone, and a port that no other test has."""
    names = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"}
    for name, theirs in names.items():
        os.environ[theirs] = os.environ.pop(name)
    del os.environ["MASTER_ADDR"]
    yield int(os.environ["OMPI_COMM_WORLD_RANK"])


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_a_group_beside_a_world_under_mpirun(backend):
    assert on_ranks(sums, 2, 2, backend, context=under_mpirun) == [[1.0] * 3] * 2


def test_a_group_after_a_world_whose_first_rank_serves_the_store():
    assert on_ranks(later_sums, 2, context=under_mpirun) == [[1.0] * 2] * 2


class Refused(Exception):
    pass


def again(_, step):
    """Rank 1 fails at a step of making a world, and then all make it."""
    rank = int(os.environ["RANK"])

    def fails(*_):
        raise Refused

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(step, fails)
        with pytest.raises(Refused if rank == 1 else weft.WeftError) as caught:
            weft.init(timeout=20)
    assert rank == 1 or isinstance(caught.value, weft.PeerLost), caught.value
    with weft.init(timeout=20):
        return weft.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize(
    "step",
    [
        "weft.host.placement.bind_as_launched",
        "weft.world.world.Endpoint",
        "weft._native.create_mapping",
    ],
)
def test_ranks_may_try_again(step):
    assert on_ranks(again, 3, step, context=contextlib.nullcontext) == [3.0] * 3


def by_name(_):
    meeting = StoreRendezvous(*launched(20.0))
    name, kept = named_group(meeting)
    found = distributed_c10d._resolve_process_group(name)
    assert found is kept
    assert (found.rank(), found.size()) == (meeting.rank, meeting.ranks)
    store = dist.PrefixStore("test", meeting.store)
    store.set(str(meeting.rank), name)
    names = [store.get(str(rank)).decode() for rank in range(meeting.ranks)]
    meet()
    assert not dist.is_initialized()
    return names


def test_the_group_of_symmetric_memory_has_one_name_and_a_store():
    first, second = on_ranks(by_name, 2, context=contextlib.nullcontext)
    assert first == second
    assert len({*first}) == 1


def test_a_group_without_a_store_is_refused():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(weft.WeftError, match=r"the group has no store by which ranks could find"):
        rendezvous_of(group)


@pytest.mark.parametrize("hosts", [None, [0, 1, 1]])
def test_texts_and_values_of_all_ranks(hosts):
    lengths = [0, 16_000, 50_001]
    texts = [str(rank) * length for rank, length in enumerate(lengths)]

    def of_all():
        world = weft.init()
        before = weft.all_reduce_async(torch.ones(1))
        found = all_gather_texts(world, texts[world.rank])
        values = all_gather_values(world, {world.rank: b"\x00"}, dict[int, bytes])
        return found, values, before.wait().item()

    with weft.local_world(3, hosts=hosts) as local:
        for found in local.run(of_all):
            assert found == (texts, [{rank: b"\x00"} for rank in range(3)], 3.0)


def another_call(world):
    if world.rank:
        weft.barrier()
    else:
        all_gather_texts(world, "")


def test_another_call_is_no_exchange_of_values():
    with weft.local_world(2) as local, pytest.raises(weft.MismatchError, match="values"):
        local.run(lambda: another_call(weft.init()))
