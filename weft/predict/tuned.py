"""What `weft tune` measured to be the fastest way, by case, remembered in the cache directory."""

from __future__ import annotations

from functools import cache as once

from weft import cache
from weft.predict.forecast import Candidate, Case

Link = tuple[float, float]
"""The Gbit/s and microseconds of an emulated link."""


def find(case: Case, link: Link | None) -> Candidate | None:
    """The way that was fastest when this case was tuned; None if it was not."""
    found = _known().get(_key(case, link))
    return Candidate(*found) if found else None


def remember(case: Case, link: Link | None, way: Candidate) -> None:
    """Let `find` return this way, here and in processes that start from now on."""
    cache.store(cache.of_this_machine("tuned"), {**_known(), _key(case, link): [*way]})
    _known.cache_clear()


@once
def _known() -> dict[str, tuple[str, int, str]]:
    return cache.stored(cache.of_this_machine("tuned")) or {}


def _key(case: Case, link: Link | None) -> str:
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    rows, lies = ",".join(map(str, case.rows)), f"{'' if case.symmetric else 'staged, '}{'packed' if case.packed else 'plain'}"
    return f"{case.operator} {rows} rows x {case.k} x {case.n} {case.dtype} to {case.out_dtype} {lies} {over}"
