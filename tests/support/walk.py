"""A random walk over calls and sizes: every collective and fused operator with sizes from a few bytes
to megabytes, powers of two and their neighbours among them, in place, in symmetric memory, of any
dtype, with results that are compared exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import weft

LARGEST = 1 << 20  # bytes of a rank's tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.int64)
FLOATS = DTYPES[:3]


@cache
def table() -> Tensor:
    """The numbers of all tensors, from some position on: sums of them are exact in every dtype. Not
    made at import: ranks are forked from a process that has started no threads.
    """
    return ((torch.arange(4 * LARGEST) * 7) % 16).to(torch.uint8)


class Step(NamedTuple):
    """A call: its description, and a function that makes it and returns its result and the right
    one.
    """

    words: str
    make: Callable[[], tuple[Tensor, Tensor]]


def walk(steps: Iterator[Step], number: int) -> None:
    """Make this number of calls, and compare their results."""
    for at, step in enumerate(islice(steps, number)):
        made, wanted = step.make()
        assert made.dtype == wanted.dtype, f"call {at}: {step.words}"
        assert torch.equal(made, wanted), f"call {at}: {step.words}"


class Draw:
    """Random choices that all ranks make alike."""

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        self.dice, self.rank, self.ranks = random.Random(seed), rank, ranks

    def size(self, item: int, most: int = LARGEST) -> int:
        """A number of elements of `item` bytes, at least one."""
        bits = self.dice.uniform(0, (most // item).bit_length() - 1)
        size = self.dice.choice((int(2**bits), 1 << round(bits)))
        return max(1, min(most // item, size + self.dice.choice((0, 0, 0, -1, 1))))

    def starts(self) -> list[int]:
        """The position in the table from which on each rank has its numbers."""
        return [self.dice.randrange(LARGEST // 2) for _ in range(self.ranks)]


def rows(start: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The numbers from a position on."""
    count = torch.Size(shape).numel()
    return table()[start : start + count].to(dtype, copy=True).view(shape)


def shaped(draw: Draw, count: int) -> tuple[int, int]:
    """A matrix of about so many elements."""
    columns = draw.dice.choice([c for c in (1, 1, 3, 16, 64, 256) if c <= count])
    return max(1, count // columns), columns


def weft_steps(world: weft.World, seed: int) -> Iterator[Step]:
    """Endless calls of weft's own operators."""
    draw, rank, ranks = Draw(seed, world.rank, world.ranks), world.rank, world.ranks
    pool = world.empty(4 * LARGEST, dtype=torch.uint8)

    def placed(tensor: Tensor, symmetric: bool) -> Tensor:
        if not symmetric:
            return tensor
        place = pool[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        weft.barrier(world)  # peers have read what was there
        return place.copy_(tensor)

    while True:
        name = draw.dice.choice((*MOVES, *FUSED))
        symmetric, starts = draw.dice.random() < 0.2, draw.starts()
        if name in FUSED:
            yield fused(draw, world, name, starts)
            continue
        dtype = draw.dice.choice(DTYPES)
        shape = shaped(draw, draw.size(dtype.itemsize))
        inputs = [(start, dtype, *shape) for start in starts]
        source, op = draw.dice.randrange(ranks), draw.dice.choice(("sum", "max", "min"))
        in_place, later = draw.dice.random() < 0.3, draw.dice.random() < 0.3
        shards = None
        if name == "all_gather" and draw.dice.random() < 0.3:
            shards = [draw.dice.randint(0, shape[0]) for _ in range(ranks)]
            inputs = [
                (start, dtype, many, shape[1]) for start, many in zip(starts, shards, strict=True)
            ]
        if name in ("reduce_scatter", "all_to_all"):
            inputs = [(start, dtype, shape[0] * ranks, shape[1]) for start in starts]
        words = (
            f"{name} of {inputs[0]}{' symmetric' * symmetric}{', shards' * (shards is not None)}"
        )

        def make(
            name=name,
            inputs=inputs,
            symmetric=symmetric,
            source=source,
            op=op,
            in_place=in_place,
            later=later,
            shards=shards,
        ):
            every = [rows(*each) for each in inputs]
            a = placed(every[rank], symmetric)
            options = {"world": world}
            if name in ("reduce_scatter", "all_reduce"):
                options["op"] = op
            if name == "all_reduce" and in_place:
                options["out"] = a
            if shards is not None:
                options["shard_rows"] = shards
            arguments = (a, source) if name == "broadcast" else (a,)
            wanted = MOVES[name](every, rank, source, op)
            if later:
                return getattr(weft, f"{name}_async")(*arguments, **options).wait(), wanted
            return getattr(weft, name)(*arguments, **options), wanted

        yield Step(words, make)


def fused(draw: Draw, world: weft.World, name: str, starts: list[int]) -> Step:
    """A call of a fused operator."""
    rank, ranks = draw.rank, draw.ranks
    k, n = draw.dice.choice((1, 8, 33, 64)), draw.dice.choice((1, 4, 32))
    dtype = draw.dice.choice((torch.float32, torch.float64))
    many = draw.size(1, 512) * (1 if name == "all_gather_matmul" else ranks)
    packed, biased = draw.dice.random() < 0.3, draw.dice.random() < 0.2
    inputs = [(start, dtype, many, k) for start in starts]

    def make():
        every = [rows(*each) for each in inputs]
        weights = [rows(start + 5, dtype, k, n) for start in starts]
        b = weights[rank]
        bias = rows(7, dtype, n) if biased else None
        wanted = FUSED[name](every, weights, rank)
        made = getattr(weft, name)(
            every[rank], weft.pack(b) if packed else b, bias=bias, world=world
        )
        return made, wanted if bias is None else wanted + bias

    return Step(f"{name} of {inputs[0]} by {n} columns{', packed' * packed}", make)


def group_steps(group: dist.ProcessGroup, seed: int) -> Iterator[Step]:
    """Endless calls of torch.distributed."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    draw = Draw(seed, rank, ranks)
    while True:
        name = draw.dice.choice([*GROUP])
        dtype = draw.dice.choice(DTYPES)
        shape = shaped(draw, draw.size(dtype.itemsize))
        starts, source = draw.starts(), draw.dice.randrange(ranks)
        op, later = draw.dice.choice(("sum", "max", "min")), draw.dice.random() < 0.4
        inputs = [(start, dtype, *shape) for start in starts]
        if name in ("reduce_scatter", "all_to_all"):
            inputs = [(start, dtype, shape[0] * ranks, shape[1]) for start in starts]

        def make(name=name, inputs=inputs, source=source, op=op, later=later):
            every = [rows(*each) for each in inputs]
            a, reduction = every[rank].clone(), getattr(dist.ReduceOp, op.upper())
            collective, shape_of = GROUP[name]
            out = a.new_empty(shape_of(a.shape, ranks))
            work = collective(out, a, source, reduction, later)
            if later:
                work.wait()
            result = a if name in ("broadcast", "all_reduce") else out
            return result, MOVES[name](every, rank, source, op)

        yield Step(f"{name} of {inputs[0]}", make)


def _reduced(every: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(every)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _chunk(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    part = len(tensor) // ranks
    return tensor[part * rank : part * (rank + 1)]


MOVES: dict[str, Callable[[list[Tensor], int, int, str], Tensor]] = {
    "all_gather": lambda every, rank, source, op: torch.cat(every),
    "all_reduce": lambda every, rank, source, op: _reduced(every, op),
    "reduce_scatter": lambda every, rank, source, op: _reduced(
        [_chunk(a, rank, len(every)) for a in every], op
    ),
    "all_to_all": lambda every, rank, source, op: torch.cat(
        [_chunk(a, rank, len(every)) for a in every]
    ),
    "broadcast": lambda every, rank, source, op: every[source],
}
FUSED: dict[str, Callable[[list[Tensor], list[Tensor], int], Tensor]] = {
    "all_gather_matmul": lambda every, weights, rank: torch.cat(every) @ weights[rank],
    "matmul_reduce_scatter": lambda every, weights, rank: sum(
        _chunk(a, rank, len(every)) @ b for a, b in zip(every, weights, strict=True)
    ),
    "matmul_all_reduce": lambda every, weights, rank: sum(
        a @ b for a, b in zip(every, weights, strict=True)
    ),
}
GROUP = {
    "all_gather": (
        lambda out, a, source, op, later: dist.all_gather_into_tensor(out, a, async_op=later),
        lambda shape, ranks: (shape[0] * ranks, shape[1]),
    ),
    "all_reduce": (
        lambda out, a, source, op, later: dist.all_reduce(a, op, async_op=later),
        lambda shape, ranks: (),
    ),
    "reduce_scatter": (
        lambda out, a, source, op, later: dist.reduce_scatter_tensor(out, a, op, async_op=later),
        lambda shape, ranks: (shape[0] // ranks, shape[1]),
    ),
    "all_to_all": (
        lambda out, a, source, op, later: dist.all_to_all_single(out, a, async_op=later),
        lambda shape, ranks: shape,
    ),
    "broadcast": (
        lambda out, a, source, op, later: dist.broadcast(a, source, async_op=later),
        lambda shape, ranks: (),
    ),
}
"""Collectives of torch.distributed, and the shapes of their outputs."""
