"""The exact bits of sums over ranks: the order of the terms, and the roundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

FUSED = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
)
"""Dtypes of the factors and of the result."""


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of several magnitudes, so that most sums are rounded, and differently in another
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator)
        * 2.0 ** torch.randint(-4, 5, shape, generator=generator)
    ).to(dtype)


def products(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``a @ b`` for one column of a and one row of b, rounded like a product: to bfloat16 if the
    output is.
    """
    exact = a.double() * b.double()
    return exact.to(torch.bfloat16 if a.dtype == out_dtype == torch.bfloat16 else wide(a.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of this dtype are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum in this order, not yet rounded."""
    return reduce(torch.add, [term.to(wide(term.dtype)) for term in terms])


def terms(parts: Sequence[Tensor], hosts: Sequence[int], keeper: int) -> list[list[Tensor]]:
    """The terms of the sum that `keeper` keeps, by host: its own host's parts, and for each other
    host the rounded sum of its parts.
    """
    found = []
    for host in dict.fromkeys(hosts):
        own = [part for part, its in zip(parts, hosts, strict=True) if its == host]
        found.append(
            own if hosts[keeper] == host or len(own) == 1 else [added(own).to(own[0].dtype)]
        )
    return found


def once(
    parts: Sequence[Tensor], hosts: Sequence[int], keeper: int, out_dtype: torch.dtype
) -> Tensor:
    """The sum of all terms, rounded once."""
    return added([term for own in terms(parts, hosts, keeper) for term in own]).to(out_dtype)


def at_every_host(
    parts: Sequence[Tensor], hosts: Sequence[int], keeper: int, out_dtype: torch.dtype
) -> Tensor:
    """The sum that passes from host to host, rounded to `out_dtype` each time."""
    first, *others = terms(parts, hosts, keeper)
    return reduce(
        lambda running, own: added([running, *own]).to(out_dtype),
        others,
        added(first).to(out_dtype),
    )


def around(
    parts: Sequence[Tensor], hosts: Sequence[int], keeper: int, out_dtype: torch.dtype
) -> Tensor:
    """The sum that passes from rank to rank, beginning after the keeper and ending with it, rounded
    each time.
    """
    order = [(keeper + step) % len(parts) for step in range(1, len(parts) + 1)]
    return at_every_host([parts[rank] for rank in order], range(len(parts)), 0, out_dtype)


Sum = Callable[[Sequence[Tensor], Sequence[int], int, torch.dtype], Tensor]


def blocks(
    how: Sum,
    parts: Sequence[Tensor],
    hosts: Sequence[int],
    kept: Sequence[int],
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """The sums that the ranks keep, of `kept` rows each."""
    split = [part.split([*kept]) for part in parts]
    return [
        how([of_rank[keeper] for of_rank in split], hosts, keeper, out_dtype)
        for keeper in range(len(kept))
    ]
