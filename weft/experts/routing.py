"""The experts that tokens chose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from weft.experts.weights import Experts


def by_expert(experts: Experts, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The experts that tokens chose, in order: the number of each among `experts`, its tokens, and
    the places of these choices in `chosen` (tokens, top), flattened.
    """
    numbers, order = chosen.reshape(-1).sort(stable=True)
    tokens = order // max(chosen.shape[1], 1)
    found, counts = numbers.unique_consecutive(return_counts=True)
    start = 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        own, stop = number - experts.first, start + count
        if 0 <= own < experts.shape.number:
            yield own, tokens[start:stop], order[start:stop]
        start = stop
