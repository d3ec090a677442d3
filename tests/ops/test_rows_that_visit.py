"""Rows that visit the weights of other ranks and return as products: gradients, compiled calls, and
functions as weights. Its products are tested with those of the other operators of experts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.checks.autograd import assert_same, leaves
from support.exchanges import DIVISIONS, inputs, matrix, of_rank, weights
from support.ranks import on_ranks

import weft
from weft.ops.options import Options


def gradients(world, sizes):
    """Those of the rows, whose gradients visit the weights in their turn."""
    rank, every = world.rank, weights(sum(sizes), 1)
    b, bias = zip(*([every[e] for e in of_rank(sizes, rank)] or every[:1]), strict=True)
    for seed, algorithm in product(range(4), ("push", "sequential")):
        counts = matrix(world.ranks, sum(sizes), seed)
        x, other = leaves(*[inputs(counts, 6, seed)[rank]] * 2)
        y = weft.all_to_all_matmul_all_to_all(
            x,
            [*b],
            bias=[*bias],
            input_split_sizes=counts[rank],
            experts_of_ranks=sizes,
            algorithm=algorithm,
            chunk_rows=7,
        )
        parts = zip(other.split(counts[rank]), every, strict=True)
        wanted = torch.cat([part @ w + v for part, (w, v) in parts])
        y.sin().sum().backward()
        wanted.sin().sum().backward()
        assert_same([y, x.grad], [wanted, other.grad])


@pytest.mark.parametrize("sizes", [of for each in DIVISIONS.values() for of in each], ids=str)
def test_gradients_of_rows(sizes):
    on_ranks(gradients, len(sizes), sizes)


def functions(world):
    """Weights that are functions, and gradients that there are not."""

    def product(rows, out):
        torch.sin(rows * (1 + world.rank), out=out)

    weight = weft.weight(product, (3, 3), torch.float32)
    x = torch.randn(8, 3)
    y = weft.all_to_all_matmul_all_to_all(x, weight, input_split_sizes=[3, 5])
    torch.testing.assert_close(y, torch.sin(x * torch.tensor([[1.0]] * 3 + [[2.0]] * 5)))
    with pytest.raises(ValueError, match="no gradient of weights that rows visit"):
        weft.all_to_all_matmul_all_to_all(x, torch.ones(3, 3, requires_grad=True))


def test_a_weight_may_be_any_function():
    on_ranks(functions, 2)


def compiled_visits(world):
    """Shapes do not depend on what arrives, so the receiver's sizes are not needed."""
    sent = [[2, 1], [0, 3]][world.rank]
    experts = (0, 2)
    options = {"input_split_sizes": sent, "experts_of_ranks": experts, "world": world}
    number = max(1, experts[world.rank])

    def call(a, b):
        return weft.all_to_all_matmul_all_to_all(a, [b] * number, **options).relu()

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        (x,) = leaves(a)
        y = run(x, b)
        y.square().sum().backward()
        results.append([y, x.grad])
    torch.testing.assert_close(*results)
    options = Options(input_split_sizes=sent, experts_of_ranks=experts).values()
    torch.library.opcheck(
        torch.ops.weft.all_to_all_matmul_all_to_all.default,
        (a.requires_grad_(), [b] * number, [], *options, world.name),
    )


def test_compiled_visits():
    on_ranks(compiled_visits, 2, limit=110)
