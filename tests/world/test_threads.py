"""Copies and sums of many bytes are divided among torch's threads: equal bits for any number of
threads, and no threads are left.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.ranks import beside_gloo, on_ranks
from torch._C._distributed_c10d import HashStore

import weft
import weft._native as _native
from weft.ops.granularity import sent_rows, slot_rows
from weft.schedules.thresholds import Thresholds
from weft.schedules.workload import pieces
from weft.world.start import init_by_store


def tasks():
    """The threads of this process."""
    return len(os.listdir("/proc/self/task"))


def numbers(dtype, *shape):
    return (
        torch.randn(shape).to(dtype)
        if dtype.is_floating_point
        else torch.randint(0, 100, shape).to(dtype)
    )


def same(one, other):
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def with_threads(count, call, *args, **options):
    """A call while torch has `count` threads; the rest of a test uses one."""
    torch.set_num_threads(count)
    try:
        return call(*args, **options)
    finally:
        torch.set_num_threads(1)


def by_any_number(make, counts):
    """The result with one thread, and with each number of threads."""
    alone = make(1)
    for count in counts:
        assert all(same(one, other) for one, other in zip(alone, make(count), strict=True)), (
            f"{count} threads make something else"
        )
    return alone


def sums(world, dtype, *counts):
    own = numbers(dtype, 900, 1001)
    memory, out = (world.empty(own.shape, dtype=dtype) for _ in range(2))
    begins_anywhere = own.view(-1)[1:][: 900_000 // world.ranks * world.ranks].view(world.ranks, -1)
    op = "avg" if dtype.is_floating_point else "max"

    def make(threads):
        memory.copy_(own)
        made = [
            with_threads(threads, weft.all_reduce, own),
            with_threads(threads, weft.reduce_scatter, begins_anywhere),
            with_threads(threads, weft.all_reduce, memory, op=op, out=out.fill_(7)).clone(),
        ]
        return [*made, with_threads(threads, weft.all_reduce, memory, out=memory)]

    by_any_number(make, counts)


def moves(world, dtype, *counts):
    own = numbers(dtype, world.ranks, 300_001)
    memory, out = (
        world.empty(own.shape, dtype=dtype),
        world.empty(world.ranks * world.ranks, 300_001, dtype=dtype),
    )
    memory.copy_(own)

    def make(threads):
        return [
            with_threads(threads, weft.all_gather, own),
            with_threads(threads, weft.all_gather, memory, out=out.fill_(7)).clone(),
            with_threads(threads, weft.broadcast, own.clone(), world.ranks - 1),
            with_threads(threads, weft.all_to_all, own),
        ]

    by_any_number(make, counts)


def everything(world):
    _native.allow_teams(True)  # as if there were enough cores
    # more than cores: a library's idle threads then leave the cores to others
    sums(world, torch.float32, 3, 8)
    sums(world, torch.bfloat16, 4)
    sums(world, torch.float16, 3)
    sums(world, torch.int8, 3)
    moves(world, torch.float64, 3)
    moves(world, torch.uint8, 4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_threads_makes_the_same_bits(ranks):
    on_ranks(everything, ranks)


def one_sided(world):
    _native.allow_teams(True)
    own, memory = numbers(torch.int32, 300, 1001), world.empty(300, 1001, dtype=torch.int32)
    views = [
        lambda t: t,
        lambda t: t.view(-1)[1:],
        lambda t: t[:, 3:-1],
        lambda t: t[:, ::3],
        lambda t: t.t()[5:],
    ]

    def make(threads):
        made = []
        for view in views:
            memory.fill_(7)
            got = torch.full_like(own, 7)
            with_threads(threads, weft.put, view(memory), view(own), 0)
            with_threads(threads, weft.get, view(got), view(memory), 0)
            made += [memory.clone(), got]
        return made

    assert torch.equal(by_any_number(make, (2, 3, 4, 8))[1], own)


def test_any_number_of_threads_puts_and_gets_the_same():
    on_ranks(one_sided, 1)


def put(world):
    memory, own = world.empty(1 << 20), torch.randn(1 << 20)
    yield
    weft.put(memory, own, world.rank)
    yield
    assert same(memory, own)


def transposing_put(world):
    memory, own = world.empty(1 << 10, 1 << 10), torch.randn(1 << 10, 1 << 10)
    yield
    weft.put(memory, own.t(), world.rank)
    yield
    assert same(memory, own.t())


def overlapping_put(world):
    memory = world.empty(1 << 20).normal_()
    moved = memory[:-1].clone()
    yield
    weft.put(memory[1:], memory[:-1], world.rank)
    yield
    assert same(memory[1:], moved)


def copies(world):
    own = torch.randn(1 << 20)
    yield
    gathered = weft.all_gather(own)
    yield
    assert same(gathered.view(world.ranks, -1)[world.rank], own)


def additions(world):
    memory, out = world.empty(1 << 18).fill_(1), world.empty(1 << 18)
    yield
    # each rank adds up all rows, and nothing is copied
    weft.all_reduce(memory, out=out, algorithm="one_shot")
    yield
    assert out.eq(world.ranks).all()


def additional_threads(world, kind, threads):
    """The number of threads that torch starts for a large call of a kind, with `threads` allowed."""
    steps = kind(world)
    next(steps)
    before = tasks()
    with_threads(threads, next, steps)
    found = tasks() - before
    assert not list(steps)
    return found


def sharing(world, kind, threads):
    _native.allow_teams(True)
    return additional_threads(world, kind, threads)


@pytest.mark.parametrize("kind", [put, transposing_put, overlapping_put, copies, additions])
def test_threads_of_torch_share_large_calls(kind):
    assert on_ranks(sharing, 2, kind, 3) == [2, 2]


def as_many_as_cores():
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
    return weft.init(timeout=20)


def oversubscribed(world):
    return additional_threads(world, put, torch.get_num_threads())


def test_one_thread_copies_where_ranks_have_more_threads_than_cores():
    assert on_ranks(oversubscribed, 2, context=as_many_as_cores) == [0, 0]


def test_slots_are_as_large_as_threads_are_many():
    row = torch.empty(1, 1)
    worlds = (
        SimpleNamespace(placement=SimpleNamespace(threads=threads), thresholds=Thresholds())
        for threads in (1, 8)
    )
    alone, eight = (slot_rows(row, 1 << 20, 3, world) for world in worlds)
    assert eight // 8 == alone == Thresholds().slot_bytes // 3 // 4


def test_messages_have_a_minimum_size():
    row = torch.empty(1, 1)
    assert [
        pieces(rows, sent_rows(row, rows)) for rows in (1, 1 << 10, 1 << 15, 1 << 20, 1 << 26)
    ] == [1, 1, 2, 16, 16]


def background_threads(world):
    """The number of threads for transfers, and then for asynchronous collectives, although torch
    has many.
    """
    memory, own = world.empty(1 << 20), torch.randn(1 << 20)
    before = tasks()
    with_threads(8, lambda: weft.put_async(memory, own, world.rank).wait())
    transferring = tasks() - before
    with_threads(8, lambda: weft.all_reduce_async(own, world=world).wait())
    both = tasks() - before
    assert same(memory, own)
    return transferring, both


def lanes(world):
    found = background_threads(world)
    before = tasks()
    with weft.init(dist.group.WORLD, timeout=20, comm_threads=3) as other:
        found += background_threads(other)
        assert "the comm lane has 3 threads" in weft.explain(
            torch.ones(64, 64), torch.ones(64, 64), world=other
        )
    del other
    gc.collect()
    deadline = time.monotonic() + 10
    while tasks() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return found, tasks() - before


def test_background_lanes_have_comm_threads_while_their_world_lives():
    assert on_ranks(lanes, 2, context=beside_gloo) == [((1, 2, 3, 6), 0)] * 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2"])
def test_comm_threads_are_a_positive_number(threads):
    with pytest.raises(ValueError, match=r"comm_threads must be a positive integer; got "):
        weft.init(comm_threads=threads)


def forks(world):
    memory, own = world.empty(1 << 20), torch.randn(1 << 20)
    torch.set_num_threads(3)
    _native.allow_teams(True)
    weft.put(memory, own, 0)
    child = os.fork()
    if not child:
        weft.put(init_by_store(HashStore(), 0, 1, 20.0).empty(1 << 20), own, 0)
        os._exit(0)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
    weft.put(memory, own, 0)
    return bool(ended)


def test_a_forked_child_copies_by_one_thread():
    assert on_ranks(forks, 1) == [True]
