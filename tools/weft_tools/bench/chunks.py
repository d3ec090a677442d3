"""Baselines that overlap by hand: torch's collectives in chunks, in the background of ``torch.mm``
on other chunks.

Shards are equal, since the collectives take equal ones; each is cut into `CHUNKS` parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft_tools.bench.baselines import Group, collective, products

CHUNKS = 4


def all_gather_matmul(
    a: Tensor, b: Tensor, out: Tensor, ranks: int, group: Group = None, bias: Tensor | None = None
) -> Callable[[], Tensor]:
    """All chunks of the shards are sent at once, and multiplied by `b` as they arrive, plus the
    bias.
    """
    gathers, multiplies = [], []
    shards = out.view(ranks, len(a), -1)
    for part, results in zip(a.tensor_split(CHUNKS), shards.tensor_split(CHUNKS, 1), strict=True):
        gathered = part.new_empty(ranks, *part.shape)
        gathers.append(
            collective("all_gather", part, gathered.flatten(0, 1), group=group, background=True)
        )
        multiplies.append(products([*zip(gathered, results, strict=True)], b, bias))

    def call() -> Tensor:
        works = [gather() for gather in gathers]
        for work, multiply in zip(works, multiplies, strict=True):
            _wait(work)
            multiply()
        return out

    return call


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, out: Tensor, ranks: int, group: Group = None
) -> Callable[[], Tensor]:
    """The products of a chunk of each rank's shard are added up while the next ones are made."""
    multiplies, scatters = [], []
    shards = a.view(ranks, len(out), -1)
    for rows, total in zip(shards.tensor_split(CHUNKS, 1), out.tensor_split(CHUNKS), strict=True):
        made = out.new_empty(ranks, *total.shape)
        multiplies.append(products([*zip(rows, made, strict=True)], b))
        scatters.append(
            collective("reduce_scatter", made.flatten(0, 1), total, group=group, background=True)
        )
    return _one_behind_the_other(multiplies, scatters, out)


def matmul_all_reduce(
    a: Tensor, b: Tensor, out: Tensor, group: Group = None
) -> Callable[[], Tensor]:
    """The products of a chunk are added up while the next ones are made."""
    chunks = [*zip(a.tensor_split(CHUNKS), out.tensor_split(CHUNKS), strict=True)]
    multiplies = [products([chunk], b) for chunk in chunks]
    reduces = [
        collective("all_reduce", total, total, group=group, background=True) for _, total in chunks
    ]
    return _one_behind_the_other(multiplies, reduces, out)


def _one_behind_the_other(
    multiplies: list[Callable[[], None]], sums: list[Callable[..., object]], out: Tensor
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        works = []
        for multiply, add in zip(multiplies, sums, strict=True):
            multiply()
            works.append(add())
        for work in works:
            _wait(work)
        return out

    return call


def _wait(work: Any) -> None:
    """Wait for a work, on a GPU on the current stream; a single rank has none."""
    if not isinstance(work, Tensor):
        work.wait()
