"""What `weft tune` measured to be the fastest variant, by workload, remembered in the cache directory."""

from __future__ import annotations

from functools import cache as once

from weft import cache
from weft.schedules.workload import Variant, Workload, size_class

Link = tuple[float, float]
"""The Gbit/s and microseconds of an emulated link."""


def find(workload: Workload, link: Link | None) -> Variant | None:
    """The variant that was fastest when this workload, or one of its class of sizes, was tuned; None if none was."""
    found = _known().get(_key(workload, link))
    return Variant(*found) if found else None


def remember(workload: Workload, link: Link | None, variant: Variant) -> None:
    """Let `find` return this variant, here and in processes that start from now on."""
    cache.store(cache.of_this_machine("tuned"), {**_known(), _key(workload, link): [*variant]})
    _known.cache_clear()


@once
def _known() -> dict[str, tuple[str, int, str]]:
    return cache.stored(cache.of_this_machine("tuned")) or {}


def _key(workload: Workload, link: Link | None) -> str:
    operator, rows, k, n, dtype, out_dtype, packed, symmetric = workload
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    lies = f"{'' if symmetric else 'staged, '}{'packed' if packed else 'plain'}"
    size = f"{len(rows)} ranks, up to {size_class(max(rows))} rows of each"
    return f"{operator} {size} x {k} x {n} {dtype} to {out_dtype} {lies} {over}"
