"""A forked child has its parent's worlds and none of their threads: it can use none of the worlds,
and its end harms none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import die, group, on_ranks, start

import weft

OF_ITS_OWN = (
    ": a forked child makes its own world, or none; call from the parent, or start children "
    'by spawn, as DataLoader(multiprocessing_context="spawn") does'
)


def end():
    """End this process as a program ends, with all of Python's finalizers."""
    ctypes.pythonapi.Py_Exit(0)


def forked(*works):
    """The text of each of `works` in a forked child, which then ends as programs do, and its exit
    code.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        for work in works:
            try:
                text = str(work())
            except weft.WeftError as error:
                text = f"{type(error).__name__}: {error}"
            os.write(theirs, f"{text}\n".encode())
        end()
    os.close(theirs)
    with open(ours) as output:
        texts = output.read().splitlines()
    return texts, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forks(world):
    out, counted, symmetric = torch.empty(4), world.signals(1), world.empty(4)
    handle = (
        weft.all_reduce_async(torch.ones(1 << 16), out=torch.empty(1 << 16)) if world.rank else None
    )
    calls = {
        "all_reduce": lambda: weft.all_reduce(torch.ones(4), out=out),
        "all_reduce_async": lambda: weft.all_reduce_async(torch.ones(4)),
        "all_gather_matmul": lambda: weft.all_gather_matmul(torch.ones(4, 4), torch.ones(4, 4)),
        "empty": lambda: world.empty(3),
        "put": lambda: weft.put(symmetric, out, 1 - world.rank),
        "notify": lambda: weft.notify(counted, 0, 1 - world.rank),
        "wait": lambda: weft.wait(counted, 0, ">=", 1),
        **({} if handle is None else {"a handle": handle.wait}),
        "close": world.close,
    }
    own = f"WeftError: this world belongs to process {os.getpid()}{OF_ITS_OWN}"
    texts, code = forked(*calls.values())
    assert dict(zip(calls, texts, strict=True)) == dict.fromkeys(calls, own) | {"close": "None"}
    assert code == 0
    handle = handle or weft.all_reduce_async(torch.ones(1 << 16))
    assert torch.equal(handle.wait(), torch.full((1 << 16,), 2.0))
    for again in range(3):
        assert torch.equal(
            weft.all_reduce(torch.full((4,), world.rank + 1.0 + again), out=out),
            torch.full((4,), 3.0 + 2 * again),
        )


def test_a_child_cannot_use_or_end_its_parents_worlds():
    on_ranks(forks, 2)


def dies_before_its_child(world, seen):
    weft.barrier()
    if world.rank:
        if not os.fork():
            limit = time.monotonic() + 20
            while not seen.exists() and time.monotonic() < limit:
                time.sleep(0.01)
            os._exit(0)
        die()
    began = time.monotonic()
    with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died"):
        weft.barrier()
    seen.touch()
    return time.monotonic() - began


def test_a_death_is_noticed_although_a_child_holds_the_sockets(tmp_path):
    first, second = start(dies_before_its_child, 2, tmp_path / "seen")
    assert second is None
    assert first.error is None, first.trace
    assert first.result < 10


def grandchildren(world):
    ours, theirs = os.pipe()
    if not os.fork():
        if not os.fork():
            os.write(theirs, b"it ended")
        end()
    os.close(theirs)
    signal.alarm(20)
    with open(ours) as output:
        assert output.read() == "it ended"
    signal.alarm(0)
    weft.barrier()


@pytest.mark.slow
def test_children_of_children():
    on_ranks(grandchildren, 2)


def forks_with_a_group(_):
    work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
    calls = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
        "async": lambda: dist.all_reduce(torch.ones(4), async_op=True),
        "send": lambda: dist.send(torch.ones(2), 1 - dist.get_rank()),
        "destroy": dist.destroy_process_group,
    }
    own = f"WeftError: this world belongs to process {os.getpid()}{OF_ITS_OWN}"
    texts, code = forked(*calls.values())
    assert dict(zip(calls, texts, strict=True)) == dict.fromkeys(calls, own) | {"destroy": "None"}
    assert code == 0
    work.wait()
    dist.all_reduce(mine := torch.full((4,), dist.get_rank() + 1.0))
    assert mine.tolist() == [3.0] * 4


def test_a_child_and_a_group_of_its_parent():
    on_ranks(forks_with_a_group, 2, context=group)
