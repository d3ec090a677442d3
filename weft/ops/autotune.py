"""The selection of a variant for ``algorithm="auto"``.

Each operator has a rule. A variant that was measured earlier, by ``weft tune`` or by earlier calls,
has priority over the rule. Otherwise the first calls of a size class measure the candidates. The
fastest is selected, and kept in shared memory for later runs. Rank 0 selects for all ranks.

All ranks make the same calls in the same order, so each rank knows the candidate of a call. After
each round they exchange the times at which their calls began and ended. The duration of a call is
from the latest begin to the latest end, so that it does not include the delay of a late rank. The
clocks of hosts differ, so durations are computed per host, and the shortest one counts.

Candidates are measured only if their results are bitwise equal. Every variant adds up sums in the
same order, and torch's products are bitwise equal for any number of rows, except for kernels for
few rows and in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engines import engine
from weft.ops.call import Call, Selection
from weft.plan import Plan
from weft.predict import tuned
from weft.schedules import all_gather, broadcast
from weft.schedules.levels import Levels
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import FEW_ROWS, ORDERS, Variant, Workload, size_class

CALLS = 12
"""The maximum number of measured calls of a class."""
_CANDIDATES = 4
"""The maximum number of candidates of a class."""
_DROPPED_FROM = (1.5, 1.2)
"""Multiples of the fastest time, after the first round and after later ones, above which a
candidate is dropped.
"""
_BETTER = 0.97
"""A variant replaces the rule's if its time is below this fraction of the rule's."""
_MEASURED_FROM = 1.7e-4
"""Seconds on the link, below which more pieces cost more than their overlap can gain."""
_SAME_BITS = 16
"""The number of rows from which on a row of a product is bitwise independent of it."""
_DTYPES = ("float32", "bfloat16", "float16")
_ALGORITHMS = sorted({name for operator in OPERATORS.values() for name in operator.algorithms})


class Class(NamedTuple):
    """The key of calls that share a selection: the part of the workload that is equal on all ranks,
    with the rows of its size class, the caller's `chunk_rows`, and the emulated link.
    """

    workload: Workload
    chunk_rows: int | None
    link: tuple[float, float] | None


def select(call: Call) -> Selection:
    """The variant of a call; collective if its class is new."""
    key, selections = _class_of(call), engine(call.world).selections
    if key is None:
        return call.rule(call.options.algorithm)
    if key not in selections:
        call.check_algorithm("auto")
        first, *others = candidates = _agreed(call, key)
        selections[key] = Trial(key, [each.variant for each in candidates]) if others else first
    found: Selection | Trial = selections[key]
    return found.next(call) if isinstance(found, Trial) else found


def report(call: Call, trial: Trial, start: int, stop: int) -> None:
    """Report the times of a call to its trial; collective at the end of a round."""
    if not trial.includes(call) or not trial.record(call, start, stop):
        return
    world, key = call.world, trial.key
    fastest = trial.end_round(_exchanged(call, trial), world.hosts)
    if fastest is not None:
        engine(world).selections[key] = fastest
        # a network is not a property of this machine
        if world.rank == 0 and key.chunk_rows is None and not world.multi_host:
            tuned.learn(call.workload, key.link, fastest.variant)


def expected(call: Call) -> Selection:
    """The selection of a call's class, or the one that this rank would make as rank 0; not
    collective.
    """
    key = _class_of(call)
    if key is None:
        return call.rule(call.options.algorithm)
    own, found = _candidates(call)[0], engine(call.world).selections.get(key)
    if isinstance(found, Trial):
        found = found.next(call)
    if found is None or (found.variant == own.variant and not found.measured):
        return own
    return found


def _class_of(call: Call) -> Class | None:
    """The class of a call; None if there is only one variant to select."""
    rows, ranks = max(call.workload.rows), call.world.ranks
    if not call.tunable or ranks == 1 or not rows or call.world.stream_ordered:
        return None
    chunk_rows = call.options.chunk_rows
    rows = size_class(rows) if chunk_rows is None else rows
    return Class(call.shared._replace(rows=(rows,) * ranks), chunk_rows, call.world.emulated_link)


def _candidates(call: Call) -> list[Selection]:
    """The variants to measure for the class of a call, the rule's first; a single one if there is
    nothing to measure.
    """
    operator, workload, world = call.operator, call.workload, call.world
    rule, chunk_rows = call.rule("auto"), call.options.chunk_rows
    if chunk_rows is None and world.topology is None:
        learned = tuned.find(workload, world.emulated_link)
        if learned and call.possible(learned.algorithm):
            return [Selection(learned, "it was measured to be the fastest")]
    if (
        call.passing < _MEASURED_FROM
        or max(workload.rows) <= FEW_ROWS
        or workload.dtype not in _DTYPES
    ):
        return [rule]
    linked = not world.remote_reads
    names = operator.auto_candidates_over_links if linked else operator.auto_candidates
    found = {rule.variant: rule}
    for name in names:
        variant = call.variant(name)
        for divisor in (1, 4) if linked and chunk_rows is None else (1,):
            cut = variant._replace(pieces=max(1, variant.pieces // divisor))
            found.setdefault(cut, Selection(cut, ""))
    return [*found.values()][:_CANDIDATES]


class Trial:
    """The candidates of a class, the rule's first, and their times so far."""

    def __init__(self, key: Class, candidates: Sequence[Variant]) -> None:
        self.key, self.rule, self.candidates = key, candidates[0], [*candidates]
        self.round, self.remaining = 0, CALLS
        self.calls: list[tuple[int, int, int]] = []
        """Of this round: begin and end of each call in nanoseconds, and the size of its product."""
        self.ns_per_element: dict[Variant, float] = {}
        """The shortest time of each candidate, divided by the size of the product."""
        self.ms: dict[Variant, float] = {}
        """The shortest time of each candidate, for `explain`."""

    def includes(self, call: Call) -> bool:
        """Whether all candidates give bitwise equal results for a call."""
        least = min(call.workload.rows)
        return all(least >= _SAME_BITS * variant.pieces for variant in self.candidates)

    def next(self, call: Call) -> Selection:
        """The candidate of the next call, or the rule's variant."""
        variant = self.candidates[len(self.calls)] if self.includes(call) else self.rule
        return Selection(
            variant, "one of the first calls, which measure the candidates", trial=self
        )

    def record(self, call: Call, start: int, stop: int) -> bool:
        """Record the times of a call; True for the last one of a round."""
        self.calls.append((start, stop, sum(call.workload.rows) * max(1, call.workload.n)))
        return len(self.calls) == len(self.candidates)

    def end_round(self, times: Tensor, hosts: Sequence[int]) -> Selection | None:
        """Evaluate a round, with every rank's calls in `times`; the selection, or None if another
        round follows.
        """
        measured = times.view(-1, len(self.candidates), 3)
        latest = [
            measured[[host == each for each in hosts]].amax(0) for host in dict.fromkeys(hosts)
        ]
        durations = torch.stack([each[:, 1] - each[:, 0] for each in latest]).amin(0).tolist()
        sizes = measured[0, :, 2].tolist()
        for variant, ns, size in zip(self.candidates, durations, sizes, strict=True):
            shortest = self.ns_per_element.get(variant, float("inf"))
            self.ns_per_element[variant] = min(shortest, ns / size)
            self.ms[variant] = min(self.ms.get(variant, float("inf")), 1e-6 * ns)
        self.calls, self.round = [], self.round + 1
        self.remaining -= len(self.candidates)
        bound = _DROPPED_FROM[self.round > 1] * min(self.ns_per_element.values())
        self.candidates = [each for each in self.candidates if self.ns_per_element[each] <= bound]
        if 1 < len(self.candidates) <= self.remaining:
            return None

        def weighted(variant: Variant) -> float:
            return self.ns_per_element[variant] * (_BETTER if variant == self.rule else 1)

        by_time = tuple(sorted(self.ms.items(), key=lambda each: each[1]))
        reason = "it was the fastest in the first calls of its class"
        return Selection(min(self.candidates, key=weighted), reason, by_time)


def _agreed(call: Call, key: Class) -> list[Selection]:
    """The candidates of rank 0, on all ranks; `key` is compared between ranks, so that different
    calls raise an error.
    """
    world = call.world
    own = _candidates(call) if world.rank == 0 else []
    numbers = torch.zeros(3 * _CANDIDATES, 1, dtype=torch.int64)
    for at, (algorithm, pieces, order) in enumerate(each.variant for each in own):
        encoded = _ALGORITHMS.index(algorithm), pieces, ORDERS.index(order)
        numbers[3 * at : 3 * at + 3, 0] = torch.tensor(encoded)
    tensors = {"a": numbers, "out": numbers[:0]} if own else {"a": numbers[:0], "out": numbers}
    plan = _from_rank_0(world.levels, world.topology)
    _untraced(call, f"{call.description}\n{key}", plan, tensors, (len(numbers),))
    return own or [
        Selection(Variant(_ALGORITHMS[name], pieces, ORDERS[order]), "as rank 0 decided")
        for name, pieces, order in numbers.view(-1, 3).tolist()
        if pieces
    ]


def _exchanged(call: Call, trial: Trial) -> Tensor:
    """The times that all ranks measured in a round, a row for each rank."""
    world, own = call.world, torch.tensor(trial.calls).view(1, -1)
    every = own.new_empty(world.ranks, own.shape[1])
    plan = _to_all(call.operator.name, world.levels, world.topology)
    name = f"{call.description}\n{trial.key} took {own.shape[1]}"
    _untraced(call, name, plan, {"a": own, "gathered": every}, (1,) * world.ranks)
    return every


@cache
def _from_rank_0(levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    plan = broadcast.push(0, hosts) if hosts else broadcast.eager(0, levels)
    return replace(plan, operator="auto")


@cache
def _to_all(operator: str, levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    ranks = len(levels[-1])
    plan = (
        all_gather.all_gather(ranks, 1, "push", hosts=hosts) if hosts else all_gather.eager(levels)
    )
    return replace(plan, operator=operator)


def _untraced(
    call: Call, name: str, plan: Plan, tensors: dict[str, Tensor], rows: tuple[int, ...]
) -> None:
    """Execute a plan as a part of a call, without recording it."""
    world = call.world
    recorder, world.recorder = world.recorder, None
    try:
        engine(world).execute_as(name, plan, tensors, rows, call.options.timeout)
    finally:
        world.recorder = recorder
