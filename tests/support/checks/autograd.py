"""Checks of gradients against autograd through the same layer on one rank."""

from __future__ import annotations

import itertools

import torch

import weft
from support.ranks import everyones


def leaves(*tensors):
    return [
        None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors
    ]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def exact(world):
    """Inputs of 0 and 1: every sum is a whole number that any dtype here holds, so results are
    exact.
    """
    generator = torch.Generator().manual_seed(world.rank)
    for dtype, k in ((torch.bfloat16, 40), (torch.float16, 200), (torch.float32, 200)):
        k //= world.ranks
        a, b = (
            torch.randint(0, 2, shape, generator=generator).to(dtype) for shape in ((6, k), (k, 5))
        )
        mine = leaves(a, b)
        y = weft.matmul_reduce_scatter(*mine)
        total = sum(
            x.double() @ w.double() for x, w in zip(everyones(a), everyones(b), strict=True)
        )
        rows = slice(2 * world.rank, 2 * world.rank + 2)
        assert torch.equal(y.double(), total[rows])
        g = torch.randint(0, 2, y.shape, generator=generator).to(dtype)
        y.backward(g)
        whole = torch.cat(everyones(g)).double()
        assert torch.equal(mine[0].grad.double(), whole @ b.double().t())
        assert torch.equal(mine[1].grad.double(), a.double().t() @ whole)
        assert torch.equal(weft.matmul_all_reduce(a, b).double(), total)
        shard, weight = leaves(g, b.t().contiguous())
        z = weft.all_gather_matmul(shard, weight)
        assert torch.equal(z.double(), whole @ b.t().double())
        z.backward(torch.ones_like(z))
        back = sum(torch.ones(6, k).double() @ w.double() for w in everyones(b))
        assert torch.equal(shard.grad.double(), back[rows])
        assert torch.equal(weight.grad.double(), whole.t() @ torch.ones(6, k).double())


def every_algorithm_has_gradients(world):
    a, b = torch.randn(6, 5).double(), torch.randn(5, 6).double()
    first = {}
    for operator, algorithms in {
        weft.all_gather_matmul: ("direct", "pull", "push", "ring", "sequential"),
        weft.matmul_reduce_scatter: ("direct", "push", "ring", "sequential"),
        weft.matmul_all_reduce: ("one_shot", "two_shot", "push", "sequential"),
    }.items():
        for algorithm, chunk in itertools.product(algorithms, (None, 2)):
            mine = leaves(a, b)
            operator(*mine, algorithm=algorithm, chunk_rows=chunk).sin().sum().backward()
            grads = first.setdefault(operator, [x.grad for x in mine])
            assert_same([x.grad for x in mine], grads)
