"""One-sided calls between hosts: every layout, the order of data and counters, calls in both
directions at once, and a peer that dies.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import weft
from support.checks.onesided import (
    DTYPES,
    EXAMPLES,
    SOURCE,
    every_view_to_every_peer,
    examples,
    unaligned,
)
from support.on_hosts.losses import error_of

_LARGE = 16 << 20  # elements: 64 MiB of float32


def one_sided(world):
    """All that one-sided calls do on one host, between hosts."""
    for dtype in DTYPES:
        every_view_to_every_peer(world, dtype)
    if world.ranks == 2:
        unaligned(world)
    examples(world, SOURCE, EXAMPLES)
    counters(world)
    data_before_its_counter(world)
    both_ways_at_once(world)
    transfers_in_order(world)
    a_passive_peer(world)


def counters(world):
    """Every way to change counters, seen at the latest when the call has returned."""
    signals = world.signals(6)
    if world.rank == 0:
        for peer in world.placement.others:
            weft.notify(signals, slice(0, 6, 2), peer, value=2**64 - 1)
            weft.notify(signals, 2, peer)
            weft.notify(signals, slice(3, 3), peer)
            weft.notify(signals, slice(6, 6), peer)
            weft.notify(signals, 5, peer, "set", 7)
    weft.barrier()
    assert signals[:] == ([0] * 6 if world.rank == 0 else [2**64 - 1, 0, 0, 0, 2**64 - 1, 7])
    weft.barrier()


def data_before_its_counter(world):
    """A rank that sees a counter sees the data, directly and by way of a third rank."""
    sizes = (1, 100, 70_000, 3)
    slots, arrived = world.empty(len(sizes), max(sizes)), world.signals(len(sizes))
    last, own = world.ranks - 1, world.rank
    for step in range(1, 101):
        slot = step % len(sizes)
        part, value = slots[slot, : sizes[slot]], float(step)
        if own == 0:
            if step % 2:
                weft.put_notify(part, torch.full_like(part, value), arrived, slot, last)
            else:
                weft.put(part, torch.full_like(part, value), last)
                weft.notify(arrived, slot, last - 1 or last)
        elif own == last - 1 and step % 2 == 0:  # between the two
            weft.wait(arrived, slot, ">=", step // len(sizes) + (slot > 0))
            weft.notify(arrived, slot, last)
        if own == last:
            weft.wait(arrived, slot, ">=", step // len(sizes) + (slot > 0))
            assert bool((part == value).all()), step
        weft.barrier()


def both_ways_at_once(world):
    """Every rank puts 64 MiB to, and gets as much from, ranks that do the same."""
    memory, peer = world.empty(2, _LARGE), (world.rank + 1) % world.ranks
    before = (world.rank - 1) % world.ranks
    numbers = torch.arange(_LARGE, dtype=torch.float32)
    memory[1].copy_(numbers + world.rank)
    weft.barrier()
    got = torch.empty(2, _LARGE)
    calls = [
        threading.Thread(target=weft.get, args=(got[0], memory[1], peer)),
        threading.Thread(target=weft.put, args=(memory[0], numbers - world.rank, peer)),
    ]
    for call in calls:
        call.start()
    weft.get(got[1], memory[1], before)
    for call in calls:
        call.join(60)
        assert not call.is_alive()
    weft.barrier()
    assert torch.equal(got[0], numbers + peer)
    assert torch.equal(got[1], numbers + before)
    assert torch.equal(memory[0], numbers - before)
    weft.barrier()


def transfers_in_order(world):
    """Transfers to a rank of another host, back, and on this host see each other's data."""
    memory, far = world.empty(50, 1000), world.ranks // 2
    memory.fill_(world.rank)
    weft.barrier()
    seen, handles = torch.zeros(50, 1000), []
    if world.rank == 0:
        for n in range(50):
            source = torch.full((1000,), -1.0) if n == 0 else seen[n - 1]
            handles.append(weft.put_async(memory[n], source, far))
            handles.append(weft.get_async(seen[n], memory[n], far))
            handles.append(weft.put_async(memory[n], seen[n], world.rank))
        handles[-1].wait()
        assert all(handle.done() for handle in handles)
        assert bool((seen == -1).all())
    weft.barrier()
    assert bool((memory == (-1 if world.rank in (0, far) else world.rank)).all())
    weft.barrier()


def a_passive_peer(world):
    """Calls to a rank that makes none, and has not begun the collective whose rows await it."""
    memory, signals, rows = world.empty(1000), world.signals(2), torch.ones(1 << 16)
    weft.all_gather_async(rows).wait()  # ranks agree on the first
    if world.rank == 0:
        gathered = weft.all_gather_async(rows)
        for peer in world.placement.others:
            weft.put_notify(memory, torch.ones(1000), signals, 0, peer)
            back = torch.zeros(1000)
            weft.get(back, memory, peer)
            assert bool((back == 1).all())
        for peer in world.placement.others:
            weft.notify(signals, 1, peer)
    else:
        while not weft.test(signals, 1, ">=", 1):
            time.sleep(0.001)
        assert bool((memory == 1).all())
        gathered = weft.all_gather_async(rows)
    assert bool((gathered.wait() == 1).all())


def dies_while_called(folder):
    """The last rank dies while the others put to it, get from it and wait for it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with weft.init(timeout=20) as world:
        last = world.ranks - 1
        memory, signals = world.empty(1 << 20), world.signals(2)
        source = torch.ones(1 << 20)
        if world.rank == last:
            weft.wait(signals, 0, ">=", 3 * last)
            os.kill(os.getpid(), signal.SIGKILL)
        found = []

        def until_lost(call):
            found.append(error_of(call)[:2])

        calls = [
            lambda: weft.put_notify(memory, source, signals, 0, last),
            lambda: weft.get_async(torch.empty(1 << 20), memory, last).wait(),
            lambda: weft.wait(signals, 1, ">=", 1),
        ]
        threads = [threading.Thread(target=until_lost, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        with pytest.raises(weft.WeftError):
            weft.put(memory, source, last)
        return found
