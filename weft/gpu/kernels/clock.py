"""The clock by which a kernel traces itself: nanoseconds of the GPU, or of the host if kernels are
interpreted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.language.extra.hip import memrealtime

import weft._native as _native
from weft.gpu.kernels.symmetric import INTERPRETED

CLOCK = "host" if INTERPRETED else "amd" if torch.version.hip else "nvidia"
"""The clock of kernels in this process."""

TICK = 10 if CLOCK == "amd" else 1
"""Nanoseconds per tick: AMD's clock has 100 MHz."""


def _host() -> int:
    return _native.now()


_host.__triton_builtin__ = True  # type: ignore[attr-defined]  # a kernel may name it


@triton.jit
def ticks(clock: tl.constexpr):
    """The time of a `clock`, after all that this program has stored before."""
    tl.debug_barrier()
    if clock == "nvidia":
        return globaltimer()
    if clock == "amd":
        return memrealtime()
    return _host()
