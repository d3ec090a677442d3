"""The clock of kernels, in nanoseconds: the GPU's, or the host's if kernels are interpreted."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import weft._native as _native


def _target(_semantic: Any = None) -> Any:
    """A constant of kernels: "cuda" or "hip", or "host" if they are interpreted."""
    return "host" if _semantic is None else tl.constexpr(_semantic.builder.options.backend_name)


def _host() -> int:
    return _native.now()


# kernels may name them
_target.__triton_builtin__ = True  # type: ignore[attr-defined]
_host.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def nanoseconds():
    """The time, as the warp that executes this reads it: each may get another one."""
    if _target() == "cuda":
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1
        )
    elif _target() == "hip":  # ticks of 10 ns; a scalar load, so another counter than vector loads
        now = 10 * tl.inline_asm_elementwise(
            "s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=s", [], tl.int64, is_pure=False, pack=1
        )
    else:
        now = _host()
    return now  # one return: Triton 3.9 compiles what follows a branch that returns


@triton.jit
def time_of_all_stores():
    """The time after all that this program has stored before."""
    tl.debug_barrier()
    return nanoseconds()


@triton.jit(do_not_specialize=["index"])
def stamp_kernel(times, index):
    """Write the time to `times[index]`, int64, after all earlier work of this stream."""
    tl.store(times + index, nanoseconds())
