"""Tokens, choices and scores of any strides, also of no tokens, on one rank alone; and the time
limit of recorded calls.
"""

from __future__ import annotations

import threading

import pytest
import torch
from support.mixture import ALGORITHMS, part, random
from support.public_calls import LAYOUTS

import weft

SIZES = [3, 1]


def strided(operands, layout, at):
    """Operands of which those at these places have a layout."""
    return [LAYOUTS[layout](each) if n in at else each for n, each in enumerate(operands)]


@pytest.fixture(scope="module")
def local():
    with weft.local_world(2) as made:
        yield made


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("tokens", [0, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_layers_of_any_layout(local, algorithm, dtype, tokens, recorded):
    """With None every rank has the same tokens, else each has its own."""
    mixture = random(tokens, 6, 4, 4, 2, dtype)
    options = {} if algorithm is None else {"experts_of_ranks": SIZES, "algorithm": algorithm}

    def layer(given):
        rank = weft.init().rank
        own = part(mixture, SIZES, rank, weft.Experts)
        x, chosen, scores = (each.detach() for each in given)
        made = weft.moe(x.requires_grad_(recorded), chosen, scores, own, **options)
        if recorded:
            made.sin().sum().backward()
            return made.detach(), x.grad
        return (made,)

    for layout in LAYOUTS:
        for at in ((0,), (1,), (2,), (0, 1, 2)):

            def both(layout=layout, at=at):
                mine = strided(mixture[:3], layout, at)
                if weft.init().rank:
                    mine = [each.contiguous() for each in mine]
                expected = layer([each.contiguous() for each in mine])
                return zip(layer(mine), expected, strict=True)

            for pairs in local.run(both):
                for made, wanted in pairs:
                    torch.testing.assert_close(made, wanted, msg=f"{layout} of {at}")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [None, SIZES])
def test_a_recorded_call_has_its_own_time_limit(sizes, backward):
    """Rank 1 is late for the call, or for its backward pass."""

    def late():
        world = weft.init()
        mixture = random(6, 6, 4, 4, 2)
        own = part(mixture, SIZES, world.rank, weft.Experts)
        x, chosen, scores = mixture[:3]
        if world.rank == 0 or backward:
            options = {"experts_of_ranks": sizes, "timeout": 60.0 if world.rank else 0.25}
            made = weft.moe(x.requires_grad_(), chosen, scores, own, **options)
            if world.rank == 0:
                made.sum().backward()
        while not world.mesh.failure()[0]:
            threading.Event().wait(0.01)

    with (
        weft.local_world(2, timeout=60) as local,
        pytest.raises(weft.PeerTimeout, match=r"rank 0 waited 0\.25 s .* rank 1 \(pid"),
    ):
        local.run(late)
