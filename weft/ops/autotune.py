"""The selection of a variant where an operator leaves a choice: for ``algorithm="auto"`` of a fused
operator, and for the paths of a collective's ordinary tensors.

Each operator has a rule. The first calls of a class measure the candidates: in rounds, each of
which drops those that are clearly slower, so that the calls are few, and none by a single call,
which may have been preempted. The fastest is selected, and stored with its time for later runs,
whose first calls check it: if they are clearly slower, or if ranks waited for cores during the
measurement, candidates are measured again. Rank 0 selects for all ranks, once for each class.

All ranks make the same calls in the same order, so each rank knows the candidate of a call. A
measured call begins with a barrier. After each round ranks exchange the times at which their calls
began and ended. The duration of a call is from the latest begin to the latest end, so that it does
not include the delay of a late rank. The clocks of hosts differ, so durations are computed per
host, and the longest one counts: on a host that begins late, rows have arrived before.

Fused operators are measured only for products of enough rows and not in float64, so that their
results are bitwise equal as far as torch's products are: on processors with AMX a kernel may add up
the K products of an element in another order for another number of rows, and variants differ in the
last bits. Where all calls and runs must give the same ones, `torch.use_deterministic_algorithms`
leaves the selection to the rule alone. Where all variants give the same bits (`Call.exact`), a
class is measured again from time to time.

Worlds whose lanes are streams measure no calls, since their caller does not wait for the device:
they take the variant that ``weft tune`` has stored, or the rule's.
"""

from __future__ import annotations

import json
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft._native import CallsLeft
from weft.host.placement import waited_for_core
from weft.ops import stored
from weft.ops.call import Choice, Selection
from weft.ops.stored import Measured
from weft.schedules.workload import Variant, Workload

_CANDIDATES = 16
"""The maximum number of candidates of a class."""
DROPPED_FROM = (1.5, 1.2, 1.1, 1.05)
"""Multiples of the fastest time, after each round, above which a candidate is dropped. The first
calls touch new memory, too.
"""
IN_A_ROW = 2
"""Calls of a candidate in each round: the first finds memory as another candidate has left it, and
calls of a program may alternate, too.
"""
_CHECKS = 4
"""The number of calls that check a stored variant."""
_SLOWER = 1.5
"""A stored variant is not trusted if its time is above this multiple of its record, more than
another process beside it costs a call.
"""
_BUSY = 0.15
"""The part of a call's time that a rank waits for a core, from which on other processes disturb it.
"""
_BETTER = 0.97
"""A variant replaces the rule's if its time is below this fraction of the rule's."""
_PERIOD = 100
"""Calls of an exact class after which it is measured again; later ten times as many each time.
Measured on a Xeon with AMX: repeated all-gathers of 256 KiB take 16 us by reads and 26 through
slots, which are even in the first calls.
"""
_STORED = "it was measured to be the fastest"


def disturbed(waited: float, took: float) -> bool:
    """Whether other processes disturbed calls that `took` some time, in which a rank `waited` for a
    core, in one unit.
    """
    return waited > _BUSY * took


class Class(NamedTuple):
    """The key of calls that share a selection: the part of the workload that is equal on all ranks,
    with the rows of its size class, the caller's limit of rows, and the emulated link.
    """

    workload: Workload
    row_limit: int | None
    link: tuple[float, float] | None


def select(call: Choice) -> Selection:
    """The selection for a call; collective if its class is new."""
    key = _class_of(call)
    if key is None:
        return call.rule()
    selections = call.engine.selections
    found = selections.get(key)
    if found is None:
        found = selections[key] = _agreed(call, key)
        if isinstance(found, Selection):
            call.log(found)
    elif isinstance(found, Selection) and found.left is not None and not found.left.take():
        found = selections[key] = Trial(
            key, call.candidates(call.rule().variant), period=10 * found.period
        )
    return found.next(call) if isinstance(found, Trial) else found


def expected(call: Choice) -> Selection:
    """The selection of a call's class, or the one that this rank would make as rank 0; not
    collective.
    """
    key = _class_of(call)
    if key is None:
        return call.rule()
    found = call.engine.selections.get(key)
    if found is None:
        return _proposed(call, call.rule()).first
    return found.next(call) if isinstance(found, Trial) else found


def current_selection(call: Choice) -> Variant:
    """The variant currently selected for a call's class, or the rule's, for calls that are not
    measured; not collective.
    """
    found = call.engine.selections.get(_class_of(call))
    return found.variant if isinstance(found, Selection) else call.rule().variant


def measure(call: Choice, trial: Trial, execute: Callable[[], None]) -> None:
    """Execute a call, and report its times to its trial; collective at the end of a round."""
    if not call.comparable(trial.candidates):
        execute()
        return
    world, key = call.world, trial.key
    call.engine.meet(f"{call.description}\n{key}", call.timeout)
    before, begin = waited_for_core(), time.monotonic_ns()
    execute()
    end = time.monotonic_ns()
    if not trial.record(begin, end, waited_for_core() - before, call.work):
        return
    name = f"{call.description}\n{key} took {len(trial.calls)} times"
    times = call.engine.exchange(name, json.dumps(trial.calls), call.timeout)
    fastest = trial.end_round(
        [*map(json.loads, times)], world.hosts, world.placement.oversubscribed
    )
    if fastest is None:
        return
    if call.exact:
        fastest = fastest._replace(left=CallsLeft(trial.period), period=trial.period)
    call.engine.selections[key] = fastest
    call.log(fastest)
    if world.rank == 0 and trial.round and (class_name := _stored_as(call)) is not None:
        stored.learn(class_name, trial.measured(fastest.variant))


def _class_of(call: Choice) -> Class | None:
    """The class of a call; None if the rule alone selects its variant."""
    workload, world = call.similar, call.world
    if workload is None or world.ranks == 1 or not max(workload.rows):
        return None
    return Class(workload, call.row_limit, world.emulated_link)


class Proposal(NamedTuple):
    """A rank's candidates for a class: the first, by the rule or as stored, and its time as stored,
    0 if it is not; and others to measure.
    """

    first: Selection
    record: float
    others: list[Variant]


def _proposed(call: Choice, first: Selection) -> Proposal:
    """The proposal of this rank, whose rule selects `first`."""
    candidates, record = call.candidates(first.variant), 0.0
    name = _stored_as(call)
    found = None if name is None else stored.find(name)
    if found and not found.busy and call.possible(found.variant.algorithm):
        first, record = Selection(found.variant, _STORED), found.ns
    others = [each for each in dict.fromkeys(candidates) if each != first.variant]
    if len(candidates) == 1 or call.world.stream_ordered:
        others = []
    return Proposal(first, record, others[: _CANDIDATES - 1])


def _stored_as(call: Choice) -> str | None:
    """The name of a call's class among the stored measurements; None for one that is not stored: a
    network is not a property of this machine.
    """
    world = call.world
    if call.row_limit is not None or world.hosts.several:
        return None
    return stored.key(call.own_class, call.engine.setting)


def _agreed(call: Choice, key: Class) -> Selection | Trial:
    """The selection that rank 0 proposes, or the trial of its candidates, on all ranks; `key` is
    compared between ranks, so that different calls raise an error.
    """
    text, first = "", call.rule()  # all ranks reject what is not possible here
    if call.world.rank == 0:
        first, record, others = _proposed(call, first)
        variants = [each.to_json() for each in (first.variant, *others)]
        text = json.dumps([variants, record, first.reason])
    name = f"{call.description}\n{key}"
    text, *_ = call.engine.exchange(name, text, call.timeout)
    found, record, reason = json.loads(text)
    candidates = [*map(Variant.from_json, found)]
    if len(candidates) == 1:
        return Selection(candidates[0], reason)
    return Trial(key, candidates, record)


class Trial:
    """The candidates of a class, the stored or the rule's one first, and their times so far.

    `record` is the time of the first if an earlier process has stored it, in nanoseconds per unit
    of work. Then calls of that variant alone come first; the others are measured only if these are
    clearly slower. `period` is the number of calls after which an exact class is measured again.
    """

    def __init__(
        self,
        key: Class,
        candidates: Sequence[Variant],
        record: float = 0.0,
        period: int = _PERIOD,
    ) -> None:
        self.key, self.first, self.candidates = key, candidates[0], [*candidates]
        self.to_check, self.period = record, period
        self.left = self.candidates
        """The candidates that have not been dropped."""
        self.round = 0
        """The number of rounds that have ended and count."""
        self.repeated = False
        """Whether the latest round did not count, since ranks had to wait for cores."""
        self.calls: list[tuple[int, int, int, int]] = []
        """Of this round: begin and end of each call and the time that this rank waited for a core
        in it, in nanoseconds, and its work.
        """
        self.ns_per_work: dict[Variant, list[float]] = defaultdict(list)
        """The times of each candidate divided by the work, shortest first."""
        self.ms: dict[Variant, float] = {}
        """The shortest time of each candidate, for `explain`."""
        self.took = self.waited = 0.0

    @property
    def turns(self) -> list[Variant]:
        """The variants of the calls of this round."""
        if self.to_check:
            return [self.first] * _CHECKS
        return [variant for variant in self.left for _ in range(IN_A_ROW)]

    @property
    def busy(self) -> bool:
        """Whether ranks have waited for cores in the measured calls."""
        return disturbed(self.waited, self.took)

    def next(self, call: Choice) -> Selection:
        """The candidate of the next call, or the first one."""
        comparable = call.comparable(self.candidates)
        variant = self.turns[len(self.calls)] if comparable else self.first
        return Selection(
            variant, "one of the first calls, which measure the candidates", trial=self
        )

    def record(self, begin: int, end: int, waited: int, work: int) -> bool:
        """Record the times of a call; True for the last one of a round."""
        self.calls.append((begin, end, waited, work))
        return len(self.calls) == len(self.turns)

    def end_round(
        self,
        times: Sequence[Sequence[Sequence[int]]],
        hosts: Sequence[int],
        oversubscribed: bool = False,
    ) -> Selection | None:
        """Evaluate a round, with the `calls` of every rank in `times`; the selection, or None if
        another round follows. Ranks that share cores always wait for one: then no round is busy.
        """
        durations, waits = [], []
        for calls in zip(*times, strict=True):
            by_host = [
                [call for call, host in zip(calls, hosts, strict=True) if host == each]
                for each in dict.fromkeys(hosts)
            ]
            durations.append(
                max(
                    max(end for _, end, *_ in each) - max(begin for begin, *_ in each)
                    for each in by_host
                )
            )
            waits.append(0 if oversubscribed else max(waited for _, _, waited, _ in calls))
        self.took, self.waited = self.took + sum(durations), self.waited + sum(waits)
        self.repeated = any(map(disturbed, waits, durations)) and not self.repeated
        for variant, ns, (*_, work) in zip(self.turns, durations, times[0], strict=True):
            insort(self.ns_per_work[variant], ns / work)
            self.ms[variant] = min(self.ms.get(variant, float("inf")), 1e-6 * ns)
        self.calls = []
        if self.to_check:
            return self._checked()
        return None if self.repeated else self._selected()

    def measured(self, variant: Variant) -> Measured:
        """The time of a variant, to store."""
        return Measured(variant, self.ns_per_work[variant][0], self.busy)

    def _checked(self) -> Selection | None:
        """The stored variant, or None if all candidates have to be measured."""
        if self.busy or self.ns_per_work[self.first][0] <= _SLOWER * self.to_check:
            return Selection(self.first, _STORED)
        self.to_check = 0.0
        self.ns_per_work.clear()
        self.ms.clear()
        return None

    def _selected(self) -> Selection | None:
        """The fastest candidate, or None if another round has to follow."""
        bound = DROPPED_FROM[self.round] * min(map(self._time, self.left))
        self.left = [each for each in self.left if self._time(each) <= bound]
        self.round += 1
        if len(self.left) > 1 and self.round < len(DROPPED_FROM):
            return None

        def weighted(variant: Variant) -> float:
            return self._time(variant) * (_BETTER if variant == self.first else 1)

        by_time = tuple(sorted(self.ms.items(), key=lambda each: each[1]))
        reason = "it was the fastest in the first calls of its class"
        return Selection(min(self.left, key=weighted), reason, by_time)

    def _time(self, variant: Variant) -> float:
        """The mean of the two shortest times, since one call may be lucky; of two times the shorter
        one, since the first call touches new memory.
        """
        shortest, *others = self.ns_per_work[variant]
        return (shortest + others[0]) / 2 if len(others) > 1 else shortest
