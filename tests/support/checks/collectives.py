"""Checks of collectives against torch on one process."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import weft
from support.ranks import everyones, meet
from weft.ops.collective import ANY, NUMBERS


def numbers(shape, dtype):
    """Distinct on each rank, and small enough that sums are exact in every dtype."""
    return torch.randint(0, 2 if dtype == torch.bool else 20, shape).to(dtype)


def input_like(world, tensor, symmetric):
    if not symmetric:
        return tensor.clone()
    ours = world.empty(*tensor.shape, dtype=tensor.dtype)
    return ours.copy_(tensor)


def moving(world, symmetric, dtypes=ANY):
    for dtype, shape in itertools.product(
        dtypes,
        [(2 * world.ranks, 3), (world.ranks,), (world.ranks, 2, 3), (0, 4), (40 * world.ranks, 7)],
    ):
        a = input_like(world, numbers(shape, dtype), symmetric)
        parts = everyones(a)
        for dim in range(-1, a.dim()):
            assert torch.equal(weft.all_gather(a, dim=dim), torch.cat(parts, dim=dim))
        for algorithm in ("pull", "push", "ring"):
            whole = input_like(
                world, numbers((shape[0] * world.ranks, *shape[1:]), dtype), symmetric
            )
            for _ in range(3):
                whole.zero_()
                assert weft.all_gather(a, out=whole, algorithm=algorithm, chunk_rows=3) is whole
                assert torch.equal(whole, torch.cat(parts))
        part = shape[0] // world.ranks
        mine = torch.cat([other[part * world.rank : part * (world.rank + 1)] for other in parts])
        assert torch.equal(weft.all_to_all(a), mine)
        for source in range(world.ranks):
            tensor = input_like(world, a, symmetric)
            assert (
                weft.broadcast(tensor, source, algorithm=("auto", "push", "ring")[source % 3])
                is tensor
            )
            assert torch.equal(tensor, parts[source])


def reducing(world, symmetric, dtypes=NUMBERS):
    for dtype, shape in itertools.product(
        dtypes, [(2 * world.ranks, 3), (world.ranks,), (0, 4), (600 * world.ranks, 7)]
    ):
        a = input_like(world, numbers(shape, dtype), symmetric)
        parts = torch.stack(everyones(a))
        wide = parts.double() if dtype.is_floating_point else parts.long()
        expected = {"sum": wide.sum(0).to(dtype), "max": parts.amax(0), "min": parts.amin(0)}
        if dtype.is_floating_point:
            expected["avg"] = (wide.sum(0) / world.ranks).to(dtype)
        for op, right in expected.items():
            for algorithm in ("auto", "one_shot", "two_shot", "ring"):
                if op == "avg" and algorithm == "ring" and dtype in (torch.float16, torch.bfloat16):
                    continue  # rounded on every rank: tested within a bound below
                assert_same(weft.all_reduce(a, op=op, algorithm=algorithm), right)
                here = input_like(world, a, symmetric)
                assert weft.all_reduce(here, op=op, algorithm=algorithm, out=here) is here
                assert_same(here, right)
            part = shape[0] // world.ranks
            mine = right[part * world.rank : part * (world.rank + 1)]
            for algorithm in ("direct", "push", "ring"):
                if op == "avg" and algorithm == "ring" and dtype in (torch.float16, torch.bfloat16):
                    continue
                assert_same(weft.reduce_scatter(a, op=op, algorithm=algorithm), mine)
                here = input_like(world, a, symmetric)
                out = here[part * world.rank : part * (world.rank + 1)]
                assert_same(weft.reduce_scatter(here, op=op, out=out, algorithm=algorithm), mine)
            if shape[0] and len(shape) == 2:
                turned = a.t().contiguous()
                assert_same(weft.reduce_scatter(turned, op=op, dim=1), mine.t())
                twice = torch.stack([a, a])
                assert_same(weft.reduce_scatter(twice, op=op, dim=1), torch.stack([mine, mine]))


def assert_same(ours, right):
    if right.dtype.is_floating_point:
        torch.testing.assert_close(ours, right, rtol=torch.finfo(right.dtype).eps, atol=0)
    else:
        assert torch.equal(ours, right)


def uneven(world):
    dice = random.Random(7)
    for _ in range(10):
        rows = [dice.choice([0, 1, 5, 33]) for _ in range(world.ranks)]
        a = torch.randn(rows[world.rank], 3)
        for algorithm in ("pull", "push", "ring"):
            assert torch.equal(
                weft.all_gather(a, shard_rows=rows, algorithm=algorithm), torch.cat(everyones(a))
            )
        whole = torch.randint(0, 9, (sum(rows), 2)).float()
        begin = sum(rows[: world.rank])
        total = torch.stack(everyones(whole)).sum(0)
        assert torch.equal(
            weft.reduce_scatter(whole, shard_rows=rows), total[begin : begin + rows[world.rank]]
        )
        counts = [[dice.choice([0, 1, 4]) for _ in range(world.ranks)] for _ in range(world.ranks)]
        sent = torch.randn(sum(counts[world.rank]), 3)
        received = [row[world.rank] for row in counts]
        ours = weft.all_to_all(
            sent, output_split_sizes=received, input_split_sizes=counts[world.rank]
        )
        parts = zip(everyones(sent), counts, strict=True)
        assert torch.equal(ours, torch.cat([a.split(row)[world.rank] for a, row in parts]))


def in_the_background(world):
    a, b = torch.full((300, 5), float(world.rank + 1)), torch.eye(5)
    total = world.ranks * (world.ranks + 1) / 2
    for _ in range(20):
        handles = [weft.all_reduce_async(a) for _ in range(6)]
        handles += [
            weft.all_gather_async(a),
            weft.reduce_scatter_async(a),
            weft.all_to_all_async(a),
        ]
        handles.append(weft.broadcast_async(a.clone(), 1))
        y = weft.all_gather_matmul(a, b)  # runs after all of them
        assert all(handle.done() for handle in handles)
        assert torch.equal(y, weft.all_gather(a))
        results = [handle.wait() for handle in handles]
        assert all((result == total).all() for result in results[:6])
        assert torch.equal(
            results[6], torch.cat([torch.full((300, 5), r + 1.0) for r in range(world.ranks)])
        )
        assert (results[7] == total).all()
        assert (results[9] == 2).all()
        assert results[0] is handles[0].wait(), "waiting again gives the same"


def late_in_the_background(world):
    a = torch.ones(10)
    weft.all_reduce(a)  # the first call of its kind allocates the workspace, collectively
    if world.rank == 1:
        meet()
    handle = weft.all_reduce_async(a)
    if world.rank == 0:
        assert not handle.done()
        with pytest.raises(weft.PeerTimeout, match="all_reduce is not done after"):
            handle.wait(timeout=0.05)
        meet()
    return handle.wait().sum().item()


def the_same_tensors_again(world):
    """Calls that are found by their tensors' identity detect tensors that were changed in place or
    replaced.
    """
    a, out = torch.full((6,), float(world.rank)), torch.empty(6 * world.ranks)
    for number in range(50):
        a.fill_(float(10 * number + world.rank))
        weft.all_gather(a, out=out)
        assert out.view(world.ranks, 6)[:, 0].tolist() == [
            10.0 * number + rank for rank in range(world.ranks)
        ]
    with pytest.raises(ValueError, match="timeout must be a positive"):
        weft.all_gather(a, out=out, timeout=-1.0)
    a.data = a.data.view(torch.int32)  # at the same address, and of equal size
    with pytest.raises(TypeError, match="out must have dtype int32; got float32"):
        weft.all_gather(a, out=out)
    a.data = a.data.view(torch.float32)
    out.unsqueeze_(1)
    with pytest.raises(ValueError, match=r"out must have shape \(12,\)"):
        weft.all_gather(a, out=out)
    out.squeeze_(1)
    a.resize_(4)
    out.resize_(4 * world.ranks)
    a.fill_(world.rank)
    assert weft.all_gather(a, out=out).view(world.ranks, 4)[:, 3].tolist() == [
        *map(float, range(world.ranks))
    ]
    wrong = [
        (None, {}),
        (3, {}),
        (a, {"dim": [0]}),
        (a, {"algorithm": ["pull"]}),
        (a, {"timeout": -1.0}),
    ]
    for tensor, options in wrong:
        with pytest.raises((TypeError, ValueError)):
            weft.all_gather(tensor, out=out, **options)
    assert weft.all_gather(a, out=out) is out, (
        "a refused call leaves the cache and the world unchanged"
    )
    for number in range(50):
        mine = torch.full((6,), float(number))
        assert (
            weft.all_reduce(mine, out=torch.empty(6)).tolist() == [float(number * world.ranks)] * 6
        )
        weft.all_reduce(mine, out=mine)
        assert mine.tolist() == [float(number * world.ranks)] * 6


def mixed_back_to_back(world):
    """Hundreds of collectives of all kinds and sizes without a barrier, in one random order, equal
    on all ranks.
    """
    dice = random.Random(3)
    for call in range(400):
        n = world.ranks * dice.choice([1, 7, 300, 5000])
        a = torch.arange(n, dtype=torch.float64) + 1000 * world.rank + call
        kind = dice.choice(["gather", "reduce", "scatter", "broadcast", "exchange", "fused"])
        parts = [
            torch.arange(n, dtype=torch.float64) + 1000 * rank + call for rank in range(world.ranks)
        ]
        share = slice(n // world.ranks * world.rank, n // world.ranks * (world.rank + 1))
        if kind == "gather":
            algorithm = dice.choice(["pull", "push", "ring"])
            assert torch.equal(weft.all_gather(a, algorithm=algorithm), torch.cat(parts))
        elif kind == "reduce":
            algorithm = dice.choice(["one_shot", "two_shot", "ring"])
            assert torch.equal(weft.all_reduce(a, algorithm=algorithm), sum(parts))
        elif kind == "scatter":
            algorithm = dice.choice(["direct", "push", "ring"])
            assert torch.equal(weft.reduce_scatter(a, algorithm=algorithm), sum(parts)[share])
        elif kind == "broadcast":
            source = dice.randrange(world.ranks)
            algorithm = dice.choice(["pull", "push", "ring"])
            assert torch.equal(
                weft.broadcast(a.clone(), source, algorithm=algorithm), parts[source]
            )
        elif kind == "exchange":
            assert torch.equal(weft.all_to_all(a), torch.cat([part[share] for part in parts]))
        else:
            algorithm = dice.choice(["direct", "pull", "push", "ring", "sequential"])
            y = weft.all_gather_matmul(
                a.view(-1, 1), torch.ones(1, 1, dtype=torch.float64), algorithm=algorithm
            )
            assert torch.equal(y.view(-1), torch.cat(parts))
