"""Ranges of calls that torch's profilers show, for engines that put a call on other threads or on a
device. The native core makes those of the host engine (`native/python/range.hpp`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOT_SHOWN = nullcontext()


def in_range(name: str) -> AbstractContextManager[object]:
    """A context that an active profiler of torch's shows as ``weft:NAME``."""
    if not profiler._is_profiler_enabled:
        return _NOT_SHOWN
    shown: AbstractContextManager[object] = profiler.record_function(f"weft:{name}")
    return shown
