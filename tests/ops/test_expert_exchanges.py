"""Rows that travel to the weights of other ranks, and products that return: sizes that only their
sender knows, gradients, and compiled graphs.
"""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from support.checks.autograd import assert_same, leaves
from support.exchanges import inputs, matrix, of_rank, taken
from support.ranks import on_ranks

import weft
from weft.engines import engine
from weft.ops import driver
from weft.ops.records import AllToAllMatmul, MatmulAllToAll
from weft.schedules.exchanges import Direction


def one_weight(world):
    """A weight that is no list, equal parts without sizes, and results in memory of the caller's."""
    a = torch.arange(8.0).view(4, 2) + 100 * world.rank
    b = torch.tensor([[2.0], [1.0]])
    sent = weft.all_to_all(a)
    for _ in range(3):
        torch.testing.assert_close(weft.all_to_all_matmul(a, b), sent @ b)
        torch.testing.assert_close(weft.matmul_all_to_all(a, b), weft.all_to_all(a @ b))
    out = torch.empty(4, 1)
    assert weft.all_to_all_matmul(a, weft.pack(b), out=out) is out
    torch.testing.assert_close(out, sent @ b)
    assert weft.matmul_all_to_all(a, b, return_split_sizes=True)[1] == [2, 2]
    half = weft.all_to_all_matmul(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    assert half.dtype is torch.float32
    nothing, sizes = weft.all_to_all_matmul(
        a[:0], b, input_split_sizes=[0, 0], return_split_sizes=True
    )
    assert (nothing.shape, sizes) == ((0, 1), [0, 0])
    return weft.explain(a, b, operator="all_to_all_matmul"), weft.explain(
        a, [b, b], operator="matmul_all_to_all", algorithm="by_expert"
    )


def test_a_single_weight():
    for dispatch, back in on_ranks(one_weight, 2):
        assert dispatch.startswith("all_to_all_matmul over 2 ranks: sequential, at most 2 rows")
        assert back.startswith("matmul_all_to_all over 2 ranks: by_expert")


def wrong(world):
    """Every rank raises an error that tells what to do, and the world continues."""
    a, b = torch.ones(4, 2), torch.ones(2, 3)
    expected = [[1, 1], [3, 2]][world.rank]
    with pytest.raises(ValueError, match="rank 1 sends rank 1 3 rows, but rank 1 expects 2 rows"):
        weft.all_to_all_matmul(a, b, input_split_sizes=[1, 3], output_split_sizes=expected)
    bad = {
        "3 rows do not divide evenly over 2 weights": lambda: weft.all_to_all_matmul(a[:3], b),
        "must be 4 sizes each": lambda: weft.matmul_all_to_all(a, [b, b], input_split_sizes=[2, 2]),
        "must add up to 4 rows": lambda: weft.all_to_all_matmul(a, b, input_split_sizes=[1, 2]),
        "have equal columns": lambda: weft.all_to_all_matmul(a, [b, b[:, :2]]),
        "b is an empty list": lambda: weft.matmul_all_to_all(a, []),
        "a must be a matrix": lambda: weft.matmul_all_to_all(a[None], b),
        "split sizes are exchanged by the call": lambda: weft.explain(
            a, b, operator="all_to_all_matmul", input_split_sizes=[2, 2]
        ),
    }
    for message, call in bad.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert weft.all_reduce(torch.ones(1)).item() == 2


def test_bad_arguments():
    on_ranks(wrong, 2)


def sizes_by_the_sender(world):
    """A plain all-to-all whose receivers are not told."""
    for seed in range(3):
        counts = matrix(world.ranks, world.ranks, seed)
        rows = inputs(counts, 2, seed)
        (wanted,) = taken(rows, counts, [world.rank])
        mine = counts[world.rank]
        assert torch.equal(weft.all_to_all(rows[world.rank], input_split_sizes=mine), wanted)
    with pytest.raises(ValueError, match="give output_split_sizes, or call all_to_all"):
        weft.all_to_all_async(torch.ones(world.ranks), input_split_sizes=[1] * world.ranks)


def test_an_all_to_all_whose_receivers_are_not_told():
    on_ranks(sizes_by_the_sender, 3)


def seen_before(world):
    """Sizes that were seen before are found in the call cache, in any order, with new rows."""
    ranks, rank = world.ranks, world.rank
    every = [[[1 + n for n in row] for row in matrix(ranks, ranks, seed, 9)] for seed in range(3)]
    b = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank)).double()

    def calls(seed):
        counts = every[seed % 3]
        rows = inputs(counts, 6, seed)
        (own,) = taken(rows, counts, [rank])
        sent, received = counts[rank], Direction.plain(ranks).received(counts)[rank]
        assert torch.equal(weft.all_to_all(rows[rank], input_split_sizes=sent), own)
        made = weft.all_to_all_matmul(rows[rank], b, input_split_sizes=sent)
        torch.testing.assert_close(made, own @ b)
        there = {"input_split_sizes": received, "output_split_sizes": sent}
        back = weft.matmul_all_to_all(own, torch.eye(6).double(), **there)
        torch.testing.assert_close(back, rows[rank])

    for seed in range(3):
        calls(seed)
    assert not len(engine(world).calls), "sizes that never return are not kept"
    for seed in range(9):
        calls(seed)
    with patch.object(driver, "run", side_effect=AssertionError("it was not cached")):
        for seed in random.Random(0).sample(range(9, 99), 60):
            calls(seed)


def test_sizes_that_were_seen_before():
    on_ranks(seen_before, 2)


def layer(tokens, chosen, share, up, down, division):
    """A mixture of experts, by the operators: this rank has the experts `up` and `down`, of which
    ranks have these numbers.
    """
    top = chosen.shape[1]
    expert, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(expert, minlength=sum(division)).tolist()
    experts = {"experts_of_ranks": division}
    hidden, sizes = weft.all_to_all_matmul(
        tokens[order // top], up, input_split_sizes=counts, return_split_sizes=True, **experts
    )
    back = weft.matmul_all_to_all(
        torch.relu(hidden), down, input_split_sizes=sizes, output_split_sizes=counts, **experts
    )
    slots = torch.empty_like(back).index_copy(0, order, back).view(*chosen.shape, -1)
    return sum(slots[:, j] * share[:, j, None] for j in range(top))


def alone(tokens, chosen, share, up, down):
    """The same in one process with all experts."""
    rows = [
        sum(share[t, j] * (torch.relu(token @ up[e]) @ down[e]) for j, e in enumerate(chosen[t]))
        for t, token in enumerate(tokens)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, down[0].shape[1]).double()


def mixtures(world, division):
    """Layers with random routings, and gradients; the bits are the same in every run."""
    ranks, rank = world.ranks, world.rank
    for seed in range(6):
        numbers = torch.Generator().manual_seed(seed)
        every = sum(division)
        up = [torch.randn(4, 8, generator=numbers).double() for _ in range(every)]
        down = [torch.randn(8, 4, generator=numbers).double() for _ in range(every)]
        tokens = [torch.randn(5 + r, 4, generator=numbers).double() for r in range(ranks)]
        hot = every if seed % 2 else 2  # all tokens for few experts
        chosen = [
            torch.stack([torch.randperm(hot, generator=numbers)[:2] for _ in of]) for of in tokens
        ]
        share = [torch.rand(len(of), 2, generator=numbers).double() for of in tokens]
        # a rank without experts shows their shapes by zeros
        shown = [] if division[rank] else [torch.zeros_like(up[0]), torch.zeros_like(down[0])]
        experts = of_rank(division, rank)
        own = slice(experts.start, experts.stop)
        x, s, *w = leaves(tokens[rank], share[rank], *up[own], *down[own], *shown)
        half = len(w) // 2
        y = layer(x, chosen[rank], s, w[:half], w[half:], division)
        again = layer(x, chosen[rank], s, w[:half], w[half:], division)
        assert torch.equal(y, again)
        y.sin().sum().backward()
        xs, ss = leaves(*tokens), leaves(*share)
        ups, downs = leaves(*up), leaves(*down)
        losses = [
            alone(x_, c, s_, ups, downs).sin().sum()
            for x_, c, s_ in zip(xs, chosen, ss, strict=True)
        ]
        sum(losses).backward()
        torch.testing.assert_close(y, alone(xs[rank], chosen[rank], ss[rank], ups, downs))
        wanted = [xs[rank].grad, ss[rank].grad]
        wanted += [
            each.grad if each.grad is not None else torch.zeros_like(each)
            for each in (*ups[own], *downs[own], *shown)
        ]
        assert_same([each.grad for each in (x, s, *w)], wanted)


@pytest.mark.parametrize("division", [(4,), (2, 2), (2, 0, 1), (0, 3, 0, 1)], ids=str)
def test_a_mixture_of_experts_and_its_gradients(division):
    on_ranks(mixtures, len(division), division)


def both_ways(a, b, c, sent, received, experts, world):
    """There with a product, and back with another."""
    options = {"experts_of_ranks": experts, "world": world}
    hidden = weft.all_to_all_matmul(
        a, b, input_split_sizes=sent, output_split_sizes=received, **options
    )
    return weft.matmul_all_to_all(
        hidden.relu(), c, input_split_sizes=received, output_split_sizes=sent, **options
    )


def compiled(world, experts):
    """Forward and backward in one graph each, as in eager mode; a rank without experts, too."""
    counts = [[2, 1], [0, 3]]
    direction = Direction(experts or (1, 1))
    sent, received = counts[world.rank], direction.received(counts)[world.rank]
    torch.manual_seed(world.rank)
    tensors = [torch.randn(3, 4), torch.randn(4, 5), torch.randn(5, 4)]
    results = []
    for run in (both_ways, torch.compile(both_ways, fullgraph=True, backend="aot_eager")):
        a, b, c = leaves(*tensors)
        several = ([b, b.cos()], [c, c.sin()]) if experts and experts[world.rank] else (b, c)
        y = run(a, *several, sent, received, experts, world)
        y.square().sum().backward()
        results.append([y, a.grad, b.grad, c.grad])
    torch.testing.assert_close(*results)
    a, b, c = leaves(*tensors)
    number = max(1, direction.experts[world.rank])
    given = {"experts_of_ranks": experts, "output_split_sizes": received}
    sizes = AllToAllMatmul(input_split_sizes=sent, keep=True, **given)
    biases = [torch.ones(5)] * number
    torch.library.opcheck(
        torch.ops.weft.all_to_all_matmul.default,
        (a, [b] * number, biases, *sizes, None, world.name),
    )
    given["output_split_sizes"] = sent
    sizes = MatmulAllToAll(input_split_sizes=received, **given)
    rows = torch.randn(sum(received), 4)
    torch.library.opcheck(
        torch.ops.weft.matmul_all_to_all.default, (rows, [b] * number, [], *sizes, None, world.name)
    )
    with pytest.raises(Exception, match="give output_split_sizes"):
        torch.compile(weft.all_to_all_matmul, fullgraph=True, backend="eager")(
            a, b, input_split_sizes=sent
        )


@pytest.mark.parametrize("experts", [None, (0, 2)], ids=str)
def test_compiled_graphs(experts):
    on_ranks(compiled, 2, experts, limit=110)
