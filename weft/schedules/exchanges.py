"""The blocks of rows that ranks send to the weights of other ranks, and of products that return.

Each rank has a number of weights, its *experts*, which are numbered rank by rank; a rank may have
none. The rows of rank s for expert e are a shard: the block names are (source, expert, piece). A
rank gives its rows in the order of the experts, and receives rows by expert, those of one from all
ranks side by side. Products return in the reverse direction, so one plan receives what the other
gives.

If the sizes are even, every rank gives an expert as many rows, and the shards are those of the
experts; else the shards are the numbers of a matrix of counts, with a row for what each rank gives,
which ranks exchange first (`weft.plan.sized`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from weft.plan import Buffer, Plan, Region, Value
from weft.plan.lazy import Deferred
from weft.schedules.lanes import Lanes, by_rank
from weft.schedules.workload import Request


@dataclass(frozen=True)
class Blocks:
    """The places of blocks in the buffers of an exchange: `given` rows, in the order of the ranks
    that take them, and `taken` ones, by the weight that multiplies them.

    `experts` has the number of each rank.
    """

    experts: tuple[int, ...]
    pieces: int
    uneven: bool

    @classmethod
    def of(cls, request: Request) -> Blocks:
        """The blocks of a request, of which a push alone cuts shards. Ranks with other numbers of
        experts give uneven parts.
        """
        experts = request.experts or (1,) * request.ranks
        pieces = request.pieces if request.algorithm == "push" else 1
        return cls(experts, pieces, request.uneven or len({*experts}) > 1)

    @property
    def ranks(self) -> int:
        return len(self.experts)

    @cached_property
    def firsts(self) -> Sequence[int]:
        """The number of the first expert of each rank, and of all experts."""
        return [0, *accumulate(self.experts)]

    @property
    def shards(self) -> tuple[int, ...]:
        """The pieces of each shard."""
        return (self.pieces,) * (self.firsts[-1] * (self.ranks if self.uneven else 1))

    @property
    def examples(self) -> Sequence[int]:
        """Ranks that together do what any rank does, if there are different ones: two that have
        experts, and one that has none.
        """
        if len({*self.experts}) == 1:
            return ()
        some = [rank for rank, number in enumerate(self.experts) if number]
        none = [rank for rank, number in enumerate(self.experts) if not number]
        return [*some[:2], *none[:1]]

    def of_rank(self, rank: int) -> range:
        """The numbers of a rank's experts among these."""
        return range(self.experts[rank])

    def alone(self, rank: int) -> bool:
        """Whether no other rank has experts."""
        return self.experts[rank] == self.firsts[-1]

    def by_target(self, owner: int, target: int, expert: int) -> int:
        """The shard of rows that `owner` gives in the order of their experts."""
        before = owner * self.firsts[-1] if self.uneven else 0
        return before + self.firsts[target] + expert

    def by_expert(self, owner: int, target: int, expert: int) -> int:
        """The shard of products that `owner` gives by the experts that have made them."""
        before = self.firsts[owner] * self.ranks if self.uneven else 0
        return before + expert * self.ranks + target

    def given(self, rank: int) -> list[int]:
        """The numbers of all blocks that a rank gives in the order of their experts."""
        return self.numbers(
            self.by_target(rank, target, expert)
            for target in range(self.ranks)
            for expert in self.of_rank(target)
        )

    def taken(self, rank: int) -> list[int]:
        """The numbers of all blocks that a rank's experts take, by expert."""
        return self.numbers(
            self.by_target(source, rank, expert)
            for expert in self.of_rank(rank)
            for source in range(self.ranks)
        )

    def made(self, rank: int) -> list[int]:
        """The numbers of all blocks that a rank's experts make, by expert."""
        return self.numbers(
            self.by_expert(rank, target, expert)
            for expert in self.of_rank(rank)
            for target in range(self.ranks)
        )

    def returned(self, rank: int) -> list[int]:
        """The numbers of all blocks that return to a rank, in the order of their experts."""
        return self.numbers(
            self.by_expert(owner, rank, expert)
            for owner in range(self.ranks)
            for expert in self.of_rank(owner)
        )

    def numbers(self, shards: Iterable[int]) -> list[int]:
        """The numbers of all blocks of shards."""
        return [shard * self.pieces + piece for shard in shards for piece in range(self.pieces)]

    def targets_first(
        self, rank: int, buffer: str, peer: int, expert: int, start: int = 0, stop: int = -1
    ) -> Region:
        """Pieces in a buffer in the order of all experts, of which `peer` has `expert`."""
        return self._region(rank, buffer, self.firsts[peer] + expert, start, stop)

    def experts_first(
        self, rank: int, buffer: str, peer: int, expert: int, start: int = 0, stop: int = -1
    ) -> Region:
        """Pieces in a buffer in the order of a rank's experts, in each in that of the ranks."""
        return self._region(rank, buffer, expert * self.ranks + peer, start, stop)

    def of_peer(self, rank: int, buffer: str, peer: int) -> Region:
        """All blocks of the experts of `peer` in a buffer in the order of all experts."""
        first, end = self.firsts[peer : peer + 2]
        return Region(rank, buffer, first * self.pieces, end * self.pieces)

    def of_expert(self, rank: int, buffer: str, expert: int) -> Region:
        """All blocks of one of a rank's experts in a buffer in the order of these."""
        size = self.ranks * self.pieces
        return Region(rank, buffer, expert * size, (expert + 1) * size)

    def _region(self, rank: int, buffer: str, place: int, start: int, stop: int) -> Region:
        first = place * self.pieces
        return Region(rank, buffer, first + start, first + (self.pieces if stop < 0 else stop))


class Batch(NamedTuple):
    """Pieces of the rows of a `peer` for an `expert` of a rank, which it multiplies together."""

    peer: int
    expert: int
    start: int = 0
    stop: int = -1


def halves(pieces: int) -> list[tuple[int, int]]:
    """Half of the pieces, then half of the rest, …: few products, of which only the last waits for
    a single piece.
    """
    cuts = []
    start = 0
    while start < pieces:
        stop = start + (pieces - start + 1) // 2
        cuts.append((start, stop))
        start = stop
    return cuts


def weight(buffer: str, expert: int) -> str:
    """The name of the weight of one of a rank's experts; the first has that of a `buffer`."""
    return f"{buffer}{expert or ''}"


def names(buffer: str, weights: int) -> tuple[str, ...]:
    """The names of a rank's weights."""
    return tuple(weight(buffer, expert) for expert in range(weights))


def exchange(
    operator: str,
    request: Request,
    of: Blocks,
    lanes: Callable[[int], Lanes],
    buffers: Mapping[str, Buffer],
    result: Callable[[], Iterable[tuple[Region, Value]]],
) -> Plan:
    """The plan of an exchange of these blocks, from the lanes of each rank."""
    # all ranks of one host do the same
    determined = request if request.hosts is None else None
    every = by_rank(of.ranks, lanes, determined, of.examples)
    promised = Deferred(lambda: dict(result()))
    return Plan(operator, request.algorithm, buffers, every, promised, of.shards)


Counts = Sequence[Sequence[int]]
"""A matrix of numbers of rows, with a row of each rank."""


class Direction(NamedTuple):
    """The direction in which rows travel between ranks that have these numbers of `experts`: to
    them, or `back`.
    """

    experts: tuple[int, ...]
    back: bool = False

    @classmethod
    def plain(cls, ranks: int) -> Direction:
        """A part for each rank."""
        return cls((1,) * ranks)

    @property
    def most(self) -> int:
        """The most parts that a rank gives or receives."""
        return len(self.experts) * max(self.experts)

    @property
    def options(self) -> str:
        """The options that differ from one part per rank, as text."""
        plain = self.experts == Direction.plain(len(self.experts)).experts
        return "" if plain else f"(experts_of_ranks={[*self.experts]})"

    def parts(self, rank: int) -> tuple[int, int]:
        """The numbers of parts that a rank gives, and that it receives."""
        of_all, of_own = sum(self.experts), len(self.experts) * self.experts[rank]
        return (of_own, of_all) if self.back else (of_all, of_own)

    def received(self, counts: Counts) -> list[list[int]]:
        """What each rank receives, in its order, of what every rank gives: to each of all experts,
        or by its own experts and in each by rank.
        """
        ranks = range(len(self.experts))
        firsts = [0, *accumulate(self.experts)]
        if self.back:
            return [
                [
                    row[expert * len(ranks) + rank]
                    for row, number in zip(counts, self.experts, strict=True)
                    for expert in range(number)
                ]
                for rank in ranks
            ]
        return [
            [row[expert] for expert in range(firsts[rank], firsts[rank + 1]) for row in counts]
            for rank in ranks
        ]


class ToAll(NamedTuple):
    """At most `most` numbers of each rank, all-gathered."""

    most: int

    @property
    def options(self) -> str:
        return ""

    def parts(self, rank: int) -> tuple[int, int]:
        return self.most, 0

    def received(self, counts: Counts) -> list[list[int]]:
        return [[] for _ in counts]
