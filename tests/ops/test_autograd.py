"""Gradients of the fused operators on real ranks, compared with autograd through the same layer on
one rank.
"""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from support.checks.autograd import assert_same, every_algorithm_has_gradients, exact, leaves
from support.ranks import everyones, on_ranks
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

import weft
import weft.nn
from weft.ops import conjugates
from weft.world import init_by_store

SUMS = ("sum", "avg")


def gathers(world, dim, uneven):
    """Each rank has a loss of its own; the gradient of a sums up their contributions."""
    sizes = [world.ranks + 1 - rank if uneven else 2 for rank in range(world.ranks)]
    shape = [4, 3, 6]
    shape[dim] = sizes[world.rank]
    a = torch.randn(*shape).double()
    k = sum(sizes) if dim in (2, -1) else 6
    b, c = torch.randn(k, 5 + world.rank).double(), torch.randn(7, k).double().t()
    bias = torch.randn(7).double()
    mine = leaves(a, b, c, bias)
    y, z = weft.all_gather_matmul(
        mine[0],
        [mine[1], mine[2]],
        dim=dim,
        bias=[None, mine[3]],
        shard_rows=sizes if uneven else None,
    )
    gy, gz = torch.randn_like(y), torch.randn_like(z)
    ((y * gy).sum() + (z * gz).sin().sum()).backward()
    alone = leaves(torch.cat(everyones(a), dim), b, c, bias)
    whole = alone[0]
    inputs = [everyones(x) for x in (b, c, bias, gy, gz)]
    for rank, (b_, c_, bias_, gy_, gz_) in enumerate(zip(*inputs, strict=True)):
        b_, c_, bias_ = alone[1:] if rank == world.rank else (b_, c_, bias_)
        loss = ((whole @ b_) * gy_).sum() + ((whole @ c_ + bias_) * gz_).sin().sum()
        loss.backward()
    own = torch.split(whole.grad, sizes, dim)[world.rank]
    assert_same([x.grad for x in mine], [own, *(x.grad for x in alone[1:])])


def every_gather(world):
    for dim, uneven in itertools.product((0, 1, -1), (False, True)):
        gathers(world, dim, uneven)


@pytest.mark.data
def test_all_gather_matmul():
    on_ranks(every_gather, 3)


def scatters(world, dim, uneven, op):
    sizes = [world.ranks - rank if uneven else 2 for rank in range(world.ranks)]
    shape, n = [3, 4, 5 + world.rank], 7
    if dim == 2:
        n = sum(sizes)
    else:
        shape[dim] = sum(sizes)
    a, b = torch.randn(*shape).double(), torch.randn(n, shape[-1]).double().t()
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).double()
    mine = leaves(a, b, bias)
    y = weft.matmul_reduce_scatter(
        mine[0], mine[1], bias=mine[2], op=op, dim=dim, shard_rows=sizes if uneven else None
    )
    g = torch.randn_like(y)
    (y * g).sin().sum().backward()
    pairs = [leaves(*pair) for pair in zip(everyones(a), everyones(b), strict=True)]
    (common,) = leaves(bias)
    total = sum(x @ w for x, w in pairs) / (world.ranks if op == "avg" else 1) + common
    assert_same([y], [torch.split(total, sizes, dim)[world.rank]])
    (total * torch.cat(everyones(g), dim)).sin().sum().backward()
    assert_same([x.grad for x in mine], [*(x.grad for x in pairs[world.rank]), common.grad])


def every_sum(world):
    for dim, (uneven, op) in itertools.product((0, 1, 2), ((False, "sum"), (True, "avg"))):
        scatters(world, dim, uneven, op)
    for op in SUMS:
        reduces(world, op)
    exact(world)


@pytest.mark.data
def test_matmul_reduce_scatter_and_all_reduce():
    on_ranks(every_sum, 3)


def reduces(world, op):
    a, b = torch.randn(3, 5, 4 + world.rank).double(), torch.randn(4 + world.rank, 6).double()
    bias = torch.randn(6, generator=torch.Generator().manual_seed(3)).double()
    mine = leaves(a, b, bias)
    y = weft.matmul_all_reduce(mine[0], mine[1], bias=mine[2], op=op)
    y.sin().sum().backward()
    pairs = [leaves(*pair) for pair in zip(everyones(a), everyones(b), strict=True)]
    (common,) = leaves(bias)
    total = sum(x @ w for x, w in pairs) / (world.ranks if op == "avg" else 1) + common
    assert_same([y], [total])
    total.sin().sum().backward()
    assert_same([x.grad for x in mine], [*(x.grad for x in pairs[world.rank]), common.grad])


def twice(world):
    """An operator called twice in one graph, a second backward of it, and second derivatives."""
    a, b = torch.randn(4, 6).double(), torch.randn(6, 6).double()
    x, w = leaves(a, b)
    y = weft.matmul_reduce_scatter(
        weft.all_gather_matmul(weft.matmul_reduce_scatter(weft.all_gather_matmul(x, w), w), w), w
    )
    y.sin().sum().backward(retain_graph=True)
    once = x.grad.clone(), w.grad.clone()
    y.sin().sum().backward()
    assert_same([x.grad, w.grad], [2 * once[0], 2 * once[1]])
    (whole,) = leaves(torch.cat(everyones(a)))
    weights = leaves(*everyones(b))
    total = sum(whole @ v @ v for v in weights)
    total = sum(total @ v @ v for v in weights)
    total.sin().sum().backward()
    assert_same(once, [torch.split(whole.grad, 4)[world.rank], weights[world.rank].grad])

    x, w = leaves(a, b)
    (whole,) = leaves(torch.cat(everyones(a)))
    weights = leaves(*everyones(b))
    found = second(weft.all_gather_matmul(x, w), x, w)
    for_whole, *for_weights = second(torch.cat([whole @ v for v in weights]), whole, *weights)
    assert_same(found, [torch.split(for_whole, 4)[world.rank], for_weights[world.rank]])
    for op in SUMS:
        xs, weights = leaves(*everyones(a)), leaves(*everyones(b))
        total = sum(x @ v for x, v in zip(xs, weights, strict=True))
        wanted = second(total / world.ranks if op == "avg" else total, *xs, *weights)
        own = xs[world.rank], weights[world.rank]
        found = second(weft.matmul_all_reduce(*own, op=op), *own)
        assert_same(found, wanted[world.rank :: world.ranks])


def second(y, *inputs):
    """Gradients of gradients, both of functions that are not linear."""
    first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)


def sums(world):
    """Derivatives of any order of a sum over ranks, and of the use of it on each rank."""
    found = parts = leaves(*everyones(torch.randn(3).double()))
    own = y = parts[world.rank]
    for _ in range(3):
        used = conjugates.copy_to_ranks(
            conjugates.reduce_from_ranks(y.sin(), world.name), world.name
        ) * (1 + world.rank)
        total = sum(part.sin() for part in found)
        all_used = [total * (1 + rank) for rank in range(world.ranks)]
        (y,) = torch.autograd.grad(used.sin().sum(), own, create_graph=True)
        found = torch.autograd.grad(sum(x.sin().sum() for x in all_used), parts, create_graph=True)
        assert_same([y], [found[world.rank]])


def gradchecked(world):
    """Numeric differentiation with a world per rank: each perturbs its own inputs only."""
    a, b = torch.randn(4, 3).double().requires_grad_(), torch.randn(3, 2).double().requires_grad_()
    alone = init_by_store(HashStore(), 0, 1, 20.0)
    bias = torch.randn(2).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: weft.matmul_all_reduce(x[0], x[1], bias=x[2], world=alone), (a, b, bias)
    )
    for dim in (0, 1):
        scatter = lambda *x, dim=dim: weft.matmul_reduce_scatter(  # noqa: E731
            x[0], x[1], dim=dim, bias=x[2], world=alone
        )
        gather = lambda *x, dim=dim: weft.all_gather_matmul(  # noqa: E731
            x[0], x[1], dim=dim, bias=x[2], return_gathered=True, world=alone
        )
        for call in (scatter, gather):
            assert torch.autograd.gradcheck(call, (a, b, bias))
            assert torch.autograd.gradgradcheck(call, (a, b, bias))
    for operator in (weft.all_to_all_matmul, weft.matmul_all_to_all):
        exchange = lambda *x, operator=operator: operator(  # noqa: E731
            x[0], [x[1], x[1]], bias=[x[2], x[2]], world=alone
        )
        assert torch.autograd.gradgradcheck(exchange, (a, b, bias))


def test_numeric_gradients():
    on_ranks(gradchecked, 2)


def options(world):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    x, w = leaves(a, b)
    y, g = weft.all_gather_matmul(x, w, return_gathered=True)
    assert torch.equal(g, torch.cat(everyones(a)))
    g.sum().backward()
    assert_same([x.grad], [torch.full_like(a, float(world.ranks))])
    for operator in (weft.all_gather_matmul, weft.matmul_reduce_scatter, weft.matmul_all_reduce):
        with pytest.raises(ValueError, match="out= cannot be recorded"):
            operator(x, w, out=torch.empty(8, 5))
        with torch.no_grad():
            assert not operator(x, w).requires_grad
        (half,) = leaves(a.bfloat16())
        y = operator(half, b.bfloat16(), out_dtype=torch.float32)
        y.sum().backward()
        assert y.dtype == torch.float32
        assert half.grad.dtype == torch.bfloat16
        (x,) = leaves(a)
        packed = weft.pack(b)
        operator(x, packed).sum().backward()
        (again,) = leaves(a)
        operator(again, b).sum().backward()
        assert torch.equal(x.grad, again.grad)


class Nothing(torch.autograd.Function):
    """A function of an unknown gradient, which counts as zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def results_without_a_gradient(world):
    """Nothing is multiplied for results that are not used; a rank without any makes the call for
    its peers.
    """
    x, w = leaves(torch.ones(2, 3), torch.ones(3, 3))
    with patch("torch.eye", side_effect=AssertionError("an identity is multiplied")):
        weft.all_gather_matmul(x, [w, w])[1].sum().backward()
        assert_same([x.grad], [torch.full_like(x, 3.0 * world.ranks)])
        x.grad = None
        weft.all_to_all_matmul(x, w).sum().backward()
        assert_same([x.grad], [torch.full_like(x, 3.0)])
    for operator, wanted in (
        (weft.all_gather_matmul, [[3.0 * (world.ranks - 1)]] * 2),
        (weft.all_to_all_matmul, [[0.0], [3.0]]),
    ):
        x.grad = None
        y = operator(x, w)
        (y if world.rank else Nothing.apply(y)).sum().backward()
        assert_same([x.grad], [torch.tensor(wanted).expand(2, 3)])


def nothing_to_do(world):
    """Tensors without elements have gradients without elements, or of zeros."""
    for rows, k, n in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        for operator in (
            weft.all_gather_matmul,
            weft.matmul_reduce_scatter,
            weft.matmul_all_reduce,
        ):
            a, b = leaves(torch.ones(rows, k), torch.ones(k, n))
            operator(a, b).sum().backward()
            assert a.grad.shape == a.shape
            assert b.grad.shape == b.shape
            assert not rows or n or not a.grad.any()


def packed_weights(world):
    """The gradient goes to the packed tensor, and through its view, in every call; calls that
    record no gradient use the packed weight.
    """
    a, b, c = torch.randn(4, 6).double(), torch.randn(6, 5).double(), torch.randn(6, 5).double()
    for operator in (weft.all_gather_matmul, weft.matmul_reduce_scatter, weft.matmul_all_reduce):
        plain, whole, turned = leaves(b, b, b.t())
        operator(a, plain).sin().sum().backward()
        for weight, packed in ((whole, weft.pack(whole)), (turned, weft.pack(turned.t()))):
            for _ in range(2):
                weight.grad = None
                operator(a, packed).sin().sum().backward()
                assert_same([weight.grad if weight is whole else weight.grad.t()], [plain.grad])
            with torch.no_grad():
                assert not operator(a, packed).requires_grad
    plain, whole, other = leaves(b, b, c)
    weft.all_gather_matmul(a, [other, plain])[1].sin().sum().backward()
    weft.all_gather_matmul(a, [c, weft.pack(whole)])[1].sin().sum().backward()
    assert_same([whole.grad], [plain.grad])


def differentiable(world):
    """Every operator and layer with gradients, and inputs for it."""
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    for operator in (
        weft.all_gather_matmul,
        weft.matmul_reduce_scatter,
        weft.matmul_all_reduce,
        weft.all_to_all_matmul,
        weft.matmul_all_to_all,
        weft.all_to_all_matmul_all_to_all,
    ):
        yield operator, leaves(a, b)
    yield lambda a: weft.all_gather_matmul_reduce_scatter(a, b), leaves(a)
    for sequence_dim in (None, 0):
        yield weft.nn.ColumnParallelLinear(6, 4, sequence_dim=sequence_dim), leaves(a)
        whole = 6 * world.ranks
        yield weft.nn.RowParallelLinear(whole, 4, sequence_dim=sequence_dim), leaves(a)
    for own_tokens in (False, True):
        yield weft.nn.MoE(4, 6, 5, 2, own_tokens=own_tokens), leaves(a)


def checkpointed(world):
    for call, inputs in differentiable(world):
        operands = [*inputs, *(call.parameters() if isinstance(call, nn.Module) else ())]
        plain = torch.autograd.grad(call(*inputs).sin().sum(), operands)
        again = checkpoint(call, *inputs, use_reentrant=False)
        assert_same(torch.autograd.grad(again.sin().sum(), operands), plain)


def everything_else(world):
    for check in (
        twice,
        options,
        packed_weights,
        every_algorithm_has_gradients,
        nothing_to_do,
        checkpointed,
        sums,
        results_without_a_gradient,
    ):
        check(world)


@pytest.mark.data
def test_second_derivatives_checkpoints_options_algorithms_and_empty_tensors():
    on_ranks(everything_else, 2)
