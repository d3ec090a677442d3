"""A rank that runs out of descriptors, threads or memory raises an error: no crash, no hang, no
wrong number.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import socket
from pathlib import Path

import pytest
import torch
from support.plans import execute_unproved
from support.ranks import die, on_ranks, start

import weft
import weft._native as _native
from weft.bootstrap import peer_memory
from weft.doctor import memory as doctor_memory
from weft.engines import engine
from weft.plan import Buffer, Copy, Notify, Plan, Region, Signal, Wait
from weft.world import memory

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root")


def set_limit(resource_name, value):
    resource.setrlimit(resource_name, (value, resource.getrlimit(resource_name)[1]))


def no_more_memory(spare=1 << 20):
    """Let this process map hardly any further memory."""
    gc.collect()
    set_limit(
        resource.RLIMIT_AS,
        int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + spare,
    )


def no_thread(world):
    weft.all_reduce(torch.ones(3))
    if world.rank == 0:
        no_more_memory()
    try:
        weft.all_reduce_async(torch.ones(3)).wait()
    finally:
        set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    return weft.all_reduce(torch.full((3,), 10.0))


def test_an_asynchronous_call_without_a_thread():
    first, second = start(no_thread, 2)
    assert isinstance(first.error, OSError), first
    assert isinstance(second.error, weft.PeerLost), second
    assert "failed with" in str(second.error)


def no_memory_for_a_copy(world):
    there = world.empty(16 << 20)
    weft.put_async(there[:4], there[1:5], world.rank).wait()
    no_more_memory()
    with pytest.raises(MemoryError):
        weft.put_async(there[1:], there[:-1], world.rank)
    set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    there.copy_(torch.arange(len(there)))
    weft.put_async(there[1:], there[:-1], world.rank).wait()
    assert torch.equal(there[1:], torch.arange(len(there) - 1).float())
    weft.barrier()


def test_an_overlapping_copy_without_memory_to_stage():
    for outcome in start(no_memory_for_a_copy, 2):
        assert outcome.error is None, outcome.trace


def test_a_mesh_without_descriptors():
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    set_limit(resource.RLIMIT_NOFILE, free)
    try:
        with pytest.raises(OSError, match="Too many open files"):
            _native.Mesh([-1, own.fileno()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    theirs.send(b"still open")
    assert own.recv(100) == b"still open"


def test_a_mapping_of_another_size_is_refused():
    _, file = _native.create_mapping(4096)
    with pytest.raises(OSError, match="its part has another size than this rank's"):
        _native.attach_mapping(file, 8192)


@pytest.mark.parametrize(
    "words", [b"anonsense", b"aKeyError\nx\ngone", b"aKeyError\n7\ngone", b"aKeyError\n-1\n"]
)
def test_a_malformed_message_is_an_error(words):
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mesh = _native.Mesh([-1, own.detach()])
    theirs.send(words)
    while not mesh.failure()[0]:
        pass
    assert mesh.failure() == ("WeftError", 1, "it sent a message that cannot be read")


def dropped(_):
    """Rank 0 drops a world with outstanding calls that its peer does not make."""
    world = weft.init(timeout=20)
    weft.barrier(world=world)
    if world.rank:
        die()
    for _ in range(3):
        weft.all_reduce_async(torch.ones(3), world=world)
    weft.world.registry.default = None
    number = world.number
    del world
    gc.collect()
    assert weft.world.registry.by_number(number) is None


def test_a_world_that_is_dropped_with_outstanding_calls():
    first, second = start(dropped, 2)
    assert second is None
    assert first is not None, "it crashed"
    assert first.error is None, first.trace


def fetch():
    """A plan in which rank 1 copies rank 0's rows after a notify of rank 2."""
    ready, go, row = Signal("ready", 0), Signal("go", 2), Region(0, "a", 0, 1)
    buffers = {"a": Buffer("input", (1, 1, 1)), "out": Buffer("output", (1, 1, 1))}
    fetching = {"compute": (Wait(go, 1), Wait(ready, 1), Copy(row, Region(1, "out", 0, 1)))}
    return Plan(
        "fetch",
        "x",
        buffers,
        ({"compute": (Notify(1, ready),)}, fetching, {"compute": (Notify(1, go),)}),
    )


def closes_before_it_is_read(_, symmetric):
    peer_memory.huge_pages = lambda: True
    world = weft.init(timeout=20)
    a, out, closed = (
        world.empty(1, 4) if symmetric else torch.empty(1, 4),
        torch.empty(1, 4),
        world.signals(1),
    )
    engine(world)
    if world.rank == 0:
        execute_unproved(world, fetch(), {"a": a.fill_(1), "out": out})
        weft.wait(closed, 0, ">=", 1)
        world.failure.fail(KeyError("gone"))
        a.fill_(777)
        weft.world.registry.default = None
        return
    if world.rank == 2:
        execute_unproved(world, fetch(), {"a": a, "out": out})
        weft.notify(closed, 0, 0)
        world.close()
        return
    while not world.mesh.failure()[0]:
        pass
    execute_unproved(world, fetch(), {"a": a, "out": out})


@pytest.mark.parametrize("symmetric", [True, False])
def test_memory_of_a_rank_that_has_closed_the_world(symmetric):
    _, second, _ = start(closes_before_it_is_read, 3, symmetric)
    assert isinstance(second.error, weft.PeerLost), second
    assert "rank 0" in str(second.error)
    assert "failed with KeyError" in str(second.error)


def out_of_reach(_):
    """Rank 0's rows are in memory that the kernel lets no process read."""
    peer_memory.huge_pages = lambda: True
    world = weft.init(timeout=20)
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    a, out = torch.frombuffer(mapping, dtype=torch.float32, count=4).view(1, 4), torch.empty(1, 4)
    if world.rank == 0:
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(a.data_ptr()), mmap.PAGESIZE, 0)
    execute_unproved(world, fetch(), {"a": a, "out": out})
    weft.barrier()


def test_memory_that_the_kernel_refuses():
    first, second, third = start(out_of_reach, 3)
    assert "cannot read the rows of a peer for rows 0:1 of fetch call" in str(second.error), second
    assert "Bad address; with WEFT_READ_PEERS=0 large tensors are staged" in str(second.error)
    for outcome in (first, third):
        assert isinstance(outcome.error, weft.PeerLost), outcome


def mount_small_shm():
    """Give this process a /dev/shm of 64 MiB, as a container has."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.unshare(0x20000), "CLONE_NEWNS"
    assert not libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None), "MS_PRIVATE | MS_REC"
    assert not libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, b"size=64m")


def in_a_small_shm(world):
    mount_small_shm()
    found = doctor_memory.here()
    assert found.shared == 64 << 20
    world.empty(100 << 20, dtype=torch.uint8).fill_(1)
    a = torch.ones(100 << 18)
    assert torch.equal(weft.all_reduce(a), a * world.ranks)
    assert not any(Path("/dev/shm").iterdir())


@needs_root
def test_worlds_take_nothing_of_dev_shm():
    on_ranks(in_a_small_shm, 2)


def in_a_small_group(world, group):
    (group / "cgroup.procs").write_text(str(os.getpid()))
    weft.barrier()
    held = []
    with pytest.raises(weft.SymmetricMemoryError) as refused:
        while True:
            held.append(world.empty(8 << 20, dtype=torch.uint8).fill_(1))
    assert held, "there was memory at first"
    text = f"under the limit of {64 << 20:,} of their container or job"
    assert text in str(refused.value)
    available, limit, _ = doctor_memory.here()
    assert limit == 64 << 20
    assert available < 16 << 20
    weft.barrier()
    assert all(tensor.min() == 1 for tensor in held), "their pages were allocated"


@needs_root
def test_the_memory_of_a_container_ends():
    root = Path("/sys/fs/cgroup")
    old = (root / "memory/memory.limit_in_bytes").exists()
    group = root / ("memory" if old else "") / f"weft-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if old else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"there are no control groups to write to: {error}")
    try:
        if not limit.exists():
            pytest.skip("control groups of this host have no memory")
        limit.write_text(str(64 << 20))
        on_ranks(in_a_small_group, 2, group)
    finally:
        group.rmdir()


def test_the_available_memory(tmp_path):
    meminfo, groups = tmp_path / "meminfo", tmp_path / "groups"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    for path, limit, used in (("", "", ""), ("job", "max", "0"), ("job/step", "5000", "1000")):
        group = tmp_path / path
        group.mkdir(exist_ok=True)
        if limit:
            (group / "memory.max").write_text(limit)
            (group / "memory.current").write_text(used)
    groups.write_text("0::/job/step\n")
    host = 800 * 1024, 0
    assert sorted(memory._available(meminfo, groups, tmp_path)) == [(4000, 5000), host]
    # contents of files are not in the way
    (tmp_path / "job/step/memory.stat").write_text(
        "anon 200\nfile 800\ninactive_file 300\nactive_file 400\n"
    )
    assert sorted(memory._available(meminfo, groups, tmp_path)) == [(4700, 5000), host]
    old = tmp_path / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("7000")
    (old / "memory.usage_in_bytes").write_text("500")
    (old / "memory.stat").write_text(
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 10\ntotal_active_file 20\n"
    )
    groups.write_text("4:cpu,memory:/job\n0::/\n")
    assert sorted(memory._available(meminfo, groups, tmp_path)) == [(6530, 7000), host]
