"""Hundreds of asynchronous calls, and worlds that are closed before their calls end."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from support import random_calls
from support.storm.rank import Part
from weft.world import registry

_M_PERTURB = -6


class StartedCall:
    """An asynchronous call: `end` waits for it, `found` takes the tensor to compare with `wanted`."""

    def __init__(
        self, name: str, end: Callable[[], Any], found: Callable[[Any], Tensor], wanted: Tensor
    ) -> None:
        self.name, self.end, self.found, self.wanted = name, end, found, wanted

    def check(self) -> None:
        found = self.found(self.end())
        if not torch.equal(found, self.wanted):
            at = int((found != self.wanted).flatten().nonzero()[0])
            raise AssertionError(
                f"{self.name} gives {found.flatten()[at]} at {at}, where "
                f"{self.wanted.flatten()[at]} is right"
            )


def hundreds(part: Part) -> None:
    """Hundreds of calls of all kinds and sizes, on ordinary and symmetric tensors, waited for in
    any order; then once more.
    """
    with part.world() as world:
        part.report("world")
        for _ in range(2):
            started = [*islice(_started(part, world), part.draw.choice((20, 60, 150)))]
            _check_all(started)


def hundreds_of_large(part: Part) -> None:
    """Hundreds of all-gathers so large that ranks read the tensors in place."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = (
        "1"  # ranks take from this variable whether torch allocates huge pages
    )
    with part.world() as world:
        part.report("world")
        _check_all(
            [
                _gathered(world, torch.full((1 << 19,), float(number)), number)
                for number in range(part.draw.choice((20, 60)))
            ]
        )


def hundreds_but_one(part: Part) -> None:
    """Equal calls, except for one of the victim, which may be the first or the last."""
    number = part.draw.choice((20, 40, 100))
    odd = part.draw.randrange(number)
    with part.world() as world:
        part.report("world")
        # keeps the lanes busy until all other calls are started
        handles = [weft.all_reduce_async(torch.ones(1 << 22))]
        for at in range(number):
            if at == odd:
                part.fault()
            handles.append(
                weft.all_reduce_async(
                    torch.full((3,), 5.0 + world.rank),
                    op="max" if at == odd and part.victim else "sum",
                )
            )
        for handle in random.sample(handles, len(handles)):
            handle.wait()


def hundreds_of_works(part: Part) -> None:
    """Hundreds of asynchronous calls on a process group of torch.distributed."""
    with part.world() as world:
        part.report("world")
        started = [_work(part, world, number) for number in range(part.draw.choice((20, 60, 200)))]
        _check_all(started)


def dropped(part: Part) -> None:
    """A world without any reference, with outstanding calls that the other ranks have not made."""
    ctypes.CDLL(None).mallopt(_M_PERTURB, 0xA5)  # use of freed memory becomes visible
    _unanswered(part)
    if part.victim:
        registry.default = None
        gc.collect()
        time.sleep(part.trial.delay)


def left_by_exit(part: Part) -> None:
    """The process exits with outstanding calls that the other ranks have not made."""
    _unanswered(part)
    if part.victim:
        sys.exit(5)


def _unanswered(part: Part) -> None:
    """The victim starts calls and keeps no handle; the other ranks make one call more, and wait for
    it in vain.
    """
    number, size = part.draw.choice((1, 3, 20)), part.draw.choice((5, 300_000))
    part.open()
    begin = (
        weft.all_reduce_async
        if part.trial.by == "world"
        else partial(dist.all_reduce, async_op=True)
    )
    begin(torch.ones(size)).wait()  # the first call allocates the workspace
    part.report("world")
    if part.victim:
        part.fault()
        for _ in range(number):
            begin(torch.ones(size))
        return
    # by this time the victim may have dropped its world, or be about to
    time.sleep(part.trial.delay + part.draw.choice((0.0, 0.3)))
    for _ in range(number + 1):
        begin(torch.ones(size)).wait()


def _started(part: Part, world: weft.World) -> Iterator[StartedCall]:
    draw, number = part.draw, 0
    random_ones = (
        call
        for call in random_calls.calls(part.trial.seed, world.rank, world.hosts)
        if call.asynchronous
    )
    symmetric = (
        [(world.empty(size), world.empty(size)) for size in (1, 3000, 600_000)]
        if part.trial.place == "shared"
        else []
    )
    while True:
        number += 1
        if symmetric and draw.random() < 0.1:
            x, out = symmetric.pop(draw.randrange(len(symmetric)))
            x.fill_(float(world.rank + number))
            wanted = torch.full_like(out, sum(rank + number for rank in range(world.ranks)))
            yield StartedCall(
                "all_reduce of a symmetric tensor",
                weft.all_reduce_async(x, out=out).wait,
                lambda found: found,
                wanted,
            )
        elif draw.random() < 0.05:
            yield _gathered(world, torch.full((1 << 19,), float(number)), number)
        else:
            call = next(random_ones)
            yield StartedCall(call.name, call.make().wait, lambda found: found, call.wanted)


def _gathered(world: weft.World, x: Tensor, number: int) -> StartedCall:
    """An all-gather, checked by three elements of each rank's tensor."""
    x[0], x[-1] = world.rank, world.rank
    wanted = torch.tensor([[rank, number, rank] for rank in range(world.ranks)]).float()
    end = weft.all_gather_async(x).wait
    return StartedCall(
        "all_gather",
        end,
        lambda found: torch.stack([one[[0, 1, -1]] for one in found.chunk(world.ranks)]),
        wanted,
    )


def _work(part: Part, world: weft.World, number: int) -> StartedCall:
    size = part.draw.choice((1, 400, 30_000))
    ranks, name = (
        range(world.ranks),
        part.draw.choice(("all_reduce", "all_gather", "broadcast", "reduce_scatter")),
    )
    x = torch.full((size,), float(world.rank + number))
    if name == "all_reduce":
        work = dist.all_reduce(x, async_op=True)
        return StartedCall(
            name,
            work.wait,
            lambda _: x,
            torch.full((size,), float(sum(ranks) + number * world.ranks)),
        )
    if name == "broadcast":
        source = number % world.ranks
        work = dist.broadcast(x, source, async_op=True)
        return StartedCall(
            name, work.wait, lambda _: x, torch.full((size,), float(source + number))
        )
    if name == "all_gather":
        found = [torch.zeros(size) for _ in ranks]
        work = dist.all_gather(found, x, async_op=True)
        return StartedCall(
            name,
            work.wait,
            lambda _: torch.cat(found),
            torch.cat([torch.full((size,), float(r + number)) for r in ranks]),
        )
    out = torch.zeros(size)
    work = dist.reduce_scatter(out, [x + to for to in ranks], async_op=True)
    return StartedCall(
        name,
        work.wait,
        lambda _: out,
        torch.full((size,), float(sum(ranks) + (number + world.rank) * world.ranks)),
    )


def _check_all(started: list[StartedCall]) -> None:
    """Wait for all calls, in an order that differs between ranks, and check them."""
    for each in random.sample(started, len(started)):
        each.check()
