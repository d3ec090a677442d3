"""The selection of a variant for ``algorithm="auto"``.

Each operator has a rule. The first calls of a size class measure the candidates: in rounds, each
of which drops those that are clearly slower, so that the calls are few, and none by a single call,
which may have been preempted. The fastest is selected. In shared memory it is kept with its time
for later runs, whose first calls check it: if they are clearly slower than that, or if the ranks
had to wait for cores while it was measured, candidates are measured again. Rank 0 selects for all
ranks.

All ranks make the same calls in the same order, so each rank knows the candidate of a call. After
each round they exchange the times at which their calls began and ended. The duration of a call is
from the latest begin to the latest end, so that it does not include the delay of a late rank. The
clocks of hosts differ, so durations are computed per host, and the shortest one counts.

Candidates are measured only for products of enough rows and not in float64, so that their results
are bitwise equal as far as torch's products are: on processors with AMX a kernel may add up the K
products of an element in another order for another number of rows, and variants differ in the last
bits. Where all calls and runs must give the same ones, `torch.use_deterministic_algorithms` leaves
the selection to the rule alone.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engines import engine
from weft.ops import agreement, remembered
from weft.ops.call import Call, Selection
from weft.predict import tuned
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import FEW_ROWS, ORDERS, Variant, Workload, size_class
from weft.world.placement import waited_for_core

_PIECES = (1, 2, 4, 8, 16, 32)
"""The numbers of pieces that are tried over a link."""
_LEAST_PIECE = 32
"""The number of rows below which a piece is not tried."""
_CANDIDATES = 16
"""The maximum number of candidates of a class."""
DROPPED_FROM = (1.4, 1.2, 1.1, 1.05)
"""Multiples of the fastest time, after the second round and each later one, above which a candidate
is dropped. The first round drops none: its calls touch new memory, too.
"""
_CHECKS = 4
"""The number of calls that check a stored variant."""
_SLOWER = 1.5
"""A stored variant is not trusted if its time is above this multiple of its record."""
_BUSY = 0.15
"""The part of a call's time that a rank waits for a core, from which on other processes disturb it.
"""
_BETTER = 0.97
"""A variant replaces the rule's if its time is below this fraction of the rule's."""
_MEASURED_FROM = 1.7e-4
"""Seconds on the link, below which more pieces cost more than their overlap can gain."""
_STORED = "it was measured to be the fastest"
_SAME_BITS = 16
"""The number of rows from which on torch's products use no kernels for few rows."""
_DTYPES = ("float32", "bfloat16", "float16")
_ALGORITHMS = sorted({name for operator in OPERATORS.values() for name in operator.algorithms})


class Class(NamedTuple):
    """The key of calls that share a selection: the part of the workload that is equal on all ranks,
    with the rows of its size class, the caller's `chunk_rows`, the emulated link, and whether torch
    is to use deterministic algorithms.
    """

    workload: Workload
    chunk_rows: int | None
    link: tuple[float, float] | None
    deterministic: bool


def select(call: Call) -> Selection:
    """The variant of a call; collective if its class is new."""
    if call.world.stream_ordered:
        return remembered.select(call)
    key, selections = _class_of(call), engine(call.world).selections
    if key is None:
        return call.rule(call.options.algorithm)
    if key not in selections:
        call.check_algorithm("auto")
        first, *others = candidates = _agreed(call, key)
        variants = [each.variant for each in candidates]
        selections[key] = Trial(key, variants, first.record) if others else first
        if not others:
            call.log(first)
    found: Selection | Trial = selections[key]
    return found.next(call) if isinstance(found, Trial) else found


def measure(call: Call, trial: Trial, execute: Callable[[], None]) -> None:
    """Execute a call, and report its times to its trial; collective at the end of a round."""
    if not trial.includes(call):
        execute()
        return
    before, begin = waited_for_core(), time.monotonic_ns()
    execute()
    end = time.monotonic_ns()
    if not trial.record(call, begin, end, waited_for_core() - before):
        return
    world, key = call.world, trial.key
    fastest = trial.end_round(_exchanged(call, trial), world.hosts)
    if fastest is not None:
        engine(world).selections[key] = fastest
        call.log(fastest)
        # a network is not a property of this machine
        if world.rank == 0 and trial.round and key.chunk_rows is None and not world.multi_host:
            tuned.learn(call.workload, key.link, trial.measured(fastest.variant))


def expected(call: Call) -> Selection:
    """The selection of a call's class, or the one that this rank would make as rank 0; not
    collective.
    """
    if call.world.stream_ordered:
        return remembered.expected(call)
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
    if not call.tunable or ranks == 1 or not rows:
        return None
    chunk_rows = call.options.chunk_rows
    rows = size_class(rows) if chunk_rows is None else rows
    return Class(
        call.shared._replace(rows=(rows,) * ranks),
        chunk_rows,
        call.world.emulated_link,
        torch.are_deterministic_algorithms_enabled(),
    )


def _candidates(call: Call) -> list[Selection]:
    """The variants to measure for the class of a call, a stored one or the rule's first; a single
    one if there is nothing to measure.
    """
    operator, workload, world = call.operator, call.workload, call.world
    first, chunk_rows = call.rule("auto"), call.options.chunk_rows
    if torch.are_deterministic_algorithms_enabled():
        return [first]
    if chunk_rows is None and world.topology is None:
        stored = tuned.find(workload, world.emulated_link)
        if stored and not stored.busy and call.possible(stored.variant.algorithm):
            first = Selection(stored.variant, _STORED, record=stored.ns)
    if (
        call.passing < _MEASURED_FROM
        or max(workload.rows) <= FEW_ROWS
        or workload.dtype not in _DTYPES
    ):
        return [first]
    linked = not world.remote_reads
    names = operator.auto_candidates_over_links if linked else operator.auto_candidates
    variants = [first.variant, *map(call.variant, names)]
    if linked and chunk_rows is None:
        most = max(workload.rows) // _LEAST_PIECE
        cut = [each for each in variants if each.algorithm not in operator.uncut]
        variants += [each._replace(pieces=n) for each in cut for n in _PIECES if n <= most]
    others = [Selection(each, "") for each in dict.fromkeys(variants) if each != first.variant]
    return [first, *others][:_CANDIDATES]


class Trial:
    """The candidates of a class, the stored or the rule's one first, and their times so far.

    `record` is the time of the first if an earlier process has stored it, in nanoseconds per
    element of the product. Then calls of that variant alone come first; the others are measured
    only if these are clearly slower.
    """

    def __init__(self, key: Class, candidates: Sequence[Variant], record: float = 0.0) -> None:
        self.key, self.first, self.candidates = key, candidates[0], [*candidates]
        self.to_check = record
        self.turns = [self.first] * _CHECKS if record else self.candidates
        """The variants of the calls of this round."""
        self.round = 0
        """The number of rounds that have ended and count."""
        self.repeated = False
        """Whether the latest round did not count, since ranks had to wait for cores."""
        self.calls: list[tuple[int, int, int, int]] = []
        """Of this round: begin and end of each call and the time that this rank waited for a core
        in it, in nanoseconds, and the size of its product.
        """
        self.ns_per_element: dict[Variant, list[float]] = defaultdict(list)
        """The times of each candidate divided by the size of the product, shortest first."""
        self.ms: dict[Variant, float] = {}
        """The shortest time of each candidate, for `explain`."""
        self.took = self.waited = 0.0

    @property
    def busy(self) -> bool:
        """Whether ranks have waited for cores in the measured calls."""
        return self.waited > _BUSY * self.took

    def includes(self, call: Call) -> bool:
        """Whether no candidate multiplies so few rows of a call that torch uses other kernels."""
        least = min(call.workload.rows)
        return all(least >= _SAME_BITS * variant.pieces for variant in self.candidates)

    def next(self, call: Call) -> Selection:
        """The candidate of the next call, or the first one."""
        variant = self.turns[len(self.calls)] if self.includes(call) else self.first
        return Selection(
            variant, "one of the first calls, which measure the candidates", trial=self
        )

    def record(self, call: Call, begin: int, end: int, waited: int) -> bool:
        """Record the times of a call; True for the last one of a round."""
        size = sum(call.workload.rows) * max(1, call.workload.n)
        self.calls.append((begin, end, waited, size))
        return len(self.calls) == len(self.turns)

    def end_round(self, times: Tensor, hosts: Sequence[int]) -> Selection | None:
        """Evaluate a round, with every rank's calls in `times`; the selection, or None if another
        round follows.
        """
        measured = times.view(-1, len(self.turns), 4)
        latest = [
            measured[[host == each for each in hosts]].amax(0) for host in dict.fromkeys(hosts)
        ]
        durations = torch.stack([each[:, 1] - each[:, 0] for each in latest]).amin(0).tolist()
        waits = measured[:, :, 2].amax(0).tolist()
        self.took, self.waited = self.took + sum(durations), self.waited + sum(waits)
        disturbed = any(wait > _BUSY * ns for wait, ns in zip(waits, durations, strict=True))
        self.repeated = disturbed and not self.repeated
        sizes = measured[0, :, 3].tolist()
        for variant, ns, size in zip(self.turns, durations, sizes, strict=True):
            insort(self.ns_per_element[variant], ns / size)
            self.ms[variant] = min(self.ms.get(variant, float("inf")), 1e-6 * ns)
        self.calls = []
        if self.to_check:
            return self._checked()
        return None if self.repeated else self._selected()

    def measured(self, variant: Variant) -> tuned.Measured:
        """The time of a variant, to store."""
        return tuned.Measured(variant, self.ns_per_element[variant][0], self.busy)

    def _checked(self) -> Selection | None:
        """The stored variant, or None if all candidates have to be measured."""
        if self.busy or self.ns_per_element[self.first][0] <= _SLOWER * self.to_check:
            return Selection(self.first, _STORED)
        self.to_check, self.turns = 0.0, self.candidates
        self.ns_per_element.clear()
        self.ms.clear()
        return None

    def _selected(self) -> Selection | None:
        """The fastest candidate, or None if another round has to follow."""
        if self.round:
            bound = DROPPED_FROM[self.round - 1] * min(map(self._time, self.turns))
            self.turns = [each for each in self.turns if self._time(each) <= bound]
        self.round += 1
        if len(self.turns) > 1 and self.round <= len(DROPPED_FROM):
            return None

        def weighted(variant: Variant) -> float:
            return self._time(variant) * (_BETTER if variant == self.first else 1)

        by_time = tuple(sorted(self.ms.items(), key=lambda each: each[1]))
        reason = "it was the fastest in the first calls of its class"
        return Selection(min(self.turns, key=weighted), reason, by_time)

    def _time(self, variant: Variant) -> float:
        """The mean of the two shortest times, since one call may be lucky; of two times the shorter
        one, since the first call touches new memory.
        """
        shortest, *others = self.ns_per_element[variant]
        return (shortest + others[0]) / 2 if len(others) > 1 else shortest


def _agreed(call: Call, key: Class) -> list[Selection]:
    """The candidates of rank 0, on all ranks; `key` is compared between ranks, so that different
    calls raise an error.
    """
    world = call.world
    own = _candidates(call) if world.rank == 0 else []
    numbers = torch.zeros(4 * _CANDIDATES, 1, dtype=torch.int64, device="cpu")
    for at, each in enumerate(own):
        algorithm, pieces, order, _ = each.variant
        encoded = _ALGORITHMS.index(algorithm), pieces, ORDERS.index(order)
        numbers[4 * at : 4 * at + 3, 0] = torch.tensor(encoded, device="cpu")
        numbers[4 * at + 3] = torch.tensor(each.record, dtype=torch.float64, device="cpu").view(
            torch.int64
        )
    name = f"{call.description}\n{key}"
    agreement.from_rank_0(world, name, numbers, call.options.timeout)
    return own or [
        Selection(
            Variant(_ALGORITHMS[name], pieces, ORDERS[order]), "as rank 0 decided", record=record
        )
        for (name, pieces, order, _), record in zip(
            numbers.view(-1, 4).tolist(), numbers[3::4, 0].view(torch.float64).tolist(), strict=True
        )
        if pieces
    ]


def _exchanged(call: Call, trial: Trial) -> Tensor:
    """The times that all ranks measured in a round, a row for each rank."""
    own = torch.tensor(trial.calls, device="cpu")
    name = f"{call.description}\n{trial.key} took {own.numel()}"
    operator, timeout = call.operator.name, call.options.timeout
    return agreement.of_all_ranks(call.world, operator, name, own, timeout)
