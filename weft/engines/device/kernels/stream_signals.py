"""Notify and wait as instructions of a stream: kernels of one warp.

What a wait must reach is read on the device: the base that executions before it have promised,
which is kept there, and a count. So a wait in a CUDA graph means something new in every replay,
which a stream's own wait for a value cannot.

No number is special to them, so that each is compiled, and loaded, once: loading a kernel may wait
for all that the GPU does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.engines.device.kernels.symmetric import notify, wait


@triton.jit(do_not_specialize=["index", "rank", "peer"])
def notify_kernel(counters, index, bases, rank, peer):
    """Add 1 to the peer's counter, after everything before it on this stream."""
    notify(counters + index * 8, bases, rank, peer)


@triton.jit(do_not_specialize=["index", "count", "max_polls"])
def wait_kernel(counters, index, base, count, timeout_record, max_polls):
    """Hold this stream until the counter has grown by `count` beyond its base, for at most
    `max_polls` looks.
    """
    wait(counters, index, tl.load(base + index) + count, timeout_record, max_polls)
