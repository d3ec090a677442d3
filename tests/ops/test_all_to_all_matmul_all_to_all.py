"""all_to_all_matmul_all_to_all: gradients, compiled calls, and functions as weights. Its products
are tested with those of the other operators of experts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.checks.autograd import assert_same, leaves
from support.exchanges import DIVISIONS, inputs, matrix, of_rank, weights
from support.ranks import on_ranks

import weft
from weft.ops.records import AllToAllMatmulAllToAll


def gradients(world, sizes, of_rows, of_weights, of_biases, dtype=torch.float64, tolerance=0):
    """The gradients of the sum of all ranks' losses: of rows, and of weights and biases, for which
    rows are dispatched once more.
    """
    rank, own = world.rank, of_rank(sizes, world.rank)
    every = [(b.to(dtype), v.to(dtype)) for b, v in weights(sum(sizes), 1)]
    for seed, algorithm in product(range(4), ("push", "sequential", "auto")):
        many = 40 + 160 * (seed % 2)  # so many that gradients come in pieces
        counts = matrix(world.ranks, sum(sizes), seed, many)
        rows = [a.to(dtype) for a in inputs(counts, 6, seed)]
        shown = [] if own else [tuple(map(torch.zeros_like, every[0]))]
        b, v = zip(*every[own.start : own.stop], *shown, strict=True)
        (x,) = leaves(rows[rank]) if of_rows else (rows[rank],)
        b, v = leaves(*b) if of_weights else b, leaves(*v) if of_biases else v
        y = weft.all_to_all_matmul_all_to_all(
            x,
            [*b],
            bias=[*v],
            input_split_sizes=counts[rank],
            experts_of_ranks=sizes,
            algorithm=algorithm,
            chunk_rows=7,
        )
        y.double().sin().sum().backward()
        xs = leaves(*[a.double() for a in rows])
        ws, vs = (leaves(*[each.double() for each in of]) for of in zip(*every, strict=True))
        results = [
            torch.cat([x_ @ w + v_ for x_, w, v_ in zip(a.split(row), ws, vs, strict=True)])
            for a, row in zip(xs, counts, strict=True)
        ]
        sum(each.sin().sum() for each in results).backward()
        mine = slice(own.start, own.stop)
        wanted = [results[rank].detach(), *[xs[rank].grad] * of_rows]
        wanted += [each.grad for each in ws[mine]] * of_weights
        wanted += [each.grad for each in vs[mine]] * of_biases
        found = [y, *[x.grad] * of_rows]
        for number, tensors in ((of_weights, b), (of_biases, v)):
            found += [each.grad for each in tensors[: len(own)]] * number
            assert own or not number or not tensors[0].grad.any()  # nothing has transposed it
        if not tolerance:
            assert_same(found, wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype is dtype
            scale = tolerance * other.abs().max().item() if other.numel() else 0
            if tolerance:
                torch.testing.assert_close(one.double(), other, rtol=0, atol=scale)


@pytest.mark.data
@pytest.mark.parametrize("sizes", [of for each in DIVISIONS.values() for of in each], ids=str)
def test_gradients(sizes):
    on_ranks(gradients, len(sizes), sizes, True, True, True)


@pytest.mark.data
@pytest.mark.parametrize("of", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)], ids=str)
def test_gradients_of_some(of):
    on_ranks(gradients, 3, (1, 0, 2), *of)


@pytest.mark.data
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),
        pytest.param(torch.bfloat16, 3e-2, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_other_dtypes(dtype, tolerance):
    on_ranks(gradients, 2, (1, 2), 1, 1, 1, dtype, tolerance)


def functions(world):
    """Weights that are functions of rows, which have no gradient."""

    def product(rows, out):
        torch.sin(rows * (1 + world.rank), out=out)

    weight = weft.weight(product, (3, 3), torch.float32)
    x = torch.randn(8, 3)
    y = weft.all_to_all_matmul_all_to_all(x, weight, input_split_sizes=[3, 5])
    torch.testing.assert_close(y, torch.sin(x * torch.tensor([[1.0]] * 3 + [[2.0]] * 5)))
    with pytest.raises(ValueError, match="has no gradient and cannot be compiled"):
        weft.all_to_all_matmul_all_to_all(x.requires_grad_(), weight, input_split_sizes=[3, 5])


def test_a_weight_may_be_any_function():
    on_ranks(functions, 2)


def compiled_visits(world):
    """Shapes do not depend on what arrives, so the receiver's sizes are not needed."""
    sent = [[2, 1], [0, 3]][world.rank]
    experts = (0, 2)
    options = {"input_split_sizes": sent, "experts_of_ranks": experts, "world": world}
    number = max(1, experts[world.rank])

    def call(a, b, v):
        b, v = [b, b.cos()][:number], [v, v.sin()][:number]
        return weft.all_to_all_matmul_all_to_all(a, b, bias=v, **options).relu()

    tensors = [torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)]
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        operands = leaves(*tensors)
        y = run(*operands)
        y.square().sum().backward()
        results.append([y, *(each.grad for each in operands)])
    torch.testing.assert_close(*results)
    a, b, v = leaves(*tensors)
    choices = AllToAllMatmulAllToAll(input_split_sizes=sent, experts_of_ranks=experts)
    torch.library.opcheck(
        torch.ops.weft.all_to_all_matmul_all_to_all.default,
        (a, [b] * number, [v] * number, *choices, None, world.name),
    )
    torch.library.opcheck(
        torch.ops.weft.round_trip_gradients.default,
        (
            torch.randn(3, 5),
            a.detach(),
            [b.detach()] * number,
            sent,
            experts,
            None,
            world.name,
        ),
    )


def test_compiled_visits():
    on_ranks(compiled_visits, 2, limit=110)
