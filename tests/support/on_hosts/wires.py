"""Ranks whose hosts are joined by a bad wire: what they compute, and the errors of a cut one."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

import weft
from support.on_hosts.losses import error_of

LIMIT = 3.0  # seconds that a wait may take where the wire is cut


def few_calls(world):
    """Every collective, of few rows and of more than a packet holds, twice, and one-sided calls."""
    last = world.ranks - 1
    for size in (2, 20_000):
        for call in range(2):
            own = torch.arange(float(size)) + world.rank + call
            total = sum(torch.arange(float(size)) + rank + call for rank in range(world.ranks))
            assert torch.equal(weft.all_reduce(own), total)
            assert torch.equal(weft.reduce_scatter(own), total.chunk(world.ranks)[world.rank])
            every = [torch.arange(float(size)) + rank + call for rank in range(world.ranks)]
            assert torch.equal(weft.all_gather(own), torch.cat(every))
            assert torch.equal(weft.broadcast(own.clone(), last), every[last])
            a, b = own.view(-1, 2), torch.eye(2)
            gathered = torch.cat([each.view(-1, 2) for each in every])
            assert torch.equal(weft.all_gather_matmul(a, b), gathered)
    symmetric = world.empty(size)
    weft.put(symmetric, own, (world.rank + 1) % world.ranks)
    weft.barrier()
    assert torch.equal(symmetric, every[world.rank - 1])


def goes_on(folder):
    """Calls continue when a wire that was cut for some seconds is whole again."""
    with weft.init(timeout=60) as world:
        (folder / f"calling{world.rank}").touch()
        calls, ended = 0, torch.zeros(1)
        while not ended:
            calls += 1
            whole = (folder / "whole").exists()
            ended = weft.all_reduce(torch.full((1,), float(whole and world.rank == 0)))
        return calls


def _dies_when_there_is(file):
    while not file.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def cut_for_ever(folder):
    """Rank 1's host loses its power: no message tells of it, and rank 0 gives up in time."""
    with weft.init(timeout=60) as world:
        weft.barrier()
        (folder / f"calling{world.rank}").touch()
        if world.rank:
            threading.Thread(target=_dies_when_there_is, args=(folder / "cut",)).start()
        start = time.monotonic()
        name, text, _ = error_of(lambda: weft.all_reduce(torch.ones(1), timeout=LIMIT))
        return name, text, time.monotonic() - start - LIMIT, world.rank
