"""Experts on several ranks, their gradients and their compiled calls, against the layer in one
process in float64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.checks.autograd import assert_same, leaves
from support.inductor import QUICK
from support.mixture import Mixture, defined, random
from support.ranks import everyones, on_ranks

import weft
from weft.experts.options import LayerOptions
from weft.schedules.matmul_all_reduce import ALGORITHMS

DIVISIONS = {
    1: [(0, 8)],
    2: [(0, 4, 8), (0, 8, 8), (0, 1, 8)],
    3: [(0, 3, 6, 8), (0, 0, 2, 8)],
    4: [(0, 2, 4, 6, 8), (0, 0, 8, 8, 8)],
}
"""By the number of ranks, the first expert of each, and the end: uneven, and ranks without one."""


def part(mixture: Mixture, division, rank, make=weft.pack_experts, **options):
    first, stop = division[rank : rank + 2]
    return make(*mixture.part(first, stop), first=first, **options)


def random_layers(world):
    """A hundred random routings, by packed experts and by others, the same bits on every rank and
    in every call.
    """
    divisions = DIVISIONS[world.ranks]
    divisions = divisions if world.ranks > 1 else [(0, 8)]
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        tokens = int(torch.randint(0, 40, (), generator=g))
        top = int(torch.randint(1, 5, (), generator=g))
        dtype = (torch.float32, torch.bfloat16, torch.float64)[seed % 3]
        mixture = random(tokens, 33, 20, 8, top, dtype, seed, favoured=4 * (seed % 5 == 0))
        make = (weft.pack_experts, weft.Experts)[seed % 2]
        own = part(mixture, divisions[seed % len(divisions)], world.rank, make)
        found = weft.moe(*mixture[:3], own)
        assert found.dtype == dtype
        expected = defined(*mixture)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(found, weft.moe(*mixture[:3], own))
        if seed < 10:
            assert all(torch.equal(found, other) for other in everyones(found))


@pytest.mark.data
@pytest.mark.parametrize("ranks", [*DIVISIONS])
def test_random_layers(ranks):
    on_ranks(random_layers, ranks)


@pytest.mark.data
def test_two_hosts_of_two_ranks():
    with weft.local_world(4, hosts=(0, 0, 1, 1), timeout=20) as local:
        results = local.run(over_hosts)
    for number, mixture in enumerate(mixtures()):
        for found in results:
            torch.testing.assert_close(
                found[number].double(), defined(*mixture), rtol=1e-5, atol=1e-5
            )
            assert torch.equal(found[number], results[0][number])


def mixtures():
    return [random(tokens, 33, 20, 8, 2, seed=tokens) for tokens in (0, 1, 40, 300)]


def over_hosts():
    rank = weft.init().rank
    return [weft.moe(*mixture[:3], part(mixture, (0, 3, 3, 6, 8), rank)) for mixture in mixtures()]


def every_algorithm(world):
    mixture = random(300, 40, 24, 8, 2)
    own = part(mixture, (0, 3, 8), world.rank)
    expected = defined(*mixture)
    for algorithm, chunk_rows in itertools.product(ALGORITHMS, (None, 7)):
        found = weft.moe(*mixture[:3], own, algorithm=algorithm, chunk_rows=chunk_rows)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.data
def test_every_algorithm():
    on_ranks(every_algorithm, 2)


def parts_of_each_expert(world):
    """Each rank has some of the numbers between the products of all experts."""
    mixture = random(9, 16, 12, 4, 2, torch.float64)
    gate, up = mixture.gate_up.chunk(2, 1)
    own = slice(4 * world.rank, 4 * world.rank + 4)
    experts = weft.pack_experts(
        torch.cat((gate[:, own], up[:, own]), 1), mixture.down[:, :, own], activation="gelu"
    )
    found = weft.moe(*mixture[:3], experts)
    torch.testing.assert_close(found, defined(*mixture, activation="gelu"))


@pytest.mark.data
def test_parts_of_each_expert():
    on_ranks(parts_of_each_expert, 3)


def gradients_of(mixture, layer):
    """The result, and the gradients of all operands but the choices."""
    own = leaves(mixture.x, mixture.scores, mixture.gate_up, mixture.down)
    x, scores, gate_up, down = own
    y = layer(x, mixture.chosen, scores, gate_up, down)
    y.sin().sum().backward()
    return y.detach(), [each.grad for each in own]


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gradients_of_one_rank(activation):
    mixture = random(13, 10, 7, 6, 2, torch.float64, favoured=3)  # three have no token

    def ours(x, chosen, scores, gate_up, down):
        experts = weft.Experts(gate_up, down, first=1, activation=activation)
        return weft.expert_sums(x, chosen, scores, experts)

    mixture = mixture._replace(scores=mixture.scores.double())
    found, grads = gradients_of(mixture, ours)
    expected, wanted = gradients_of(
        mixture, lambda *operands: defined(*operands, first=1, activation=activation)
    )
    assert_same([found, *grads], [expected, *wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_other_dtypes(dtype):
    mixture = random(13, 32, 24, 4, 2, dtype)

    def ours(x, chosen, scores, gate_up, down):
        experts = weft.pack_experts(gate_up, down)  # which have gradients, too
        return weft.expert_sums(x, chosen, scores, experts)

    _, grads = gradients_of(mixture, ours)
    _, wanted = gradients_of(mixture, defined)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for one, other in zip(grads, wanted, strict=True):
        assert one.dtype == other.dtype
        scale = other.double().abs().max().item()
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * scale)


def gradients(world):
    for division in DIVISIONS[world.ranks]:
        mixture = random(13, 10, 7, 8, 2, torch.float64)
        mixture = mixture._replace(scores=mixture.scores.double())
        first, stop = division[world.rank : world.rank + 2]

        def ours(x, chosen, scores, gate_up, down, first=first, stop=stop):
            experts = weft.Experts(gate_up[first:stop], down[first:stop], first=first)
            return weft.moe(x, chosen, scores, experts)

        y, (for_x, for_scores, *for_own) = gradients_of(mixture, ours)
        expected, (of_x, of_scores, *of_all) = gradients_of(mixture, defined)
        assert_same([y, for_x, for_scores], [expected, of_x, of_scores])
        for found, whole in zip(for_own, of_all, strict=True):
            assert_same([found[first:stop]], [whole[first:stop]])


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients(ranks):
    on_ranks(gradients, ranks)


def operators(world):
    mixture = random(5, 8, 6, 4, 2)
    for grad in (False, True):
        x, scores, gate_up, down = (
            each.clone().requires_grad_(grad)
            for each in (mixture.x, mixture.scores, mixture.gate_up, mixture.down)
        )
        operands = x, mixture.chosen, scores, gate_up, down, 0, "silu"
        torch.library.opcheck(torch.ops.weft.expert_sums.default, operands)
        torch.library.opcheck(torch.ops.weft.moe.default, (*operands, *LayerOptions(), world.name))


def test_torch_accepts_the_operators():
    on_ranks(operators, 2, limit=110)


def compiled(world):
    mixture = random(5, 8, 6, 4, 2, torch.float64)
    mixture = mixture._replace(scores=mixture.scores.double())
    first = 2 * world.rank

    def layer(x, chosen, scores, gate_up, down):
        experts = weft.Experts(gate_up, down, first=first)
        return weft.moe(x, chosen, scores, experts) + weft.expert_sums(x, chosen, scores, experts)

    def of_own(x, chosen, scores, gate_up, down, run=layer):
        return run(x, chosen, scores, gate_up[first : first + 2], down[first : first + 2])

    for record in (False, True):
        torch.compiler.reset()
        graph = torch.compile(layer, fullgraph=True, options=QUICK)
        with torch.set_grad_enabled(record):
            if not record:
                found, expected = (of_own(*mixture, run=run) for run in (graph, layer))
                torch.testing.assert_close(found, expected)
                continue
            found, grads = gradients_of(mixture, lambda *each: of_own(*each, run=graph))  # noqa: B023
            expected, wanted = gradients_of(mixture, of_own)
            assert_same([found, *grads], [expected, *wanted])


@pytest.mark.data
def test_compiled():
    on_ranks(compiled, 2, limit=110)
