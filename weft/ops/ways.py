"""The ways of tokens to the experts that they chose: rows visit each rank, or each host, that has
such experts. By ``auto`` both are measured, each in its algorithms.

The ways are operators, which take other rows of the same tokens. The numbers of both are exchanged
at once, so that all ranks know the class of a call before they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.kernels.weights import Weight
from weft.ops import all_gather_matmul_reduce_scatter as to_hosts
from weft.ops import all_to_all_matmul_all_to_all as to_ranks
from weft.ops import driver, split_sizes
from weft.ops.autotune import select
from weft.ops.call import Choice, Selection
from weft.ops.fused import SAME_BITS, FusedCall
from weft.ops.operator import FusedOperator
from weft.ops.options import Operands, Options
from weft.ops.split_sizes import Exchanged
from weft.ops.visits import Visits, add_up, find
from weft.schedules.exchanges import Counts, ToAll
from weft.schedules.peers import one_rank_per_host
from weft.schedules.workload import Variant, Workload, size_class
from weft.world import World

LAYER = "moe"
"""The name of the layer, in stored measurements and errors."""


class Rows(NamedTuple):
    """The rows of tokens, which `of_tokens` makes of their numbers, and the weight of this rank."""

    of_tokens: Callable[[Tensor], Tensor]
    weight: Weight
    out_dtype: torch.dtype


class Way(NamedTuple):
    """A way: an operator, its `check`, this rank's visits, and the numbers of all ranks' rows for
    each rank, or host.
    """

    operator: FusedOperator
    check: Callable[[World, Operands, Options, Exchanged], FusedCall]
    visits: Visits
    counts: Counts

    @property
    def algorithms(self) -> tuple[str, ...]:
        return self.operator.schedule.algorithms

    @property
    def largest(self) -> tuple[int, ...]:
        """The most rows that each rank gives to one rank, or host."""
        return tuple(map(max, self.counts))


class Ways(Choice):
    """The choice among ways, of which the first is the rule's."""

    def __init__(
        self,
        ways: Sequence[Way],
        rows: Rows,
        chunk_rows: int | None,
        world: World,
        timeout: float | None,
    ) -> None:
        super().__init__(world, timeout)
        self.ways, self.rows, self.row_limit = ways, rows, chunk_rows
        self._given, self._calls = dict[str, Tensor](), dict[str, FusedCall]()

    def way(self, algorithm: str) -> Way:
        """The way that has an algorithm."""
        return next(way for way in self.ways if algorithm in way.algorithms)

    def given(self, way: Way) -> Tensor:
        """This rank's rows, made at the first use."""
        name = way.operator.name
        if name not in self._given:
            self._given[name] = self.rows.of_tokens(way.visits.tokens)
        return self._given[name]

    def call(self, way: Way) -> FusedCall:
        """The checked call of a way."""
        name = way.operator.name
        if name not in self._calls:
            options = Options(
                out_dtype=self.rows.out_dtype,
                chunk_rows=self.row_limit,
                timeout=self.timeout,
                input_split_sizes=way.visits.counts,
            )
            operands = Operands(self.given(way), [self.rows.weight], [None], [None])
            exchanged = Exchanged(way.counts, (), False)
            self._calls[name] = way.check(self.world, operands, options, exchanged)
        return self._calls[name]

    @property
    def own_class(self) -> Workload:
        (k, n), dtype = self.rows.weight.shape, dtype_name(self.rows.weight.dtype)
        first = self.ways[0].largest
        return Workload(LAYER, first, k, n, dtype, dtype_name(self.rows.out_dtype), symmetric=False)

    @property
    def similar(self) -> Workload | None:
        own = self.own_class
        if not max(own.rows) or torch.are_deterministic_algorithms_enabled():
            return None
        rows = max(own.rows) if self.row_limit is not None else size_class(max(own.rows))
        return own._replace(rows=(rows,) * self.world.ranks)

    @property
    def description(self) -> str:
        rows, columns = [*map(sum, self.ways[0].counts)], self.rows.weight.shape[0]
        return f"{LAYER}({rows} rows x {columns} {dtype_name(self.rows.weight.dtype)})"

    @property
    def work(self) -> int:
        return sum(map(sum, self.ways[0].counts)) * max(1, self.rows.weight.shape[1])

    def rule(self) -> Selection:
        return self.call(self.ways[0]).rule()

    def candidates(self, first: Variant) -> list[Variant]:
        found = self.call(self.ways[0]).candidates(first)
        if len(found) > 1:
            for way in self.ways[1:]:
                call = self.call(way)
                found += call.candidates(call.rule().variant)
        return found

    def possible(self, algorithm: str) -> bool:
        return any(
            algorithm in way.algorithms and self.call(way).possible(algorithm) for way in self.ways
        )

    def comparable(self, variants: Sequence[Variant]) -> bool:
        least = min(min(way.largest) for way in self.ways)
        return all(least >= SAME_BITS * variant.pieces for variant in variants)

    def cut(self, variant: Variant) -> str:
        way = self.way(variant.algorithm)
        return f"{way.operator.name} by {self.call(way).cut(variant)}"


def fastest(
    chosen: Tensor,
    sizes: Sequence[int],
    rows: Rows,
    chunk_rows: int | None,
    world: World,
    timeout: float | None,
) -> Tensor:
    """What the weights of all ranks contribute to each token, by the way and the algorithm that
    were measured to be the fastest; collective.
    """
    of = find(chosen, sizes, world.hosts), find(chosen, sizes, world.hosts, for_hosts=True)
    ranks = world.ranks
    numbers = [count for visits in of for count in visits.counts]
    given = split_sizes.exchange(world, LAYER, ToAll(len(numbers)), numbers, None, timeout=timeout)
    ways = [
        Way(to_ranks.OPERATOR, to_ranks.check, of[0], tuple(row[:ranks] for row in given.counts)),
        Way(to_hosts.OPERATOR, to_hosts.check, of[1], tuple(row[ranks:] for row in given.counts)),
    ]
    if one_rank_per_host(world.hosts):  # both are the same then
        ways.pop()
    choice = Ways(ways, rows, chunk_rows, world, timeout)
    selection = select(choice)
    way, key = choice.way(selection.variant.algorithm), None
    if given.again and selection.trial is None:
        options = rows.out_dtype, selection.variant, chunk_rows, way.counts
        key = way.check, options, choice.given(way), None, (rows.weight,), (None,)
        if (cached := driver.repeat(key, world, timeout)) is not None:
            return add_up(cached, way.visits)
    (back,) = driver.selected(choice.call(way), selection, choice, key)
    return add_up(back, way.visits)
