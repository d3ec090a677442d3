"""Rows for the experts of ranks: random numbers of them, and what each expert takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

Counts = Sequence[Sequence[int]]

DIVISIONS = {1: [(2,)], 2: [(1, 1), (2, 2), (0, 3)], 3: [(2, 2, 2), (1, 0, 2)], 4: [(0, 2, 0, 1)]}
"""By the number of ranks, the experts of each: as many, others, and none."""


def matrix(ranks: int, experts: int, seed: int, most: int = 40) -> list[list[int]]:
    """What every rank gives to each of all experts: random, with empty parts, idle experts, and
    sometimes a rank without rows.
    """
    dice = random.Random(seed)
    row = [dice.choice([0, 1, most]) for _ in range(experts)]
    idle = dice.randrange(2 * ranks)
    return [[dice.randint(0, limit) * (rank != idle) for limit in row] for rank in range(ranks)]


def inputs(counts: Counts, k: int, seed: int) -> list[Tensor]:
    """All ranks' rows."""
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(row), k, generator=numbers).double() for row in counts]


def weights(experts: int, seed: int, k: int = 6, n: int = 5) -> list[tuple[Tensor, Tensor]]:
    """The weight and the bias of each of all experts."""
    numbers = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(k, n, generator=numbers).double(), torch.randn(n, generator=numbers).double())
        for _ in range(experts)
    ]


def of_rank(sizes: Sequence[int], rank: int) -> range:
    """The numbers of a rank's experts among all."""
    first = sum(sizes[:rank])
    return range(first, first + sizes[rank])


def taken(rows: Sequence[Tensor], counts: Counts, experts: Sequence[int]) -> list[Tensor]:
    """The rows for each of these experts, in the order in which they arrive."""
    parts = [a.split([*row]) for a, row in zip(rows, counts, strict=True)]
    return [torch.cat([of[expert] for of in parts]) for expert in experts]
