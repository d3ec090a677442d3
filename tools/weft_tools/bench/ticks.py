"""Ticks of the processor's counter of cycles."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import weft._native as _native

_NAMES = {"x86_64": "time-stamp counter", "aarch64": "virtual counter"}


class HostTicks:
    """The counter of this processor, and its frequency since this object was made."""

    def __init__(self) -> None:
        self._start = _native.cycles(), _native.now()

    def counter(self) -> dict[str, Any]:
        """The counter's name, None where weft knows none, and its frequency in MHz."""
        ticks, nanoseconds = _native.cycles() - self._start[0], _native.now() - self._start[1]
        name = _NAMES.get(platform.machine())
        return {"name": name, "mhz": round(1e3 * ticks / nanoseconds, 1)}

    def spent(self, work: Callable[[], object]) -> int:
        """The ticks while this thread executes `work`."""
        start = _native.cycles()
        work()
        return _native.cycles() - start
