"""A mixture of experts by its definition, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft
from weft.experts.methods import ACTIVATIONS
from weft.experts.packed import PackedExperts
from weft.kernels import half


class Mixture(NamedTuple):
    """The operands of a layer: those of all ranks' experts."""

    x: Tensor
    chosen: Tensor
    scores: Tensor
    gate_up: Tensor
    down: Tensor

    def part(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """The weights of some experts."""
        return self.gate_up[first:stop], self.down[first:stop]


def random(
    tokens: int,
    width: int,
    inner: int,
    experts: int,
    top: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    favoured: int = 0,
) -> Mixture:
    """A layer whose tokens choose different experts at random, or, if some are `favoured`, only the
    first ones.
    """
    g = torch.Generator().manual_seed(seed)
    among = favoured or experts
    chosen = torch.stack(
        [torch.randperm(among, generator=g)[:top] for _ in range(tokens)]
        or [torch.empty(top, dtype=torch.int64)]
    )[:tokens]
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return Mixture(
        draw(tokens, width).to(dtype),
        chosen,
        draw(tokens, top).softmax(-1),
        (draw(experts, 2 * inner, width) / max(width, 1) ** 0.5).to(dtype),
        (draw(experts, width, inner) / max(inner, 1) ** 0.5).to(dtype),
    )


def defined(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first: int = 0,
    activation: str = "silu",
    magnitude: Callable[[Tensor], Tensor] = torch.positive,
) -> Tensor:
    """The layer token by token, in float64; of `torch.abs`, the magnitudes of its summands added
    up, to which rounding errors are proportional, as sums may cancel.
    """
    x, scores, gate_up, down = (each.double() for each in (x, scores, gate_up, down))
    rows = []
    for token, numbers, factors in zip(x, chosen.tolist(), scores, strict=True):
        row = token * 0
        for number, factor in zip(numbers, factors, strict=True):
            if 0 <= number - first < len(gate_up):
                gate, up = (gate_up[number - first] @ token).chunk(2)
                hidden = ACTIVATIONS[activation](gate) * up
                row = row + factor * (magnitude(down[number - first]) @ magnitude(hidden))
        rows.append(row)
    return torch.stack(rows) if rows else x.clone()


def of_rank(mixture: Mixture, rank: int, ranks: int) -> Mixture:
    """The tokens of a rank, of which ranks have different numbers."""
    own = slice(*[len(mixture.x) * at * at // ranks**2 for at in (rank, rank + 1)])
    return mixture._replace(
        x=mixture.x[own], chosen=mixture.chosen[own], scores=mixture.scores[own]
    )


def part(
    mixture: Mixture,
    sizes: Sequence[int],
    rank: int,
    make: Callable[..., weft.Experts] = weft.pack_experts,
    **options: Any,
) -> weft.Experts:
    """A rank's experts, of ranks with these numbers of them; packed ones by weft's own call, whose
    bits for a token do not depend on the number of rows.
    """
    first = sum(sizes[:rank])
    experts = make(*mixture.part(first, first + sizes[rank]), first=first, **options)
    if isinstance(experts, PackedExperts) and experts.dtype != torch.float64 and half.COLUMNS:
        experts.method = "native"
    return experts


ALGORITHMS = ("auto", "push", "sequential", "shared", "gathered")
"""Of a layer whose tokens are each on one rank."""


def check_algorithms(world: weft.World, mixture: Mixture, sizes: Sequence[int]) -> None:
    """Each algorithm is near float64, and all add up in one order, within hosts and then over them:
    the same bits.
    """
    own, experts = of_rank(mixture, world.rank, world.ranks), part(mixture, sizes, world.rank)
    once, *others = (
        weft.moe(*own[:3], experts, experts_of_ranks=sizes, algorithm=algorithm, world=world)
        for algorithm in ALGORITHMS
    )
    tolerance = 1e-5 if once.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(once.double(), defined(*own), rtol=tolerance, atol=tolerance)
    assert all(torch.equal(each, once) for each in others)
