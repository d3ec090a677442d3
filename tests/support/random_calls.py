"""Random calls of all operators, each with its result: whole numbers, which have the same sum in
any order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor

import weft

WAYS = {
    "all_gather": ("auto", "push", "ring"),
    "reduce_scatter": ("auto", "push", "ring"),
    "all_reduce": ("auto", "two_shot", "ring"),
    "all_to_all": (),
    "broadcast": ("auto", "push", "ring"),
    "all_gather_matmul": ("auto", "push", "ring", "sequential"),
    "matmul_reduce_scatter": ("auto", "push", "ring", "sequential"),
    "matmul_all_reduce": ("auto", "two_shot", "ring", "sequential"),
}
"""Algorithms that ranks of several hosts may choose, by operator."""

AHEAD = 3  # calls that may be under way at a time


class Asked(NamedTuple):
    """A call: how to make it, whether that only begins it, and what must come of it."""

    name: str
    make: Callable[[], Tensor | weft.Handle]
    begun: bool
    wanted: Tensor


def check(world: weft.World, seed: int, number: int) -> None:
    """Make so many calls, some of them in the background, and check what they give."""
    pending: deque[tuple[Asked, weft.Handle]] = deque()
    for asked in islice(calls(seed, world.rank, world.ranks), number):
        while len(pending) > (AHEAD if asked.begun else 0):
            before, handle = pending.popleft()
            assert torch.equal(handle.wait(), before.wanted), before.name
        made = asked.make()
        if asked.begun:
            pending.append((asked, made))
        else:
            assert torch.equal(made, asked.wanted), asked.name
    for asked, handle in pending:
        assert torch.equal(handle.wait(), asked.wanted), asked.name


def calls(seed: int, rank: int, ranks: int) -> Iterator[Asked]:
    """Calls without end, the same on all ranks."""
    draw, every = random.Random(seed), range(ranks)
    for number in count():
        name = draw.choice([*WAYS])
        rows, columns, source = (
            draw.choice((1, 7, 96, 500)),
            draw.choice((1, 5, 200)),
            draw.randrange(ranks),
        )
        shards = (
            [draw.choice((rows, 0, rows + p)) for p in every]
            if "all_gather" in name
            else [rows] * ranks
        )
        parts = ranks if "scatter" in name or "to_all" in name else 1
        given = [_numbers(number, r, shards[r] * parts, columns) for r in every]
        weight, wanted = _numbers(number, ranks, columns, 4), _result(name, given, rank, source)
        fused, options = (
            "matmul" in name,
            {"algorithm": draw.choice(WAYS[name])} if WAYS[name] else {},
        )
        if "all_gather" in name:
            options["shard_rows"] = shards
        others = [weight] if fused else [source] if name == "broadcast" else []
        begun = not fused and draw.random() < 0.5
        make = partial(
            getattr(weft, f"{name}_async" if begun else name), given[rank], *others, **options
        )
        yield Asked(name, make, begun, wanted @ weight if fused else wanted)


def _result(name: str, given: Sequence[Tensor], rank: int, source: int) -> Tensor:
    """What an operator gives a rank, before it is multiplied."""
    if "all_gather" in name:
        return torch.cat([*given])
    if name == "all_to_all":
        return torch.cat([part.chunk(len(given))[rank] for part in given])
    if name == "broadcast":
        return given[source].clone()
    total = torch.stack([*given]).sum(0)
    return total.chunk(len(given))[rank] if "scatter" in name else total


def _numbers(call: int, rank: int, rows: int, columns: int) -> Tensor:
    return torch.randint(
        -8, 8, (rows, columns), generator=torch.Generator().manual_seed(1000 * call + rank)
    ).float()
