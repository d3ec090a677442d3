"""What was measured to be the fastest variant, by `weft tune` or in calls, by workload, remembered
in the cache directory.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Mapping
from functools import cache as once

import weft.cache as cache
from weft.schedules.workload import ORDERS, Variant, Workload, size_class

Link = tuple[float, float]
"""The Gbit/s and microseconds of an emulated link."""

Stored = Mapping[str, str | int]
"""A variant as the cache directory has it: its fields by name."""

_learned: dict[str, Stored] = {}


def find(workload: Workload, link: Link | None) -> Variant | None:
    """The variant that was fastest when this workload, or one of its class of sizes, was measured;
    None if none was.
    """
    key = _key(workload, link)
    found = _learned.get(key) or _known().get(key)
    return Variant(**found) if found else None  # type: ignore[arg-type]


def remember(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, here and in processes that start from now on."""
    _store({_key(workload, link): variant._asdict()})


def learn(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, here and, once this process has ended, in those that start
    then.
    """
    if not _learned:
        atexit.register(_keep)
    _learned[_key(workload, link)] = variant._asdict()


def _keep() -> None:
    with contextlib.suppress(OSError):  # without a directory to write to, nothing is remembered
        _store(_learned)


def _store(more: Mapping[str, Stored]) -> None:
    _known.cache_clear()  # others may have stored something
    cache.store(cache.of_this_machine("tuned"), {**_known(), **more})
    _known.cache_clear()


@once
def _known() -> dict[str, Stored]:
    return cache.stored(cache.of_this_machine("tuned"), _fits) or {}


def _fits(found: dict[str, Stored]) -> bool:
    return all(
        each.keys() == {*Variant._fields}
        and isinstance(each["algorithm"], str)
        and type(each["pieces"]) is int
        and each["pieces"] > 0
        and each["order"] in ORDERS
        for each in found.values()
    )


def _key(workload: Workload, link: Link | None) -> str:
    operator, rows, k, n, dtype, out_dtype, packed, symmetric = workload
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    lies = f"{'' if symmetric else 'staged, '}{'packed' if packed else 'plain'}"
    size = f"{len(rows)} ranks, up to {size_class(max(rows))} rows of each"
    return f"{operator} {size} x {k} x {n} {dtype} to {out_dtype} {lies} {over}"
