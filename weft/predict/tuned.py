"""The fastest variants by workload, measured by `weft tune` or by calls, and stored in the cache
directory.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Mapping
from functools import cache as once

import weft.cache as cache
from weft.schedules.workload import ORDERS, Variant, Workload, size_class

Link = tuple[float, float]
"""Bandwidth in Gbit/s and latency in microseconds of an emulated link."""

Stored = Mapping[str, str | int]
"""A variant as stored in the cache directory: its fields by name."""

_measured: dict[str, Stored] = {}
"""Fastest variants that calls of this process have measured, stored when it ends."""


def find(workload: Workload, link: Link | None) -> Variant | None:
    """The variant that was measured to be the fastest for this workload or another of the same size
    class; None if none was measured.
    """
    key = _key(workload, link)
    fastest = _measured.get(key) or _stored().get(key)
    return Variant(**fastest) if fastest else None  # type: ignore[arg-type]


def remember(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, in this process and in all that start later."""
    _store({_key(workload, link): variant._asdict()})


def learn(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, in this process and in all that start after its end."""
    if not _measured:
        atexit.register(_store_measured)
    _measured[_key(workload, link)] = variant._asdict()


def _store_measured() -> None:
    with contextlib.suppress(OSError):  # there is no directory to write to
        _store(_measured)


def _store(more: Mapping[str, Stored]) -> None:
    _stored.cache_clear()  # other processes may have stored variants
    cache.store(cache.of_this_machine("tuned"), {**_stored(), **more})
    _stored.cache_clear()


@once
def _stored() -> dict[str, Stored]:
    return cache.stored(cache.of_this_machine("tuned"), _valid) or {}


def _valid(entries: dict[str, Stored]) -> bool:
    return all(
        each.keys() == {*Variant._fields}
        and isinstance(each["algorithm"], str)
        and type(each["pieces"]) is int
        and each["pieces"] > 0
        and each["order"] in ORDERS
        for each in entries.values()
    )


def _key(workload: Workload, link: Link | None) -> str:
    operator, rows, k, n, dtype, out_dtype, packed, symmetric = workload
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    operands = f"{'' if symmetric else 'staged, '}{'packed' if packed else 'plain'}"
    size = f"{len(rows)} ranks, up to {size_class(max(rows))} rows of each"
    return f"{operator} {size} x {k} x {n} {dtype} to {out_dtype} {operands} {over}"
