"""Ordinary tensors that peers read in place, through the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.plans import execute_unproved
from support.ranks import on_ranks, start

import weft
import weft._native as _native
from weft.bootstrap import peer_memory
from weft.bootstrap.peer_memory import Probe
from weft.engines import engine
from weft.errors import PeerTimeout, WeftError
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Wait
from weft.schedules.all_gather import all_gather

NUMBERS = peer_memory.LEAST_BYTES // 4 + 1  # float32 of a tensor that is just large enough


@pytest.fixture(scope="module", autouse=True)
def allowed():
    """Whether the kernel lets a process read another's memory here, which containers may forbid."""
    program = "import torch; t = torch.tensor([7]); print(t.data_ptr(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert _native.read_number(child.pid, int(child.stdout.readline())) == 7
        except OSError as error:
            pytest.skip(f"the kernel does not allow it: {error}")
        finally:
            child.stdin.write("\n")


def remade(large=True):
    """A new world of the same ranks; `large` is whether large tensors of this rank are in huge
    pages.
    """
    peer_memory.huge_pages = lambda: large
    return weft.init()


def collectives(_):
    world = remade()
    assert world.reads_memory
    ranks, rank = world.ranks, world.rank
    whole = torch.arange(ranks * NUMBERS, dtype=torch.float32)
    mine = whole.view(ranks, NUMBERS)[rank]
    assert "read through the kernel" in call_text(world, lambda: weft.all_gather(mine.clone()))
    out = torch.empty_like(whole)
    for again in range(3):
        assert torch.equal(weft.all_gather(mine + again), whole + again), "a new result"
        assert torch.equal(weft.all_gather(mine + again, out=out.zero_()), whole + again)
        part = out.zero_().view(ranks, NUMBERS)[rank].copy_(mine)
        assert torch.equal(weft.all_gather(part, out=out), whole), "in place"
    handles = [weft.all_gather_async(mine * (again + 1)) for again in range(3)]
    assert all(
        torch.equal(handle.wait(), whole * (again + 1)) for again, handle in enumerate(handles)
    )
    sizes = [NUMBERS * (r + 1) for r in range(ranks)]
    ragged = weft.all_gather(torch.full((sizes[rank],), float(rank)), shard_rows=sizes)
    assert [part.unique().tolist() for part in ragged.split(sizes)] == [
        [float(r)] for r in range(ranks)
    ]
    shares = torch.arange(ranks * NUMBERS, dtype=torch.float32) + 1000 * rank
    expected = torch.cat(
        [(shares - 1000 * rank + 1000 * r).view(ranks, -1)[rank] for r in range(ranks)]
    )
    for _ in range(3):
        assert torch.equal(weft.all_to_all(shares), expected)
        assert torch.equal(weft.all_to_all(shares, out=out), expected)
    torch.set_num_threads(2)
    assert torch.equal(weft.all_to_all(shares), expected), "by more than one thread"


def call_text(world, call):
    """The description of a call that this rank sends to its peers."""
    call()
    return world.executor.peer_call(world.rank, world.executor.calls)


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(ranks):
    on_ranks(collectives, ranks)


def not_to_be_read(first):
    if first.rank == 1:
        os.environ["WEFT_READ_PEERS"] = "0"
    world = remade()
    assert not world.reads_memory, "all ranks or none"
    assert world.placement.staging_reason == "rank 1 has WEFT_READ_PEERS=0"
    mine = torch.full((NUMBERS,), float(world.rank))
    assert "read through the kernel" not in call_text(world, lambda: weft.all_gather(mine))
    assert weft.all_gather(mine)[::NUMBERS].tolist() == [*map(float, range(world.ranks))]


def test_a_rank_that_is_not_to_be_read():
    on_ranks(not_to_be_read, 2)


def small_pages_on_one(first):
    world = remade(large=first.rank == 0)
    assert world.reads_memory
    assert not world.placement.huge_pages, "all ranks or none"
    mine = torch.full((NUMBERS,), float(world.rank))
    assert "read through the kernel" not in call_text(world, lambda: weft.all_gather(mine)), (
        "staged until it is measured"
    )


def test_a_rank_with_tensors_in_small_pages():
    on_ranks(small_pages_on_one, 2)


def written_by_peers(_):
    world = remade()
    plan = all_gather(world.ranks, 1, "push", symmetric_gathered=True)
    tensors = {"a": torch.zeros(NUMBERS, 1), "gathered": torch.zeros(world.ranks * NUMBERS, 1)}
    with pytest.raises(
        ValueError, match="peers access 'gathered' in this plan, so it must be symmetric"
    ):
        engine(world).execute(plan, tensors, rows=[NUMBERS] * world.ranks)
    weft.barrier()


def test_peers_only_read():
    on_ranks(written_by_peers, 2)


def two_to_read(_):
    """A plan that reads more than one buffer of a peer, although a call sends the address of one
    only.
    """
    world = remade()
    buffers = {name: Buffer.of("input", [range(1), range(1, 2)]) for name in "ab"} | {
        "out": Buffer.of("output", [range(2)] * 2)
    }

    def lane(r):
        peer = 1 - r
        fetched = [
            Copy(Region(peer, name, 0, 1), Region(r, "out", at, at + 1))
            for at, name in enumerate("ab")
        ]
        return {
            "compute": (Notify(peer, Signal("ready", r)), Wait(Signal("ready", peer), 1), *fetched)
        }

    plan = Plan("two", "read", buffers, (lane(0), lane(1)), {}, (1, 1))
    tensors = {"a": torch.zeros(1, 8), "b": torch.zeros(1, 8), "out": torch.zeros(2, 8)}
    with pytest.raises(ValueError, match="peers access 'b' in this plan, so it must be symmetric"):
        execute_unproved(world, plan, tensors, [1, 1])
    weft.barrier()


def test_peers_read_one_buffer():
    on_ranks(two_to_read, 2)


def forbidden(first):
    """If one rank may not read its peers' memory, no rank does."""
    refuse = peer_memory.rejection
    if first.rank == 1:
        peer_memory.rejection = lambda pids, probes: refuse(pids, probes) or "it is not to"
    world = remade()
    assert (world.reads_memory, world.placement.staging_reason) == (
        False,
        "it is not to" if world.rank == 1 else "",
    )


def test_a_rank_that_may_not_read():
    on_ranks(forbidden, 2)


def gone(_):
    """A peer that cannot be read is waited for as long as a call may take, and then named."""
    world = remade()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    if world.rank == 0:
        world.executor.pids = [os.getpid(), child.pid]
    mine = torch.zeros(NUMBERS)
    if world.rank == 0:
        with pytest.raises(
            PeerTimeout, match=r"for rows .* of all_gather call \d+ \(in the memory of rank 1\)"
        ):
            weft.all_gather(mine, timeout=2.0)  # the peer is ready by then, also beside other work
    else:
        with pytest.raises(WeftError):
            weft.all_gather(mine, timeout=20.0)
    return world.closed is not None


def test_a_peer_that_cannot_be_read():
    assert [outcome.result for outcome in start(gone, 2) if outcome] == [True, True]


def test_why_memory_cannot_be_read():
    number = torch.tensor([7])
    own = Probe(7, number.data_ptr())
    assert peer_memory.rejection([os.getpid()], [own]) == ""
    assert (
        peer_memory.rejection([os.getpid()] * 2, [own, Probe()]) == "rank 1 has WEFT_READ_PEERS=0"
    )
    assert "another process namespace" in peer_memory.rejection(
        [os.getpid()], [Probe(8, number.data_ptr())]
    )
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (
        peer_memory.rejection([child.pid], [own])
        == f"process {child.pid} cannot be read: No such process"
    )


@pytest.mark.parametrize(
    ("policy", "requested", "huge"),
    [
        ("[always] madvise never", "0", True),
        ("always [madvise] never", "0", False),
        ("always [madvise] never", "1", True),
        ("always madvise [never]", "1", False),
    ],
)
def test_huge_pages(tmp_path, monkeypatch, policy, requested, huge):
    (tmp_path / "enabled").write_text(policy)
    monkeypatch.setattr(peer_memory, "_ENABLED", tmp_path / "enabled")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", requested)
    assert peer_memory.huge_pages() is huge
    monkeypatch.setattr(peer_memory, "_ENABLED", tmp_path / "none")
    assert not peer_memory.huge_pages(), "a kernel without them"
    assert not peer_memory.probe().huge_pages
    assert peer_memory.probe().address
    monkeypatch.setenv("WEFT_READ_PEERS", "0")
    assert not peer_memory.probe().address


def test_processes_have_numbers_of_their_own():
    """Otherwise a process with the same id and addresses as another one's, as in containers that
    share a network, would be read in its place.
    """
    before, (reader, writer) = peer_memory.probe().number, os.pipe()
    if not (child := os.fork()):
        os.write(writer, peer_memory.probe().number.to_bytes(8, "little"))
        os._exit(0)
    os.waitpid(child, 0)
    forked = int.from_bytes(os.read(reader, 8), "little")
    os.close(reader)
    os.close(writer)
    assert len({before, forked, os.getpid(), child}) == 4
    assert peer_memory.probe().number == before
