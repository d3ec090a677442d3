"""The fastest variants by workload, measured by `weft tune` or by calls, and stored in the cache
directory with their times, so that later processes can tell whether they are still true.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Mapping
from functools import cache as once
from pathlib import Path
from typing import Any, NamedTuple

import weft.cache as cache
from weft.schedules.workload import ORDERS, Variant, Workload, size_class

Link = tuple[float, float]
"""Bandwidth in Gbit/s and latency in microseconds of an emulated link."""

Stored = Mapping[str, Any]
"""A measurement as stored in the cache directory: the fields of the variant, `ns` and `busy`."""


class Measured(NamedTuple):
    """The variant that was the fastest: its nanoseconds per element of all ranks' rows of the
    product, and whether the ranks had to wait for cores while it was measured.
    """

    variant: Variant
    ns: float
    busy: bool = False


_measured: dict[str, Stored] = {}
"""Measurements of calls of this process, stored when it ends."""


def find(workload: Workload, link: Link | None, hardware: str = "") -> Measured | None:
    """The measurement of this workload, or of another of the same size class; None if there is
    none. `hardware` describes the device of worlds whose lanes are streams.
    """
    key = _key(workload, link, hardware)
    fields = {**(_measured.get(key) or _stored().get(key) or {})}
    if not fields:
        return None
    ns, busy = fields.pop("ns"), fields.pop("busy")
    return Measured(Variant.from_json(fields), float(ns), bool(busy))


def remember(workload: Workload, link: Link | None, fastest: Measured, hardware: str = "") -> None:
    """Let `find` return this measurement, in this process and in all that start later."""
    _store({_key(workload, link, hardware): _to_json(fastest)})


def learn(workload: Workload, link: Link | None, fastest: Measured) -> None:
    """Let `find` return this measurement, in this process and in all that start after its end."""
    if not _measured:
        atexit.register(_store_measured)
    _measured[_key(workload, link)] = _to_json(fastest)


def forget() -> None:
    """Forget all measurements of this machine, of this process too."""
    _measured.clear()
    cache.remove(cache.of_this_machine("tuned"))
    _stored.cache_clear()


def kept() -> tuple[Path | None, int, int]:
    """The file of the measurements, None without a directory; the number of them; and how many of
    them were made on a busy machine.
    """
    entries = {**_stored(), **_measured}
    busy = sum(bool(each["busy"]) for each in entries.values())
    return cache.file(cache.of_this_machine("tuned")), len(entries), busy


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


def _to_json(measured: Measured) -> Stored:
    variant, ns, busy = measured
    return {**variant.to_json(), "ns": ns, "busy": busy}


def _valid(entries: dict[str, Stored]) -> bool:
    return all(
        each.keys() - {"device"} == {*Variant._fields, "ns", "busy"} - {"device"}
        and Variant.from_json({name: each[name] for name in each.keys() - {"ns", "busy"}})
        and isinstance(each["algorithm"], str)
        and type(each["pieces"]) is int
        and each["pieces"] > 0
        and each["order"] in ORDERS
        and isinstance(each["ns"], int | float)
        and isinstance(each["busy"], bool)
        for each in entries.values()
    )


def _key(workload: Workload, link: Link | None, hardware: str = "") -> str:
    operator, rows, k, n, dtype, out_dtype, packed, symmetric = workload
    over = f"over {link[0]:g} Gbit/s {link[1]:g} us" if link else "in shared memory"
    operands = f"{'' if symmetric else 'staged, '}{'packed' if packed else 'plain'}"
    size = f"{len(rows)} ranks, up to {size_class(max(rows))} rows of each"
    device = f" on {hardware}" if hardware else ""
    return f"{operator} {size} x {k} x {n} {dtype} to {out_dtype} {operands} {over}{device}"
