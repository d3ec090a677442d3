"""The choice among the plans of a collective, by measuring them in its first calls.

The fastest path of an ordinary tensor to peers depends on the machine, the size of the tensor and
the location of the cores: copied to eager buffers, staged through slots, or read in place through
the kernel. All plans give the same bits. So the calls of a class, an operator and a size of up to
the same power of two, try them alternately, and the fastest serves all later ones. Choices are
stored for later runs (`weft.cache`), with their times, and those of rank 0 serve all ranks.

A call is timed from a barrier to its latest end on any rank, so a late rank does not count, and the
least time of several rounds counts, so one interrupted call decides nothing. A stored choice is
timed, too: one that takes longer than its record is measured anew with the others, and so is one
that was measured while other processes occupied the cores.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import weft.cache as cache
from weft._native import CallsLeft
from weft.engines import engine
from weft.ops import agreement
from weft.plan import Plan
from weft.world import World
from weft.world.placement import waited_for_core

_log = logging.getLogger("weft")

Plans = Mapping[str, Callable[[], Plan]]
"""The plans of a call that can be the fastest, by names of `NAMES`; the first serves calls that are
not measured.
"""

NAMES = ("eager", "slots", "short slots", "read")
"""The names of plans: rows copied to eager buffers, staged through slots, through slots for a
sixteenth of the rows, or read in place through the kernel.
"""
OPERATORS = ("all_gather", "all_to_all", "broadcast")
"""The collectives whose plans are measured."""

LEAST_BYTES = 4 << 10
"""Bytes of a rank up to which nothing is measured: two system calls take longer than the copies."""
_FIRST = 2
"""Rounds before slow plans are dropped; the very first warms up."""
_LATER = 3
"""Rounds after it."""
_IN_A_ROW = 2
"""Calls of a plan in each round: the first finds memory as another plan has left it, and calls of a
program may alternate, too.
"""
_MEASURED_AGAIN = 100
"""Calls of a class after which it is measured again; later, after ten times as many each time."""
_DROPPED_FROM = 1.5
"""Multiple of the least time above which a plan is dropped after the first rounds."""
_SAME = 1.05
"""Multiple of the least time up to which reading in place, with the fewest copies, is chosen."""
_SLOWER = 1.5
"""Multiple of its record above which a stored choice is measured anew."""
_BUSY = 0.1
"""Part of the time for which a thread waited for a core, from which on a core counts as busy."""
_SIZES = 48
"""The number of size classes."""


class Class(NamedTuple):
    """The calls that share a choice: those of up to 2**bits bytes, and more than half of that."""

    operator: str
    bits: int

    @classmethod
    def of(cls, operator: str, size: int) -> Class:
        """The class of a call of `size` bytes."""
        return cls(operator, (size - 1).bit_length())

    @property
    def largest(self) -> int:
        """The most bytes of its calls."""
        return 1 << self.bits


class Choice(NamedTuple):
    """The plan of a class, its least time in nanoseconds for a MiB, and whether other processes
    occupied the cores while it was measured.
    """

    name: str
    ns: int
    busy: bool


class Trial:
    """The plans of a class that are being measured, and the times of this phase."""

    def __init__(self, key: Class, names: list[str], record: int | None = None) -> None:
        self.key, self.names, self.record, self.first = key, names, record, True
        self.calls: list[tuple[int, int, int]] = []
        """Begin and end of each call in nanoseconds, and its size in bytes."""
        self.waited, self.begun = waited_for_core(), time.monotonic_ns()

    @property
    def name(self) -> str:
        """The plan of the next call."""
        return self._name(len(self.calls))

    def _name(self, call: int) -> str:
        return self.names[call // _IN_A_ROW % len(self.names)]

    @property
    def complete(self) -> bool:
        """Whether all calls of this phase were made."""
        rounds = _FIRST if self.first else _LATER
        return len(self.calls) == rounds * len(self.names) * _IN_A_ROW

    def end_phase(self, times: Tensor, oversubscribed: bool) -> Choice | None:
        """Evaluate the times of all ranks, a row for each; the choice, or None if another phase
        follows, or the stored choice takes longer than its record.
        """
        *calls, delays, elapsed = times.unbind(1)
        busy = not oversubscribed and bool((delays > _BUSY * elapsed).any())
        latest = torch.stack(calls).view(-1, 3, len(times)).amax(2).tolist()
        ns = dict.fromkeys(self.names, 1 << 53)
        for call, (begin, end, size) in enumerate(latest):
            if call >= _IN_A_ROW * len(self.names) or not self.first:
                name = self._name(call)
                ns[name] = min(ns[name], ((end - begin) << 20) // size)
        if self.record is not None:
            [(name, found)] = ns.items()
            slower = found > _SLOWER * self.record and not busy
            return None if slower else Choice(name, min(self.record, found), False)
        if self.first:
            bound = _DROPPED_FROM * min(ns.values())
            self.names = [name for name in self.names if ns[name] <= bound]
            self.first, self.calls = False, []
            if len(self.names) > 1:
                return None
        best = min(self.names, key=lambda name: ns[name] / (_SAME if name == "read" else 1))
        return Choice(best, ns[best], busy)


class Choices:
    """The choices of a world, equal on all ranks."""

    def __init__(self, world: World, stored: Mapping[Class, Choice]) -> None:
        self.world, self.stored = world, dict(stored)
        self.found = dict[Class, Choice | Trial]()
        self.left, self.periods = dict[Class, CallsLeft](), dict[Class, int]()
        """The calls until a class is measured again, of which cached calls take one each, too, and
        the number with which they began.
        """

    def of(self, key: Class, plans: Plans) -> Choice | Trial:
        """The choice or the trial of a class for a call, which takes part in it."""
        found = self.found.get(key)
        if found is None and (stored := self.stored.get(key)) and stored.name in plans:
            known = not stored.busy
            found = Trial(key, [stored.name] if known else [*plans], stored.ns if known else None)
        elif found is None or (isinstance(found, Choice) and not self._serves(found, key, plans)):
            found = Trial(key, [*plans])
        self.found[key] = found
        return found

    def _serves(self, choice: Choice, key: Class, plans: Plans) -> bool:
        return choice.name in plans and self.left[key].take()

    def _choose(self, key: Class, choice: Choice) -> None:
        """Let a choice serve the calls of its class from now on."""
        self.found[key] = choice
        self.periods[key] = self.periods.get(key, _MEASURED_AGAIN // 10) * 10
        self.left[key] = CallsLeft(self.periods[key])
        if self.world.rank == 0:
            _log.info(
                "%s of up to %d bytes: the plan %r was the fastest in the first calls",
                key.operator,
                key.largest,
                choice.name,
            )
            _store(_setting(self.world), key, choice)

    def expected(self, key: Class, plans: Plans) -> Plan:
        """The plan of a call that is not measured."""
        found = self.found.get(key)
        name = (
            found.name if isinstance(found, Choice) and found.name in plans else next(iter(plans))
        )
        return plans[name]()

    def measure(
        self,
        trial: Trial,
        execute: Callable[[], None],
        plans: Plans,
        size: int,
        call: str,
        timeout: float | None,
    ) -> None:
        """Execute a call of `size` bytes by the next plan of a trial, and end the phase with its
        last call; collective.
        """
        world = self.world
        agreement.synchronize(world, f"{call}\n{trial.key}", timeout)
        with world.exclusive:
            begin = time.monotonic_ns()
            execute()
            trial.calls.append((begin, time.monotonic_ns(), size))
        if not trial.complete:
            return
        own = [each for times in trial.calls for each in times]
        own += [waited_for_core() - trial.waited, time.monotonic_ns() - trial.begun]
        name = f"{call}\ntimes of {len(trial.calls)} calls"
        times = agreement.of_all_ranks(
            world, trial.key.operator, name, torch.tensor(own, device="cpu"), timeout
        )
        choice = trial.end_phase(times, world.oversubscribed)
        if choice is not None:
            self._choose(trial.key, choice)
        elif trial.record is not None:
            self.found[trial.key] = Trial(trial.key, [*plans])


def choices(world: World, call: str, timeout: float | None) -> Choices:
    """The choices of a world; collective at the first call, which `call` describes."""
    selections = engine(world).selections
    if Choices not in selections:
        numbers = torch.zeros(len(OPERATORS) * _SIZES, 1, dtype=torch.int64, device="cpu")
        if world.rank == 0:
            for (operator, bits), (name, ns, busy) in _stored(_setting(world)).items():
                at = OPERATORS.index(operator) * _SIZES + bits
                numbers[at] = 1 + NAMES.index(name) + 16 * busy + 256 * ns
        agreement.from_rank_0(world, f"{call}\nstored choices", numbers, timeout)
        selections[Choices] = Choices(
            world,
            {
                Class(OPERATORS[at // _SIZES], at % _SIZES): Choice(
                    NAMES[number % 16 - 1], number // 256, bool(number // 16 % 16)
                )
                for at, number in enumerate(numbers.view(-1).tolist())
                if number
            },
        )
    found: Choices = selections[Choices]
    return found


def kept() -> tuple[Path | None, int, int]:
    """The file of the stored choices of this machine, their number, and the number of those that
    were measured on busy cores.
    """
    found = [choice for stored in _every().values() for choice in stored.values()]
    return cache.file(_file()), len(found), sum(bool(busy) for _, _, busy in found)


def forget() -> None:
    """Remove the stored choices of this machine."""
    cache.remove(_file())


def _file() -> str:
    return cache.of_this_machine("collectives")


def _setting(world: World) -> str:
    """The properties of a world on which its choices depend."""
    pages = "huge" if world.huge_pages else "small"
    return f"{world.ranks} ranks of {world.threads} threads, {pages} pages"


def _store(setting: str, key: Class, choice: Choice) -> None:
    """Add a choice to the stored ones."""
    entries = _every()
    entries.setdefault(setting, {})[f"{key.operator} {key.bits}"] = [*choice]
    with contextlib.suppress(OSError):  # there is no directory to write to
        cache.store(_file(), entries)


def _stored(setting: str) -> dict[Class, Choice]:
    found = {}
    for key, entry in _every().get(setting, {}).items():
        operator, bits = key.split()
        found[Class(operator, int(bits))] = Choice(*entry)
    return found


def _every() -> dict[str, dict[str, list[Any]]]:
    """All stored choices of this machine, by setting and class."""
    return cache.stored(_file(), _valid) or {}


def _valid(entries: Mapping[str, Mapping[str, list[Any]]]) -> bool:
    return all(
        key.split()[0] in OPERATORS
        and 0 <= int(key.split()[1]) < _SIZES
        and name in NAMES
        and type(ns) is int
        and 0 < ns < 1 << 54
        and isinstance(busy, bool)
        for stored in entries.values()
        for key, (name, ns, busy) in stored.items()
    )
