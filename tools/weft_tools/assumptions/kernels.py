"""Kernels that ask a GPU. Those that wait end by themselves after a time of the GPU's clock.

What the host reads while a kernel runs is written through to the host's memory, without atomics,
which may not work there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BEGUN, TIMED_OUT = 1, 2
"""States of a kernel that waits for a flag: it waits, or has ended because of its limit; it is 3
after an end because of the flag.
"""

HOLDING_WARPS = 16
"""Warps of a program of `hold_kernel`."""


@triton.jit(do_not_specialize=["nanoseconds"], do_not_specialize_on_alignment=["flag", "state"])
def wait_kernel(flag, state, nanoseconds: tl.int64):
    """Wait until an int32 `flag` is 1, for at most `nanoseconds`; `state`, an int32, becomes one of
    the states.
    """
    tl.store(state, 1, cache_modifier=".wt")
    begun = globaltimer()
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen == 0) & (globaltimer() - begun < nanoseconds):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(state, 2 + seen, cache_modifier=".wt")


@triton.jit(do_not_specialize=["nanoseconds"])
def hold_kernel(begun, nanoseconds: tl.int64):
    """Keep the thread slots of each program for `nanoseconds`, after its element of `begun`, int32,
    has become 1.
    """
    tl.store(begun + tl.program_id(0), 1, cache_modifier=".wt")
    start = globaltimer()
    while globaltimer() - start < nanoseconds:
        pass


@triton.jit(do_not_specialize_on_alignment=["target"])
def mark_kernel(target):
    """Set an int32 to 1, after all earlier work of the stream."""
    tl.store(target, 1, cache_modifier=".wt")


@triton.jit
def constant_kernel(target, VALUE: tl.constexpr):
    """Write a value; each value is its own kernel, which has to be loaded."""
    tl.store(target, VALUE)


@triton.jit(do_not_specialize=["value"])
def swap_kernel(target, value: tl.int64, old):
    """Set an int64 `target` to `value` if it is 0; `old` becomes what it was."""
    new = value.to(tl.int64)
    tl.store(old, tl.atomic_cas(target, new * 0, new, sem="relaxed", scope="sys"))


@triton.jit(do_not_specialize=["number"])
def poll_kernel(counter, number):
    """Poll an int64 `counter`, which stays 0, as waits of the engine do."""
    left = number
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    while (seen == 0) & (left > 1):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        left -= 1


@triton.jit(do_not_specialize=["number"])
def clock_kernel(times, number):
    """Read the GPU's clock `number` times: `times`, int64 (3,), becomes the first time, the last,
    and the smallest step in between.
    """
    first = globaltimer()
    last = first
    step = first
    left = number
    while left > 0:
        now = globaltimer()
        step = tl.where(now > last, tl.minimum(now - last, step), step)
        last = now
        left -= 1
    tl.store(times, first)
    tl.store(times + 1, last)
    tl.store(times + 2, step)
