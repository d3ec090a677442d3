"""The fastest variants by class of calls, measured by ``weft tune`` or by calls, in one file of the
cache directory, with their times, so that later processes can check them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import weft.cache as cache
from weft.schedules.workload import ORDERS, Variant, Workload, size_class

Entry = Mapping[str, Any]
"""A measurement as it is stored: the fields of the variant, `ns` and `busy`."""


class Measured(NamedTuple):
    """The variant that was the fastest: its nanoseconds per unit of work (`Call.work`), and whether
    the ranks had to wait for cores while it was measured.
    """

    variant: Variant
    ns: float
    busy: bool = False


def key(workload: Workload, setting: str) -> str:
    """The name of the class of a workload in the `setting` of an engine."""
    case = workload
    operands = f"{'' if case.symmetric else 'staged, '}{'packed' if case.packed else 'plain'}"
    kernel = f" by {case.kernel}" if case.kernel else ""
    size = f"{case.ranks} ranks, up to {size_class(max(case.rows))} rows of each"
    shape = f"{size} x {case.k} x {case.n}{kernel} {case.dtype} to {case.out_dtype}"
    return f"{case.operator} {shape} {operands}, {setting}"


def find(name: str) -> Measured | None:
    """The measurement of the class of this name (`key`); None if there is none."""
    found = _entries(cache.file(_name())).get(name)
    return None if found is None else _measured(found)


def remember(name: str, fastest: Measured) -> None:
    """Let `find` return a measurement, in this process and in all that start later. Raises
    `OSError` without a writable directory.
    """
    _entries.cache_clear()  # other processes may have stored more
    variant, ns, busy = fastest
    entry = {**variant.to_json(), "ns": ns, "busy": busy}
    cache.store(_name(), {**_entries(cache.file(_name())), name: entry})
    _entries.cache_clear()


def learn(name: str, fastest: Measured) -> None:
    """`remember`, if there is a directory to write to."""
    with contextlib.suppress(OSError):
        remember(name, fastest)


def forget() -> None:
    """Forget all measurements of this machine."""
    cache.remove(_name())
    _entries.cache_clear()


def kept() -> tuple[Path | None, int, int]:
    """The file of the measurements, None without a directory; the number of them; and how many of
    them were made on a busy machine.
    """
    file = cache.file(_name())
    entries = _entries(file).values()
    return file, len(entries), sum(bool(each["busy"]) for each in entries)


def _name() -> str:
    return cache.of_this_machine("variants")


@lru_cache(1)
def _entries(file: Path | None) -> dict[str, Entry]:
    """The measurements in the file."""
    return cache.stored(_name(), _valid) or {}


def _measured(entry: Entry) -> Measured:
    fields = {**entry}
    ns, busy = fields.pop("ns"), fields.pop("busy")
    return Measured(Variant.from_json(fields), float(ns), bool(busy))


def _valid(entries: Mapping[str, Entry]) -> bool:
    return all(
        isinstance(variant.algorithm, str)
        and type(variant.pieces) is int
        and variant.pieces > 0
        and variant.order in ORDERS
        and ns >= 0
        and isinstance(each["busy"], bool)
        for each in entries.values()
        for variant, ns, _ in [_measured(each)]
    )
