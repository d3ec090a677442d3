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

VISITS = "all_gather_matmul_reduce_scatter"
ALGORITHMS = {
    "all_gather": ("auto", "push", "ring"),
    "reduce_scatter": ("auto", "push", "ring"),
    "all_reduce": ("auto", "two_shot", "ring"),
    "all_to_all": (),
    "broadcast": ("auto", "push", "ring"),
    "all_gather_matmul": ("auto", "push", "ring", "sequential"),
    "matmul_reduce_scatter": ("auto", "push", "ring", "sequential"),
    "matmul_all_reduce": ("auto", "two_shot", "ring", "sequential"),
    "all_to_all_matmul": ("auto", "push", "by_expert", "sequential"),
    "matmul_all_to_all": ("auto", "push", "by_expert", "sequential"),
    "all_to_all_matmul_all_to_all": ("auto", "push", "sequential"),
    VISITS: ("auto", "shared", "gathered"),
}
"""Algorithms that ranks of several hosts may choose, by operator."""

AHEAD = 3  # the most calls that may be outstanding


class RandomCall(NamedTuple):
    """A call with its right result; `make` returns a handle if it is asynchronous."""

    name: str
    make: Callable[[], Tensor | weft.Handle]
    asynchronous: bool
    wanted: Tensor


def check(world: weft.World, seed: int, number: int) -> None:
    """Make `number` random calls, some of them asynchronous, and check their results."""
    pending: deque[tuple[RandomCall, weft.Handle]] = deque()
    for call in islice(calls(seed, world.rank, world.hosts), number):
        while len(pending) > (AHEAD if call.asynchronous else 0):
            before, handle = pending.popleft()
            assert torch.equal(handle.wait(), before.wanted), before.name
        made = call.make()
        if call.asynchronous:
            pending.append((call, made))
        else:
            assert torch.equal(made, call.wanted), call.name
    for call, handle in pending:
        assert torch.equal(handle.wait(), call.wanted), call.name


def calls(seed: int, rank: int, hosts: Sequence[int]) -> Iterator[RandomCall]:
    """Endless random calls of ranks on these hosts, the same on all ranks."""
    ranks = len(hosts)
    draw, every = random.Random(seed), range(ranks)
    for number in count():
        name = draw.choice([*ALGORITHMS])
        gathers = "all_gather" in name and name != VISITS
        rows, columns, source = (
            draw.choice((1, 7, 96, 500)),
            draw.choice((1, 5, 200)),
            draw.randrange(ranks),
        )
        shards = [draw.choice((rows, 0, rows + p)) for p in every] if gathers else [rows] * ranks
        parts = ranks if "scatter" in name or "to_all" in name else 1
        fused, options = (
            "matmul" in name,
            {"algorithm": draw.choice(ALGORITHMS[name])} if ALGORITHMS[name] else {},
        )
        weight = _numbers(number, ranks, columns, 4)
        if name == VISITS:
            counts = [[draw.choice((0, 1, rows)) for _ in {*hosts}] for _ in every]
            inputs = [_numbers(number, r, sum(counts[r]), columns) for r in every]
            parts_of_hosts = inputs[rank].split(counts[rank])
            wanted = torch.cat([a * hosts.count(h) for h, a in enumerate(parts_of_hosts)])
            options["input_split_sizes"] = counts[rank]
        elif fused and "to_all" in name:
            counts = [[draw.choice((0, 1, rows)) for _ in every] for _ in every]
            inputs = [_numbers(number, r, sum(counts[r]), columns) for r in every]
            received = [a.split(row)[rank] for a, row in zip(inputs, counts, strict=True)]
            returns = name.endswith("matmul_all_to_all") and name.startswith("all_to_all")
            wanted = inputs[rank] if returns else torch.cat(received)
            options["input_split_sizes"] = counts[rank]
        else:
            inputs = [_numbers(number, r, shards[r] * parts, columns) for r in every]
            wanted = _result(name, inputs, rank, source)
        if gathers:
            options["shard_rows"] = shards
        others = [weight] if fused else [source] if name == "broadcast" else []
        asynchronous = not fused and draw.random() < 0.5
        make = partial(
            getattr(weft, f"{name}_async" if asynchronous else name),
            inputs[rank],
            *others,
            **options,
        )
        yield RandomCall(name, make, asynchronous, wanted @ weight if fused else wanted)


def _result(name: str, inputs: Sequence[Tensor], rank: int, source: int) -> Tensor:
    """The operator's result on a rank, before the multiplication by a weight."""
    if "all_gather" in name:
        return torch.cat([*inputs])
    if name == "all_to_all":
        return torch.cat([part.chunk(len(inputs))[rank] for part in inputs])
    if name == "broadcast":
        return inputs[source].clone()
    total = torch.stack([*inputs]).sum(0)
    return total.chunk(len(inputs))[rank] if "scatter" in name else total


def _numbers(call: int, rank: int, rows: int, columns: int) -> Tensor:
    return torch.randint(
        -8, 8, (rows, columns), generator=torch.Generator().manual_seed(1000 * call + rank)
    ).float()
