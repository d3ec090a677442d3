"""The blocks of rows that ranks send to the weights of other ranks, and of products that return.

Each rank has as many weights, its *experts*, numbered over all ranks. The rows of rank s for expert
e are a shard: the block names are (source, expert, piece). A rank gives its rows in the order of
the experts, and receives rows by expert, those of one from all ranks side by side. Products return
the way that rows came, so what one plan receives is what the other gives.

If the sizes are `even`, every rank gives an expert as many rows, and the shards are those of the
experts; else the number of rows of shard (s, e) is number e of row s of a matrix of counts, which
ranks exchange first (`weft.plan.sized`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.plan import Region
from weft.schedules.workload import Request


class Blocks(NamedTuple):
    """The places of blocks in the buffers of an exchange: `given` rows, in the order of the ranks
    that take them, and `taken` ones, by the weight that multiplies them.
    """

    ranks: int
    experts: int
    """Of a rank."""
    pieces: int
    uneven: bool

    @classmethod
    def of(cls, request: Request) -> Blocks:
        """The blocks of a request."""
        return cls(request.ranks, request.weights, request.pieces, request.uneven)

    @property
    def shards(self) -> tuple[int, ...]:
        """The pieces of each shard."""
        return (self.pieces,) * (self.wide * (self.ranks if self.uneven else 1))

    @property
    def wide(self) -> int:
        """The shards of a rank: the numbers of a row of the matrix."""
        return self.ranks * self.experts

    def by_target(self, owner: int, target: int, expert: int) -> int:
        """The shard of rows that `owner` gives in the order of their experts."""
        return target * self.experts + expert + self._first(owner)

    def by_expert(self, owner: int, target: int, expert: int) -> int:
        """The shard of products that `owner` gives by the experts that have made them."""
        return expert * self.ranks + target + self._first(owner)

    def _first(self, owner: int) -> int:
        return owner * self.wide if self.uneven else 0

    def numbers(self, shards: Sequence[int]) -> list[int]:
        """The numbers of all blocks of shards."""
        return [shard * self.pieces + piece for shard in shards for piece in range(self.pieces)]

    def targets_first(
        self, rank: int, buffer: str, peer: int, expert: int, start: int = 0, stop: int = -1
    ) -> Region:
        """Pieces in a buffer in the order of all experts, of which `peer` has `expert`."""
        return self._region(rank, buffer, peer * self.experts + expert, start, stop)

    def experts_first(
        self, rank: int, buffer: str, peer: int, expert: int, start: int = 0, stop: int = -1
    ) -> Region:
        """Pieces in a buffer in the order of a rank's experts, in each in that of the ranks."""
        return self._region(rank, buffer, expert * self.ranks + peer, start, stop)

    def of_peer(self, rank: int, buffer: str, peer: int) -> Region:
        """All blocks of the experts of `peer` in a buffer in the order of all experts."""
        size = self.experts * self.pieces
        return Region(rank, buffer, peer * size, (peer + 1) * size)

    def of_expert(self, rank: int, buffer: str, expert: int) -> Region:
        """All blocks of one of a rank's experts in a buffer in the order of these."""
        size = self.ranks * self.pieces
        return Region(rank, buffer, expert * size, (expert + 1) * size)

    def _region(self, rank: int, buffer: str, place: int, start: int, stop: int) -> Region:
        first = place * self.pieces
        return Region(rank, buffer, first + start, first + (self.pieces if stop < 0 else stop))


def names(buffer: str, weights: int) -> tuple[str, ...]:
    """The names of a rank's weights, of which the first has that of a `buffer`."""
    return (buffer, *(f"{buffer}{i}" for i in range(1, weights)))


Counts = Sequence[Sequence[int]]
"""A matrix of numbers of rows, with a row of each rank."""


def dispatched(counts: Counts, experts: int = 1) -> list[list[int]]:
    """What each rank receives, by its experts and in each by the rank that gives, of what every
    rank gives to each of all experts.
    """
    ranks = range(len(counts))
    return [
        [row[rank * experts + expert] for expert in range(experts) for row in counts]
        for rank in ranks
    ]


def returned(counts: Counts, experts: int = 1) -> list[list[int]]:
    """The inverse of `dispatched`: what each rank gets back from each of all experts, of what every
    rank gives by its experts, in each by rank.
    """
    ranks = len(counts)
    return [
        [row[expert * ranks + rank] for row in counts for expert in range(experts)]
        for rank in range(ranks)
    ]
