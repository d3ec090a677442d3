"""Notify and wait as instructions of a stream: kernels of one warp.

What a wait must reach is read on the device: the base that executions before it have promised, which is kept there, and a count.
So a wait in a CUDA graph means something new in every replay, which a stream's own wait for a value cannot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.symmetric import notify, wait


@triton.jit
def notify_kernel(counter, bases, rank, peer):
    """Add 1 to the peer's counter, after everything before it on this stream."""
    notify(counter, bases, rank, peer)


@triton.jit
def wait_kernel(counters, index, base, count, ledger, polls):
    """Hold this stream until the counter has grown by `count` beyond its base, for at most `polls` looks."""
    wait(counters, index, tl.load(base + index) + count, ledger, polls)
