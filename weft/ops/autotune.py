"""The selection of a variant for ``algorithm="auto"``.

Each operator has a rule. A variant that was measured before, by ``weft tune`` or by earlier calls,
comes before the rule. Else the first calls of a size class measure the candidates, and the fastest
stays, in shared memory for later runs too. Rank 0 selects for all ranks.

All ranks make the same calls in the same order, so each knows the candidate of a call. After each
round they exchange the times at which their calls began and ended. A call takes from the latest
beginning to the latest end, so a late rank does not count. The clocks of hosts differ: the times of
one host are compared with each other, and the shortest of all hosts counts.

Candidates are tried only where they give the same bits. Sums are taken in one order by every
variant, and torch's products have the same bits in any number of rows, except by kernels for few rows
and in float64.
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
"""The most calls of a class that measure."""
_CANDIDATES = 4
"""The most candidates of a class."""
_HOPELESS = (1.5, 1.2)
"""Times the fastest, after the first round and after later ones: a slower candidate is dropped."""
_BETTER = 0.97
"""The part of the rule's time that another variant must reach to replace it."""
_WORTH_TRYING = 1.7e-4
"""Seconds on an emulated link: for less, pieces cost more than they can hide."""
_SAME_BITS = 16
"""The rows from which on the bits of a product do not depend on their number."""
_DTYPES = ("float32", "bfloat16", "float16")
_ALGORITHMS = sorted({name for operator in OPERATORS.values() for name in operator.algorithms})


class Class(NamedTuple):
    """The calls that share a selection: a workload that all ranks know, with the rows of its size
    class, the `chunk_rows` of the caller, and the emulated link.
    """

    workload: Workload
    chunk_rows: int | None
    link: tuple[float, float] | None


def select(call: Call) -> Selection:
    """The variant of a call; collective where its class is new."""
    key, selections = _class_of(call), engine(call.world).selections
    if key is None:
        return call.rule(call.options.algorithm)
    if key not in selections:
        call.check_algorithm("auto")
        first, *others = candidates = _agreed(call, key)
        selections[key] = Trial(key, [each.variant for each in candidates]) if others else first
    found: Selection | Trial = selections[key]
    return found.next(call) if isinstance(found, Trial) else found


def report(call: Call, trial: Trial, begun: int, ended: int) -> None:
    """Report the time of a call to its trial; collective at the end of a round."""
    if not trial.includes(call) or not trial.note(call, begun, ended):
        return
    world, key = call.world, trial.key
    fastest = trial.end_round(_exchanged(call, trial), world.hosts)
    if fastest is not None:
        engine(world).selections[key] = fastest
        # a network is not a property of this machine
        if world.rank == 0 and key.chunk_rows is None and not world.multi_host:
            tuned.learn(call.workload, key.link, fastest.variant)


def expected(call: Call) -> Selection:
    """The selection that this rank knows of, or would make as rank 0; not collective."""
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
    """The class of a call; None where nothing is left to select."""
    rows, ranks = max(call.workload.rows), call.world.ranks
    if not call.tunable or ranks == 1 or not rows or call.world.stream_ordered:
        return None
    chunk_rows = call.options.chunk_rows
    rows = size_class(rows) if chunk_rows is None else rows
    return Class(call.shared._replace(rows=(rows,) * ranks), chunk_rows, call.world.emulated_link)


def _candidates(call: Call) -> list[Selection]:
    """The variants worth measuring for the class of a call, that of the rule first; a single one
    where nothing is to be measured.
    """
    operator, workload, world = call.operator, call.workload, call.world
    rule, chunk_rows = call.rule("auto"), call.options.chunk_rows
    if chunk_rows is None and world.topology is None:
        known = tuned.find(workload, world.emulated_link)
        if known and call.possible(known.algorithm):
            return [Selection(known, "it was measured to be the fastest")]
    if (
        call.passing < _WORTH_TRYING
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
        self.key, self.rule, self.left = key, candidates[0], [*candidates]
        self.round, self.remaining = 0, CALLS
        self.calls: list[tuple[int, int, int]] = []
        """Of this round: begin and end of each call in nanoseconds, and the size of its product."""
        self.least: dict[Variant, float] = {}
        """The least nanoseconds of each candidate, by size of the product."""
        self.shown: dict[Variant, float] = {}
        """Its least milliseconds."""

    def includes(self, call: Call) -> bool:
        """Whether all candidates give a call the same bits."""
        least = min(call.workload.rows)
        return all(least >= _SAME_BITS * variant.pieces for variant in self.left)

    def next(self, call: Call) -> Selection:
        """The candidate of the next call, or the rule's variant."""
        variant = self.left[len(self.calls)] if self.includes(call) else self.rule
        return Selection(
            variant, "one of the first calls, which measure the candidates", trial=self
        )

    def note(self, call: Call, begun: int, ended: int) -> bool:
        """Note the times of a call; whether it is the last one of its round."""
        self.calls.append((begun, ended, sum(call.workload.rows) * max(1, call.workload.n)))
        return len(self.calls) == len(self.left)

    def end_round(self, times: Tensor, hosts: Sequence[int]) -> Selection | None:
        """Evaluate a round of which `times` has every rank's calls; the selection, once made."""
        every = times.view(-1, len(self.left), 3)
        last = [every[[host == each for each in hosts]].amax(0) for host in dict.fromkeys(hosts)]
        took = torch.stack([each[:, 1] - each[:, 0] for each in last]).amin(0).tolist()
        for variant, ns, size in zip(self.left, took, every[0, :, 2].tolist(), strict=True):
            self.least[variant] = min(self.least.get(variant, float("inf")), ns / size)
            self.shown[variant] = min(self.shown.get(variant, float("inf")), 1e-6 * ns)
        self.calls, self.round, self.remaining = [], self.round + 1, self.remaining - len(self.left)
        bound = _HOPELESS[self.round > 1] * min(self.least.values())
        self.left = [variant for variant in self.left if self.least[variant] <= bound]
        if 1 < len(self.left) <= self.remaining:
            return None

        def weighted(variant: Variant) -> float:
            return self.least[variant] * (_BETTER if variant == self.rule else 1)

        measured = tuple(sorted(self.shown.items(), key=lambda each: each[1]))
        reason = "it was the fastest in the first calls of its class"
        return Selection(min(self.left, key=weighted), reason, measured)


def _agreed(call: Call, key: Class) -> list[Selection]:
    """The candidates of rank 0, on all ranks; ranks that make different calls notice by `key`."""
    world = call.world
    own = _candidates(call) if world.rank == 0 else []
    numbers = torch.zeros(3 * _CANDIDATES, 1, dtype=torch.int64)
    for at, (algorithm, pieces, order) in enumerate(each.variant for each in own):
        encoded = _ALGORITHMS.index(algorithm), pieces, ORDERS.index(order)
        numbers[3 * at : 3 * at + 3, 0] = torch.tensor(encoded)
    tensors = {"a": numbers, "out": numbers[:0]} if own else {"a": numbers[:0], "out": numbers}
    plan = _from_rank_0(world.levels, world.topology)
    _untraced(call, f"{call.words}\n{key}", plan, tensors, (len(numbers),))
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
    name = f"{call.words}\n{trial.key} took {own.shape[1]}"
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
    """Execute a plan on behalf of a call; traces show the call, not this."""
    world = call.world
    recorder, world.recorder = world.recorder, None
    try:
        engine(world).execute_as(name, plan, tensors, rows, call.options.timeout)
    finally:
        world.recorder = recorder
