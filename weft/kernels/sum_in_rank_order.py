"""The sum over ranks of what they put into this rank's inbox, in rank order, in float32, rounded once.

The same bits on every run, whatever arrived first, and on every rank that adds the same things.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.symmetric import wait


@triton.jit
def sum_in_rank_order_kernel(
    inbox,  # (RANKS, pitch): a place for each source
    bias,
    out,
    counters,
    calls,
    ledger,
    size,  # elements to add up
    pitch,  # elements between the places of two sources
    N,
    share,  # what the sum is multiplied by: 1, or 1 / RANKS for an average
    polls,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    call = tl.load(calls) + 1
    for source in tl.static_range(RANKS):
        wait(counters, RANKS + source, call, ledger, polls)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        total = tl.load(inbox + offsets, mask=inside).to(tl.float32)
        for source in tl.static_range(1, RANKS):
            total += tl.load(inbox + source * pitch + offsets, mask=inside).to(tl.float32)
        total *= share
        if BIAS:
            total += tl.load(bias + offsets % N, mask=inside).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK
