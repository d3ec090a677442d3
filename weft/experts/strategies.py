"""Routing strategies: tokens are dispatched to the ranks of their experts, or to the hosts. Every
algorithm belongs to one strategy; ``auto`` measures both, each with its algorithms.

The strategies are operators that take different rows of the same tokens. The row counts of both are
exchanged together, so that all ranks know the class of a call before they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.experts.dispatch import Dispatch, combine, find
from weft.experts.options import LayerOptions
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
    """This rank's weight, and the rows to dispatch: `of_tokens` returns the rows of these tokens
    and their companions.
    """

    of_tokens: Callable[[Tensor], tuple[Tensor, ...]]
    weight: Weight
    out_dtype: torch.dtype


class Strategy(NamedTuple):
    """A routing strategy: an operator, this rank's dispatch, and all ranks' row counts for each
    destination, a rank or a host.
    """

    operator: FusedOperator
    dispatch: Dispatch
    counts: Counts = ()

    @property
    def algorithms(self) -> tuple[str, ...]:
        return self.operator.schedule.algorithms

    @property
    def largest(self) -> tuple[int, ...]:
        """The most rows that each rank sends to one destination."""
        return tuple(map(max, self.counts))


class Strategies(Choice):
    """The choice among strategies, of which the rule takes the first; there is one if the caller
    asks for an algorithm.
    """

    def __init__(
        self, strategies: Sequence[Strategy], rows: Rows, options: LayerOptions, world: World
    ) -> None:
        super().__init__(world, options.timeout)
        self.strategies, self.rows, self.options = strategies, rows, options
        self.row_limit = options.chunk_rows
        self._given, self._calls = dict[str, tuple[Tensor, ...]](), dict[str, FusedCall]()

    def strategy(self, algorithm: str) -> Strategy:
        """The strategy that has an algorithm."""
        return next(strategy for strategy in self.strategies if algorithm in strategy.algorithms)

    def given(self, strategy: Strategy) -> tuple[Tensor, ...]:
        """This rank's rows and their companions, made at the first use."""
        name = strategy.operator.name
        if name not in self._given:
            self._given[name] = self.rows.of_tokens(strategy.dispatch.tokens)
        return self._given[name]

    def call(self, strategy: Strategy) -> FusedCall:
        """The checked call of a strategy."""
        name = strategy.operator.name
        if name not in self._calls:
            options = made(
                strategy.operator.options,
                out_dtype=self.rows.out_dtype,
                algorithm=self.options.algorithm,
                chunk_rows=self.options.chunk_rows,
                input_split_sizes=Exchanged(strategy.counts, (), False),
            )
            rows, *companions = self.given(strategy)
            operands = Operands(rows, [self.rows.weight], [None], [None])
            call = strategy.operator.checked(self.world, operands, options, companions)
            self._calls[name] = call
            call.timeout = self.timeout
        return self._calls[name]

    @property
    def own_class(self) -> Workload:
        (k, n), dtype = self.rows.weight.shape, dtype_name(self.rows.weight.dtype)
        first = self.strategies[0].largest
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
        rows, columns = [*map(sum, self.strategies[0].counts)], self.rows.weight.shape[0]
        return f"{LAYER}({rows} rows x {columns} {dtype_name(self.rows.weight.dtype)})"

    @property
    def work(self) -> int:
        return sum(map(sum, self.strategies[0].counts)) * max(1, self.rows.weight.shape[1])

    def rule(self) -> Selection:
        return self.call(self.strategies[0]).rule()

    def candidates(self, first: Variant) -> list[Variant]:
        found = self.call(self.strategies[0]).candidates(first)
        if len(found) > 1:
            for strategy in self.strategies[1:]:
                call = self.call(strategy)
                found += call.candidates(call.rule().variant)
        return found

    def possible(self, algorithm: str) -> bool:
        return any(
            algorithm in strategy.algorithms and self.call(strategy).possible(algorithm)
            for strategy in self.strategies
        )

    def comparable(self, variants: Sequence[Variant]) -> bool:
        least = min(min(strategy.largest) for strategy in self.strategies)
        return all(least >= SAME_BITS * variant.pieces for variant in variants)

    def cut(self, variant: Variant) -> str:
        strategy = self.strategy(variant.algorithm)
        each = "host" if strategy.operator is to_hosts.OPERATOR else "rank"
        by = f"{strategy.operator.name} by {self.call(strategy).cut(variant)}"
        return f"rows are dispatched to each {each}, {by}"


def dispatch_and_combine(chosen: Tensor, rows: Rows, options: LayerOptions, world: World) -> Tensor:
    """Dispatch rows to the weights and combine the results for each token; collective. ``auto``
    takes the strategy and the algorithm that were measured to be the fastest.
    """
    found = _strategies(chosen, options, world)
    numbers = [count for strategy in found for count in strategy.dispatch.counts]
    to_all, timeout = ToAll(len(numbers)), options.timeout
    given = split_sizes.exchange(world, LAYER, to_all, numbers, None, timeout=timeout)
    choice = Strategies(_with_counts(found, given.counts), rows, options, world)
    with torch.no_grad():
        asked, key = options.algorithm, None
        selection = select(choice) if asked == "auto" else None
        variant = None if selection is None else selection.variant
        strategy = choice.strategy(asked if variant is None else variant.algorithm)
        if given.again and (selection is None or selection.trial is None):
            choices = rows.out_dtype, asked, variant, options.chunk_rows, strategy.counts
            operands = choice.given(strategy), None, (rows.weight,), (None,)
            key = strategy.operator.check, choices, *operands
            if (cached := driver.repeat(key, world, timeout)) is not None:
                return combine(cached, strategy.dispatch)
        selection = selection or choice.rule()
        (back,) = driver.selected(choice.call(strategy), selection, choice, key)
        return combine(back, strategy.dispatch)


def alike(chosen: Tensor, rows: Rows, options: LayerOptions, world: World) -> Strategies:
    """The choice of a call in which all ranks have as many rows as this one; nothing is sent."""
    found = _strategies(chosen, options, world)
    numbers = [count for strategy in found for count in strategy.dispatch.counts]
    return Strategies(_with_counts(found, (numbers,) * world.ranks), rows, options, world)


def _strategies(chosen: Tensor, options: LayerOptions, world: World) -> list[Strategy]:
    """The strategies that have the algorithm, with this rank's dispatch; for ``auto`` all that
    differ.
    """
    algorithm, sizes, hosts = options.algorithm, options.experts_of_ranks, world.hosts
    assert sizes is not None
    operators = [to_ranks.OPERATOR, to_hosts.OPERATOR]
    auto = algorithm == "auto"
    if auto and one_rank_per_host(hosts):  # both are the same then
        operators = operators[:1]
    found = [
        Strategy(operator, find(chosen, sizes, hosts, operator is to_hosts.OPERATOR))
        for operator in operators
        if auto or algorithm in operator.schedule.algorithms
    ]
    if not found:
        names = [name for operator in operators for name in operator.schedule.algorithms]
        raise ValueError(
            f"there is no algorithm {algorithm!r}; choose auto or one of {', '.join(names)}, for "
            "tokens that differ between ranks"
        )
    return found


def _with_counts(strategies: Sequence[Strategy], counts: Counts) -> list[Strategy]:
    """The strategies with all ranks' row counts, which were exchanged in this order."""
    ends = [0, *accumulate(len(strategy.dispatch.counts) for strategy in strategies)]
    return [
        strategy._replace(counts=tuple(tuple(row[start:stop]) for row in counts))
        for strategy, (start, stop) in zip(strategies, pairwise(ends), strict=True)
    ]
