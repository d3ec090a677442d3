"""A layer of experts whose tokens are each on one rank, its gradients and its compiled calls,
against float64.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.checks.autograd import assert_same, leaves
from support.inductor import QUICK
from support.mixture import ALGORITHMS, check_algorithms, defined, of_rank, part, random
from support.ranks import on_ranks

import weft
from weft.engines import engine
from weft.experts import dispatch
from weft.experts.options import LayerOptions
from weft.ops.call import Selection

DIVISIONS = {1: [(8,)], 2: [(4, 4), (8, 0), (1, 7)], 3: [(3, 3, 2), (0, 2, 6)], 4: [(0, 0, 8, 0)]}
"""By the number of ranks, the experts of each: uneven, and ranks without one."""


def test_rows_of_tokens():
    """A row for each token and rank, ordered by rank, and in each by token."""
    chosen = torch.tensor([[0, 5], [4, 3], [9, -1], [5, 4], [2, 0]])
    here = (0,) * 4
    found = dispatch.find(chosen, [3, 0, 1, 2], here)  # experts 0 to 2, none, 3, 4 and 5
    assert found.counts == [2, 0, 1, 3]
    assert found.tokens.flatten().tolist() == [0, 4, 1, 0, 1, 3]
    assert found.places.tolist() == [[0, 3], [2, 4], [-1, -1], [5, -1], [1, -1]]
    assert (
        dispatch.find(chosen.int().t().contiguous().t(), [3, 0, 1, 2], here).counts == found.counts
    )
    rows = torch.tensor([[1.0], [2], [4], [8], [16], [32]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sums = dispatch.combine(rows.to(dtype), found)
        assert sums.flatten().tolist() == [9, 20, 0, 32, 2]
        assert sums.dtype is dtype
    nothing = dispatch.find(chosen[:0], [6], (0,))
    assert (nothing.counts, len(nothing.tokens), len(nothing.places)) == ([0], 0, 0)


def random_layers(world, number):
    """Random routings, by packed experts and by others, the same bits in every call."""
    ranks, rank = world.ranks, world.rank
    for seed in range(number):
        g = torch.Generator().manual_seed(seed)
        tokens = int(torch.randint(0, 60, (), generator=g))
        top = int(torch.randint(1, 5, (), generator=g))
        dtype = (torch.float32, torch.bfloat16, torch.float64, torch.float16)[seed % 4]
        mixture = random(tokens, 33, 20, 8, top, dtype, seed, favoured=4 * (seed % 5 == 0))
        own = of_rank(mixture, rank, ranks)
        sizes = DIVISIONS[ranks][seed % len(DIVISIONS[ranks])]
        make = (weft.pack_experts, weft.Experts)[seed % 2]
        options = {"experts_of_ranks": sizes, "algorithm": ALGORITHMS[seed % 5]}
        experts = part(mixture, sizes, rank, make)
        found = weft.moe(*own[:3], experts, **options)
        assert found.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 3e-2)
        torch.testing.assert_close(found.double(), defined(*own), rtol=tolerance, atol=tolerance)
        assert torch.equal(found, weft.moe(*own[:3], experts, **options))


@pytest.mark.data
@pytest.mark.parametrize("ranks", [*DIVISIONS])
def test_random_layers(ranks):
    on_ranks(random_layers, ranks, 100 if ranks < 3 else 40)


def layers_over_hosts(sizes):
    world = weft.init()
    for tokens, dtype in product((0, 3, 300), (torch.float32, torch.bfloat16)):
        check_algorithms(world, random(tokens, 33, 20, 8, 3, dtype, seed=tokens), sizes)
    gradients(world, torch.float64, 1e-12)
    return True


@pytest.mark.data
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((0, 0, 1, 1), marks=pytest.mark.slow),
        (0, 1, 0, 1),
        pytest.param((0, 0, 0, 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hosts_of_two_ranks(hosts):
    with weft.local_world(4, hosts=hosts, timeout=100) as local:
        assert local.run(lambda: layers_over_hosts((3, 0, 3, 2))) == [True] * 4


def measured(world):
    """The first calls of a class take all ways; then one is selected, with the same bits."""
    rank, sizes = world.rank, [4] * world.ranks
    mixture = random(400 * world.ranks, 33, 20, 4 * world.ranks, 2)
    own = slice(400 * rank, 400 * (rank + 1))
    tokens = mixture.x[own], mixture.chosen[own], mixture.scores[own]
    experts, selections = part(mixture, sizes, rank), engine(world).selections
    first = weft.moe(*tokens, experts, experts_of_ranks=sizes)
    (trial,) = selections.values()
    for _ in range(200):
        if isinstance(*selections.values(), Selection):
            break
        assert torch.equal(weft.moe(*tokens, experts, experts_of_ranks=sizes), first)
    (selection,) = selections.values()
    tried = {variant.algorithm for variant in trial.candidates}
    assert tried == {"push", "sequential", "shared", "gathered"}
    assert selection.variant in trial.candidates
    for _ in range(3):  # also from the call cache
        assert torch.equal(weft.moe(*tokens, experts, experts_of_ranks=sizes), first)
    return True


def test_auto_measures_all_ways():
    on_ranks(measured, 2)
    with weft.local_world(4, hosts=(0, 0, 1, 1), timeout=100) as local:
        assert local.run(lambda: measured(weft.init())) == [True] * 4


def gradients(world, dtype, tolerance):
    """Those of the sum of all ranks' losses."""
    ranks, rank = world.ranks, world.rank
    for seed, (sizes, algorithm) in enumerate(product(DIVISIONS[ranks], ("push", "shared"))):
        mixture = random(23, 11, 7, 8, 2, dtype, seed, favoured=5 * (seed % 2))
        mixture = mixture._replace(scores=mixture.scores.double())
        own, first = of_rank(mixture, rank, ranks), sum(sizes[:rank])
        mine = slice(first, first + sizes[rank])
        x, scores, gate_up, down = leaves(
            own.x, own.scores, mixture.gate_up[mine], mixture.down[mine]
        )
        experts = weft.Experts(gate_up, down, first=first)
        y = weft.moe(x, own.chosen, scores, experts, experts_of_ranks=sizes, algorithm=algorithm)
        y.double().sin().sum().backward()
        every = leaves(mixture.x, mixture.scores, mixture.gate_up, mixture.down)
        wanted = defined(every[0], mixture.chosen, *every[1:])
        wanted.sin().sum().backward()
        at = slice(*[len(mixture.x) * n * n // ranks**2 for n in (rank, rank + 1)])
        of_x, of_scores, of_gate_up, of_down = (each.grad for each in every)
        found = [x.grad, scores.grad, gate_up.grad, down.grad]
        expected = [of_x[at], of_scores[at], of_gate_up[mine], of_down[mine]]
        if dtype == torch.float64:
            assert_same([y, *found], [wanted[at], *expected])
        for one, other in zip(found, expected, strict=True):
            scale = max(other.double().abs().max().item(), 1e-3) if other.numel() else 0
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients(ranks):
    on_ranks(gradients, ranks, torch.float64, 1e-12)


@pytest.mark.data
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_other_dtypes(dtype):
    on_ranks(gradients, 2, dtype, 1e-5 if dtype == torch.float32 else 4e-2)


def compiled(world):
    mixture = random(10, 8, 6, 4, 2, torch.float64)
    mixture = mixture._replace(scores=mixture.scores.double())
    own, first, sizes = of_rank(mixture, world.rank, 2), 2 * world.rank, [2, 2]

    def layer(x, scores, gate_up, down):
        experts = weft.Experts(gate_up, down, first=first)
        return weft.moe(x, own.chosen, scores, experts, experts_of_ranks=sizes)

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, options=QUICK)):
        tensors = leaves(own.x, own.scores, *mixture.part(first, first + 2))
        y = run(*tensors)
        y.sin().sum().backward()
        results.append([y, *(each.grad for each in tensors)])
    assert_same(*results)
    x, scores, gate_up, down = tensors
    operands = x, own.chosen, scores, gate_up, down, first, "silu"
    options = LayerOptions(experts_of_ranks=sizes)
    torch.library.opcheck(torch.ops.weft.moe.default, (*operands, *options, world.name))


@pytest.mark.data
def test_compiled():
    on_ranks(compiled, 2, limit=110)


def wrong(world):
    mixture = random(4, 8, 6, 4, 2)
    experts = part(mixture, (2, 2), world.rank)
    for sizes, message in {
        (4,): "must be 2 numbers",
        (5, -1): "none negative",
        (1, 3): f"gives rank {world.rank} {1 + 2 * world.rank} experts from number {world.rank} on",
    }.items():
        with pytest.raises(ValueError, match=message):
            weft.moe(*mixture[:3], experts, experts_of_ranks=sizes)
    with pytest.raises(ValueError, match="'ring'; choose auto or one of push, sequential, shared"):
        weft.moe(*mixture[:3], experts, experts_of_ranks=[2, 2], algorithm="ring")
    assert weft.all_reduce(torch.ones(1)).item() == 2


def test_wrong_sizes():
    on_ranks(wrong, 2)
