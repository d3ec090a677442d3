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

_learned: dict[str, tuple[str, int, str]] = {}


def find(workload: Workload, link: Link | None) -> Variant | None:
    """The variant that was fastest when this workload, or one of its class of sizes, was measured;
    None if none was.
    """
    key = _key(workload, link)
    found = _learned.get(key) or _known().get(key)
    return Variant(*found) if found else None


def remember(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, here and in processes that start from now on."""
    _store({_key(workload, link): (*variant,)})


def learn(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, here and, once this process has ended, in those that start
    then.
    """
    if not _learned:
        atexit.register(_keep)
    _learned[_key(workload, link)] = (*variant,)


def _keep() -> None:
    with contextlib.suppress(OSError):  # without a directory to write to, nothing is remembered
        _store(_learned)


def _store(more: Mapping[str, tuple[str, int, str]]) -> None:
    _known.cache_clear()  # others may have stored something
    cache.store(cache.of_this_machine("tuned"), {**_known(), **more})
    _known.cache_clear()


@once
def _known() -> dict[str, tuple[str, int, str]]:
    return cache.stored(cache.of_this_machine("tuned"), _fits) or {}


def _fits(found: dict[str, tuple[str, int, str]]) -> bool:
    return all(
        isinstance(name, str) and type(rows) is int and rows > 0 and order in ORDERS
        for name, rows, order in found.values()
    )


def _key(workload: Workload, link: Link | None) -> str:
    operator, rows, k, n, dtype, out_dtype, packed, symmetric = workload
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    lies = f"{'' if symmetric else 'staged, '}{'packed' if packed else 'plain'}"
    size = f"{len(rows)} ranks, up to {size_class(max(rows))} rows of each"
    return f"{operator} {size} x {k} x {n} {dtype} to {out_dtype} {lies} {over}"
