"""Calls in the background by the hundred, and worlds that are gone before these are through."""

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
from weft.world import world as worlds

_M_PERTURB = -6


class Begun:
    """A call in the background: what ends it, and what must be in `found` then."""

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
    """Calls of all kinds and sizes, on ordinary tensors and symmetric ones, waited for in any
    order; then the same again.
    """
    with part.world() as world:
        part.say("world")
        for _ in range(2):
            begun = [*islice(_begun(part, world), part.draw.choice((20, 60, 150)))]
            _ended(begun)


def hundreds_of_large(part: Part) -> None:
    """The same of all-gathers so large that ranks read them where they lie."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = (
        "1"  # if these lie in huge pages, which ranks take from this variable
    )
    with part.world() as world:
        part.say("world")
        _ended(
            [
                _gathered(world, torch.full((1 << 19,), float(number)), number)
                for number in range(part.draw.choice((20, 60)))
            ]
        )


def hundreds_but_one(part: Part) -> None:
    """Calls of one kind, one of which is another on the victim; it may come first or last."""
    number = part.draw.choice((20, 40, 100))
    odd = part.draw.randrange(number)
    with part.world() as world:
        part.say("world")
        handles = [
            weft.all_reduce_async(torch.ones(1 << 22))
        ]  # which keeps lanes busy until all others are begun
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
    """The same of a process group of torch.distributed."""
    with part.world() as world:
        part.say("world")
        begun = [_work(part, world, number) for number in range(part.draw.choice((20, 60, 200)))]
        _ended(begun)


def dropped(part: Part) -> None:
    """A world that nobody holds any more, with calls under way which the others have not begun."""
    ctypes.CDLL(None).mallopt(_M_PERTURB, 0xA5)  # whoever uses freed memory is to be found out
    _begun_in_vain(part)
    if part.victim:
        worlds._default = None
        gc.collect()
        time.sleep(part.trial.delay)


def left_by_exit(part: Part) -> None:
    """The process ends with calls under way which the others have not begun."""
    _begun_in_vain(part)
    if part.victim:
        sys.exit(5)


def _begun_in_vain(part: Part) -> None:
    """The victim begins calls and holds nothing of them; the others make one more, and wait for
    that in vain.
    """
    number, size = part.draw.choice((1, 3, 20)), part.draw.choice((5, 300_000))
    part.open()
    begin = (
        weft.all_reduce_async
        if part.trial.by == "world"
        else partial(dist.all_reduce, async_op=True)
    )
    begin(torch.ones(size)).wait()  # with which ranks take a workspace
    part.say("world")
    if part.victim:
        part.fault()
        for _ in range(number):
            begin(torch.ones(size))
        return
    time.sleep(
        part.trial.delay + part.draw.choice((0.0, 0.3))
    )  # by then the victim may have dropped it all, or be about to
    for _ in range(number + 1):
        begin(torch.ones(size)).wait()


def _begun(part: Part, world: weft.World) -> Iterator[Begun]:
    draw, number = part.draw, 0
    random_ones = (
        asked
        for asked in random_calls.calls(part.trial.seed, world.rank, world.ranks)
        if asked.begun
    )
    symmetric = (
        [(world.empty(size), world.empty(size)) for size in (1, 3000, 600_000)]
        if part.trial.place == "shared"
        else []
    )
    while True:
        number += 1
        if symmetric and draw.random() < 0.1:
            given, out = symmetric.pop(draw.randrange(len(symmetric)))
            given.fill_(float(world.rank + number))
            wanted = torch.full_like(out, sum(rank + number for rank in range(world.ranks)))
            yield Begun(
                "all_reduce of a symmetric tensor",
                weft.all_reduce_async(given, out=out).wait,
                lambda found: found,
                wanted,
            )
        elif draw.random() < 0.05:
            yield _gathered(world, torch.full((1 << 19,), float(number)), number)
        else:
            asked = next(random_ones)
            yield Begun(asked.name, asked.make().wait, lambda found: found, asked.wanted)


def _gathered(world: weft.World, given: Tensor, number: int) -> Begun:
    """The first rows that each rank gives."""
    given[0], given[-1] = world.rank, world.rank
    wanted = torch.tensor([[rank, number, rank] for rank in range(world.ranks)]).float()
    end = weft.all_gather_async(given).wait
    return Begun(
        "all_gather",
        end,
        lambda found: torch.stack([one[[0, 1, -1]] for one in found.chunk(world.ranks)]),
        wanted,
    )


def _work(part: Part, world: weft.World, number: int) -> Begun:
    size = part.draw.choice((1, 400, 30_000))
    ranks, name = (
        range(world.ranks),
        part.draw.choice(("all_reduce", "all_gather", "broadcast", "reduce_scatter")),
    )
    given = torch.full((size,), float(world.rank + number))
    if name == "all_reduce":
        work = dist.all_reduce(given, async_op=True)
        return Begun(
            name,
            work.wait,
            lambda _: given,
            torch.full((size,), float(sum(ranks) + number * world.ranks)),
        )
    if name == "broadcast":
        source = number % world.ranks
        work = dist.broadcast(given, source, async_op=True)
        return Begun(name, work.wait, lambda _: given, torch.full((size,), float(source + number)))
    if name == "all_gather":
        found = [torch.zeros(size) for _ in ranks]
        work = dist.all_gather(found, given, async_op=True)
        return Begun(
            name,
            work.wait,
            lambda _: torch.cat(found),
            torch.cat([torch.full((size,), float(r + number)) for r in ranks]),
        )
    out = torch.zeros(size)
    work = dist.reduce_scatter(out, [given + to for to in ranks], async_op=True)
    return Begun(
        name,
        work.wait,
        lambda _: out,
        torch.full((size,), float(sum(ranks) + (number + world.rank) * world.ranks)),
    )


def _ended(begun: list[Begun]) -> None:
    """Wait for all, in an order that no two ranks share."""
    for each in random.sample(begun, len(begun)):
        each.check()
