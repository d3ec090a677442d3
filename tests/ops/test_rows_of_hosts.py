"""Rows that all ranks of a host multiply and that return as sums: the operator, its gradient, its
compiled calls and its errors, against float64.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.checks.autograd import leaves
from support.ranks import on_ranks, reference_world, stream_world

import weft
from weft.ops.records import AllGatherMatmulReduceScatter

ALGORITHMS = ("auto", "shared", "gathered")


def summed(world):
    """Rows of every rank for every host, in other numbers each time."""
    hosts, rank = world.hosts, world.rank
    for seed, algorithm in product(range(4), ALGORITHMS):
        g = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 40, (world.ranks, hosts.number), generator=g)
        counts[:: 1 + seed] *= seed % 2  # ranks without a row
        sent = counts[rank].tolist()
        rows = [torch.randn(int(n.sum()), 6, generator=g).double() for n in counts]
        weights = [torch.randn(6, 5, generator=g).double() for _ in hosts]
        x, other = leaves(rows[rank], rows[rank])
        y = weft.all_gather_matmul_reduce_scatter(
            x if seed % 2 else x.detach(),
            weights[rank],
            input_split_sizes=sent,
            algorithm=algorithm,
            chunk_rows=7,
        )
        parts = enumerate(other.split(sent))
        wanted = torch.cat(
            [
                sum(part @ b for b, of in zip(weights, hosts, strict=True) if of == host)
                for host, part in parts
            ]
        )
        torch.testing.assert_close(y, wanted)
        if seed % 2:
            y.sin().sum().backward()
            wanted.sin().sum().backward()
            torch.testing.assert_close(x.grad, other.grad)
    even = torch.ones(3 * hosts.number, 6).double()
    (b,) = leaves(torch.ones(6, 5).double())
    y = weft.all_gather_matmul_reduce_scatter(even, b.detach())
    assert torch.equal(y[0], torch.full((5,), 6.0 * hosts.count(0)).double())
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_one_host(ranks):
    on_ranks(summed, ranks)


@pytest.mark.parametrize("context", [stream_world, reference_world])
def test_in_other_engines(context):
    on_ranks(summed, 2, context=context)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 0, 1)], ids=str)
def test_between_hosts(hosts):
    with weft.local_world(len(hosts), hosts=hosts) as local:
        assert local.run(lambda: summed(weft.init())) == [True] * len(hosts)


def over_an_emulated_link(world):
    """Ranks read no peer's memory: by what is refused, and by what auto takes."""
    world.emulate_link(10)
    x, rows = torch.randn(200, 16), torch.randn(200, 16)
    b = torch.randn(16, 8)
    with pytest.raises(ValueError, match="shared moves no rows"):
        weft.all_gather_matmul_reduce_scatter(x, b, algorithm="shared")
    for algorithm in ("auto", "gathered"):
        every = weft.all_gather(b)
        y = weft.all_gather_matmul_reduce_scatter(rows, b, algorithm=algorithm)
        torch.testing.assert_close(y, sum(rows @ each for each in every.split(16)))


def test_over_an_emulated_link():
    on_ranks(over_an_emulated_link, 2)


def wrong(world):
    a, b = torch.ones(4, 3), torch.ones(3, 2)
    for options, message in (
        ({"input_split_sizes": [2, 2]}, "must be 1 sizes each"),
        ({"input_split_sizes": [3]}, "must add up to 4 rows"),
        ({"algorithm": "push"}, "push"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.all_gather_matmul_reduce_scatter(a, b, **options)
    with pytest.raises(ValueError, match="there is no gradient of a weight"):
        weft.all_gather_matmul_reduce_scatter(a, b.requires_grad_())
    assert weft.all_reduce(torch.ones(1)).item() == 2


def test_what_is_refused():
    on_ranks(wrong, 2)


def compiled(world):
    sent = [3 - world.rank]

    def call(a, b):
        return weft.all_gather_matmul_reduce_scatter(
            a, b, input_split_sizes=sent, world=world
        ).relu()

    a, b = torch.randn(sent[0], 4), torch.randn(4, 5)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        (x,) = leaves(a)
        y = run(x, b)
        y.square().sum().backward()
        results.append([y, x.grad])
    torch.testing.assert_close(*results)
    options = AllGatherMatmulReduceScatter(input_split_sizes=sent)
    torch.library.opcheck(
        torch.ops.weft.all_gather_matmul_reduce_scatter.default,
        (a.requires_grad_(), [b], [], *options, None, world.name),
    )


def test_compiled():
    on_ranks(compiled, 2, limit=110)
