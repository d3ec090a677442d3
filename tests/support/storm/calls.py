"""Calls that ranks make while a fault occurs: endless calls of every public kind, equal on all
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import weft
from support import random_calls

Call = Callable[[weft.World], Any]


def calls(seed: int, place: str, gradients: bool = True) -> Iterator[Call]:
    """Endless calls of every public kind, equal on all ranks."""
    draw = random.Random(seed + 1)
    torch.manual_seed(seed)
    grown = 8192
    kinds: list[Callable[[], Call]] = [
        *KINDS,
        *([_gradients] if gradients else []),
    ]
    while True:
        if place == "compile" and draw.random() < 0.3:
            yield compiled
            continue
        if draw.random() < 0.15:  # more rows than in any earlier call: the workspace grows
            grown = grown * 3 // 2
            yield lambda world, rows=grown: weft.all_gather_matmul(
                torch.ones(rows, 16), torch.eye(16), algorithm="push"
            )
            continue
        yield draw.choice(kinds)(draw)


def _gather_matmul(draw):
    algorithm, rows = draw.choice(("auto", "push", "ring", "sequential")), draw.choice((2, 48))
    return lambda world: weft.all_gather_matmul(
        torch.randn(rows, 8), torch.eye(8), algorithm=algorithm, chunk_rows=7
    )


def _matmul_scatter(draw):
    algorithm, rows = draw.choice(("auto", "push", "ring", "sequential")), draw.choice((4, 60))
    return lambda world: weft.matmul_reduce_scatter(
        torch.randn(rows * 3, 8), torch.eye(8), algorithm=algorithm
    )


def _matmul_reduce(draw):
    algorithm, rows = draw.choice(("auto", "two_shot", "sequential")), draw.choice((1, 50))
    return lambda world: weft.matmul_all_reduce(
        torch.randn(rows, 8), torch.eye(8), algorithm=algorithm
    )


def _collective(draw):
    rows, name = (
        draw.choice((12, 1200)),
        draw.choice(("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    )
    background = draw.random() < 0.4

    def call(world):
        if background:
            return [
                handle.wait()
                for handle in [
                    getattr(weft, f"{name}_async")(torch.ones(rows, 5)) for _ in range(3)
                ]
            ]
        return getattr(weft, name)(torch.ones(rows, 5))

    return call


def _broadcast(draw):
    rows, source = draw.choice((1, 3000)), draw.randrange(2)
    return lambda world: weft.broadcast(torch.ones(rows, 3), source % world.ranks)


def _gradients(draw):
    def call(world):
        a, b = (
            torch.ones(6 * world.ranks, 4, requires_grad=True),
            torch.ones(4, 4, requires_grad=True),
        )
        weft.matmul_reduce_scatter(weft.all_gather_matmul(a, b).relu(), b.t()).sum().backward()

    return call


def _barrier(draw):
    return lambda world: weft.barrier()


def _empty(draw):
    size = draw.choice((1, 100_000))
    return lambda world: weft.all_reduce(world.empty(size).fill_(1.0))


def _one_sided(draw):
    background = draw.random() < 0.5

    def call(world):
        """Put to the next rank, wait for the previous rank's rows, and get them from it as well."""
        to, there = (world.rank + 1) % world.ranks, world.empty(500)
        signals = world.signals(2)
        if background:
            weft.put_async(there, torch.ones(500), to).wait()
            weft.notify(signals, 0, to)
        else:
            weft.put_notify(there, torch.ones(500), signals, 0, to)
        weft.wait(signals, 0, ">=", 1)
        weft.get(torch.empty(500), there, to)
        weft.barrier()

    return call


def _checked(draw):
    """A few calls of any kind, some of them asynchronous, whose results are checked."""
    seed = draw.randrange(1 << 30)
    return lambda world: random_calls.check(world, seed, 4)


KINDS = [
    _one_sided,
    _gather_matmul,
    _matmul_scatter,
    _matmul_reduce,
    _collective,
    _checked,
    _broadcast,
    _barrier,
    _empty,
]


def _layer(a, b):
    return weft.matmul_reduce_scatter(weft.all_gather_matmul(a, b).relu(), b.t()).square()


def compiled(world):
    a, b = torch.ones(4, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    torch.compile(_layer, fullgraph=True)(a, b).sum().backward()


def group_calls(seed: int) -> Iterator[Call]:
    """Endless calls on the default process group, with their results checked."""
    draw = random.Random(seed + 1)
    while True:
        yield draw.choice(GROUP_KINDS)(draw)


def _group_reduce(draw):
    size = draw.choice((1, 700, 90_000))

    def call(world):
        dist.all_reduce(x := torch.full((size,), float(world.rank + 1)))
        assert torch.equal(x, torch.full((size,), float(sum(range(1, world.ranks + 1)))))

    return call


def _group_gather(draw):
    size = draw.choice((1, 700, 90_000))

    def call(world):
        found = [torch.zeros(size) for _ in range(world.ranks)]
        dist.all_gather(found, torch.full((size,), float(world.rank)))
        assert all(
            torch.equal(one, torch.full((size,), float(rank))) for rank, one in enumerate(found)
        )

    return call


def _group_messages(draw):
    size = draw.choice((1, 700, 90_000))

    def call(world):
        to, source = (world.rank + 1) % world.ranks, (world.rank - 1) % world.ranks
        sent = dist.isend(torch.full((size,), float(world.rank)), to)
        dist.recv(x := torch.zeros(size), source)
        sent.wait()
        assert torch.equal(x, torch.full((size,), float(source)))

    return call


def _group_works(draw):
    """Several asynchronous calls, waited for in any order."""
    sizes = [draw.choice((1, 300, 20_000)) for _ in range(6)]

    def call(world):
        tensors = [
            torch.full((size,), float(world.rank + number)) for number, size in enumerate(sizes)
        ]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for work in random.sample(works, len(works)):
            work.wait()
        total = sum(range(world.ranks))
        assert all(
            torch.equal(x, torch.full_like(x, float(total + number * world.ranks)))
            for number, x in enumerate(tensors)
        )

    return call


def _group_barrier(draw):
    return lambda world: dist.barrier()


GROUP_KINDS = [_group_reduce, _group_gather, _group_messages, _group_works, _group_barrier]
