"""Rows that visit the weights of other ranks and return as products: the operator, its gradient and
its compiled calls, against float64.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.checks.autograd import leaves
from support.ranks import on_ranks, reference_world, stream_world

import weft
from weft.ops.options import Options

ALGORITHMS = ("auto", "push", "sequential")


def visited(world, experts, hosts=None):
    """Rows multiplied by the weights of other ranks, in other numbers each time."""
    ranks, rank = world.ranks, world.rank
    for seed, algorithm in product(range(4), ALGORITHMS):
        g = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 40, (ranks, ranks * experts), generator=g)
        counts[:, :: 1 + seed] *= seed % 2  # idle weights, and ranks without a row
        sent = counts[rank].tolist()
        rows = [torch.randn(int(n.sum()), 6, generator=g).double() for n in counts]
        weights = [torch.randn(6, 5, generator=g).double() for _ in range(ranks * experts)]
        biases = [torch.randn(5, generator=g).double() for _ in weights]
        own = slice(rank * experts, (rank + 1) * experts)
        x, other = leaves(rows[rank], rows[rank])
        y = weft.all_to_all_matmul_all_to_all(
            x if seed % 2 else x.detach(),
            weights[own],
            bias=biases[own],
            input_split_sizes=sent,
            algorithm=algorithm,
            chunk_rows=7,
        )
        parts = zip(other.split(sent), weights, biases, strict=True)
        wanted = torch.cat([part @ b + bias for part, b, bias in parts])
        torch.testing.assert_close(y, wanted)
        if seed % 2:
            y.sin().sum().backward()
            wanted.sin().sum().backward()
            torch.testing.assert_close(x.grad, other.grad)
    even = torch.ones(ranks * experts, 6).double()
    assert len(weft.all_to_all_matmul_all_to_all(even, weights[own])) == len(even)
    return True


@pytest.mark.parametrize(("ranks", "experts"), [(1, 2), (2, 1), (3, 2)])
def test_rows_visit_other_ranks(ranks, experts):
    on_ranks(visited, ranks, experts)


@pytest.mark.parametrize("context", [stream_world, reference_world])
def test_in_other_engines(context):
    on_ranks(visited, 2, 2, context=context)


def test_between_hosts():
    with weft.local_world(3, hosts=[0, 0, 1]) as local:
        assert local.run(lambda: visited(weft.init(), 2)) == [True] * 3


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

    def call(a, b):
        return weft.all_to_all_matmul_all_to_all(a, b, input_split_sizes=sent, world=world).relu()

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        (x,) = leaves(a)
        y = run(x, b)
        y.square().sum().backward()
        results.append([y, x.grad])
    torch.testing.assert_close(*results)
    options = Options(input_split_sizes=sent).values()
    torch.library.opcheck(
        torch.ops.weft.all_to_all_matmul_all_to_all.default,
        (a.requires_grad_(), [b], [], *options, world.name),
    )


def test_compiled_visits():
    on_ranks(compiled_visits, 2, limit=110)
