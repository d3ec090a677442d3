"""Notify and wait as instructions of a stream: kernels of one warp.

A wait computes its value on the device: a count plus the base, the sum of the increments of earlier
executions, which is in device memory. So a wait in a CUDA graph waits for another value in every
replay, unlike a stream's own wait for a value.

No argument is specialized, so that each kernel is compiled, and loaded, once: loading a kernel may
wait for all work of the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.gpu.kernels.symmetric import notify, wait


@triton.jit(do_not_specialize=["index", "rank", "peer"])
def notify_kernel(counters, index, bases, rank, peer):
    """Add 1 to the peer's counter, after all earlier work of this stream."""
    notify(counters + index * 8, bases, rank, peer)


@triton.jit(do_not_specialize=["index", "count", "limit"])
def wait_kernel(counters, index, base, count, timeout_record, limit: tl.int64):
    """Block this stream until the counter has reached its base plus `count`, for at most `limit`
    nanoseconds.
    """
    wait(counters, index, tl.load(base + index) + count, timeout_record, limit)
