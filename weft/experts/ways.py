"""The ways of tokens to the experts that they chose: rows visit each rank, or each host, that has
such experts. An algorithm belongs to one of them; by ``auto`` both are measured, each in its
algorithms.

The ways are operators, which take other rows of the same tokens. The numbers of both are exchanged
at once, so that all ranks know the class of a call before they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.experts.options import LayerOptions
from weft.experts.visits import Visits, add_up, find
from weft.kernels.weights import Weight
from weft.ops import all_gather_matmul_reduce_scatter as to_hosts
from weft.ops import all_to_all_matmul_all_to_all as to_ranks
from weft.ops import driver, split_sizes
from weft.ops.autotune import select
from weft.ops.call import Choice, Selection
from weft.ops.fused import SAME_BITS, FusedCall
from weft.ops.operator import FusedOperator
from weft.ops.options import Operands, made
from weft.ops.records import Exchanged
from weft.schedules.exchanges import Counts, ToAll
from weft.schedules.peers import one_rank_per_host
from weft.schedules.workload import Variant, Workload, size_class
from weft.world import World

LAYER = "moe"
"""The name of the layer, in stored measurements and errors."""


class Rows(NamedTuple):
    """The rows of tokens with their companions, which `of_tokens` makes of the numbers of tokens,
    and the weight of this rank.
    """

    of_tokens: Callable[[Tensor], tuple[Tensor, ...]]
    weight: Weight
    out_dtype: torch.dtype


class Way(NamedTuple):
    """A way: an operator, this rank's visits, and the numbers of all ranks' rows for each part,
    which is a rank, or a host.
    """

    operator: FusedOperator
    visits: Visits
    counts: Counts = ()

    @property
    def algorithms(self) -> tuple[str, ...]:
        return self.operator.schedule.algorithms

    @property
    def largest(self) -> tuple[int, ...]:
        """The most rows that each rank gives to one part."""
        return tuple(map(max, self.counts))


class Ways(Choice):
    """The choice among ways, of which the first is the rule's; of one for an algorithm that the
    caller asks for.
    """

    def __init__(
        self, ways: Sequence[Way], rows: Rows, options: LayerOptions, world: World
    ) -> None:
        super().__init__(world, options.timeout)
        self.ways, self.rows, self.options = ways, rows, options
        self.row_limit = options.chunk_rows
        self._given, self._calls = dict[str, tuple[Tensor, ...]](), dict[str, FusedCall]()

    def way(self, algorithm: str) -> Way:
        """The way that has an algorithm."""
        return next(way for way in self.ways if algorithm in way.algorithms)

    def given(self, way: Way) -> tuple[Tensor, ...]:
        """This rank's rows and their companions, made at the first use."""
        name = way.operator.name
        if name not in self._given:
            self._given[name] = self.rows.of_tokens(way.visits.tokens)
        return self._given[name]

    def call(self, way: Way) -> FusedCall:
        """The checked call of a way."""
        name = way.operator.name
        if name not in self._calls:
            options = made(
                way.operator.options,
                out_dtype=self.rows.out_dtype,
                algorithm=self.options.algorithm,
                chunk_rows=self.options.chunk_rows,
                input_split_sizes=Exchanged(way.counts, (), False),
            )
            rows, *companions = self.given(way)
            operands = Operands(rows, [self.rows.weight], [None], [None])
            call = way.operator.checked(self.world, operands, options, companions)
            self._calls[name] = call
            call.timeout = self.timeout
        return self._calls[name]

    @property
    def own_class(self) -> Workload:
        (k, n), dtype = self.rows.weight.shape, dtype_name(self.rows.weight.dtype)
        first = self.ways[0].largest
        return Workload(LAYER, first, k, n, dtype, dtype_name(self.rows.out_dtype), symmetric=False)

    @property
    def similar(self) -> Workload | None:
        own, asked = self.own_class, self.options.algorithm != "auto"
        if asked or not max(own.rows) or torch.are_deterministic_algorithms_enabled():
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
        each = "host" if way.operator is to_hosts.OPERATOR else "rank"
        return f"rows visit each {each}, {way.operator.name} by {self.call(way).cut(variant)}"


def visit(chosen: Tensor, rows: Rows, options: LayerOptions, world: World) -> Tensor:
    """What the weights of all ranks contribute to each token; collective. ``auto`` takes the way
    and the algorithm that were measured to be the fastest.
    """
    found = _ways(chosen, options, world)
    numbers = [count for way in found for count in way.visits.counts]
    to_all, timeout = ToAll(len(numbers)), options.timeout
    given = split_sizes.exchange(world, LAYER, to_all, numbers, None, timeout=timeout)
    choice = Ways(_with_counts(found, given.counts), rows, options, world)
    with torch.no_grad():
        asked, key = options.algorithm, None
        selection = select(choice) if asked == "auto" else None
        variant = None if selection is None else selection.variant
        way = choice.way(asked if variant is None else variant.algorithm)
        if given.again and (selection is None or selection.trial is None):
            choices = rows.out_dtype, asked, variant, options.chunk_rows, way.counts
            key = way.operator.check, choices, choice.given(way), None, (rows.weight,), (None,)
            if (cached := driver.repeat(key, world, timeout)) is not None:
                return add_up(cached, way.visits)
        selection = selection or choice.rule()
        (back,) = driver.selected(choice.call(way), selection, choice, key)
        return add_up(back, way.visits)


def alike(chosen: Tensor, rows: Rows, options: LayerOptions, world: World) -> Ways:
    """The choice of a call in which all ranks have as many rows as this one; nothing is sent."""
    found = _ways(chosen, options, world)
    numbers = [count for way in found for count in way.visits.counts]
    return Ways(_with_counts(found, (numbers,) * world.ranks), rows, options, world)


def _ways(chosen: Tensor, options: LayerOptions, world: World) -> list[Way]:
    """The ways that have an algorithm, with this rank's visits; by ``auto`` all that differ."""
    algorithm, sizes, hosts = options.algorithm, options.experts_of_ranks, world.hosts
    assert sizes is not None
    operators = [to_ranks.OPERATOR, to_hosts.OPERATOR]
    auto = algorithm == "auto"
    if auto and one_rank_per_host(hosts):  # both are the same then
        operators = operators[:1]
    found = [
        Way(operator, find(chosen, sizes, hosts, operator is to_hosts.OPERATOR))
        for operator in operators
        if auto or algorithm in operator.schedule.algorithms
    ]
    if not found:
        names = [name for operator in operators for name in operator.schedule.algorithms]
        raise ValueError(
            f"there is no algorithm {algorithm!r}; choose auto or one of {', '.join(names)}, for "
            "tokens that each rank has of its own"
        )
    return found


def _with_counts(ways: Sequence[Way], counts: Counts) -> list[Way]:
    """The ways with the numbers of all ranks' rows, which ranks give one way after the other."""
    ends = [0, *accumulate(len(way.visits.counts) for way in ways)]
    return [
        way._replace(counts=tuple(tuple(row[start:stop]) for row in counts))
        for way, (start, stop) in zip(ways, pairwise(ends), strict=True)
    ]
