"""The signals of one-sided calls as instructions of a stream: kernels of one warp that raise
counters of a peer, and that wait until counters of this rank satisfy a comparison.

They differ from `stream_signals`, which serves plans: values are given by the host, any counter of
a selection (`count` counters from `start` on, with step `step`) may be raised by any rank, and a
wait may be for any comparison. Counters are unsigned; Triton has them as signed bits.

No argument is specialized, so that each kernel is compiled, and loaded, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.gpu.kernels.symmetric import (
    POLLS,
    acquire,
    all_arrived,
    limit_unless_timed_out,
    look,
    peer_pointer,
    time_by,
)

COMPARISONS = {"==": 1, ">": 2, ">=": 3, "<": 4, "<=": 5, "!=": 6}
"""Comparisons as sums of the relations that satisfy them: 1 equal, 2 greater, 4 less."""


@triton.jit(do_not_specialize=["rank", "peer", "start", "count", "step", "value", "replaces"])
def raise_kernel(counters, bases, rank, peer, start, count, step, value: tl.int64, replaces):
    """Add `value` to a selection of the peer's counters, or set them to it, after all earlier work
    of this stream.
    """
    all_arrived()
    first = peer_pointer(counters, bases, rank, peer)
    at = 0
    while at < count:
        counter = first + (start + at * step).to(tl.int64) * 8
        if replaces != 0:
            tl.atomic_xchg(counter, value.to(tl.int64), sem="release", scope="sys")
        else:
            tl.atomic_add(counter, value.to(tl.int64), sem="release", scope="sys")
        at += 1


@triton.jit
def satisfies(actual, comparison, value):
    """Whether ``actual <comparison> value``, by their bits as unsigned numbers."""
    one, other = actual.to(tl.uint64, bitcast=True), value.to(tl.uint64, bitcast=True)
    relation = tl.where(one == other, 1, tl.where(one > other, 2, 4))
    return (relation & comparison) != 0


@triton.jit(do_not_specialize=["start", "count", "step", "comparison", "value", "first", "limit"])
def compare_kernel(
    counters,
    start,
    count,
    step,
    comparison,
    value: tl.int64,
    timeout_record,  # int64*: 1 + the number of the counter, the value, the actual one, comparison
    first,  # the number of the first of `counters` in the record
    limit: tl.int64,
):
    """Block this stream until a pass over a selection of this rank's counters, one after the other,
    finds that each satisfies the comparison, for `limit` nanoseconds at most.

    Later work of the stream sees all that was put before the notifies that were seen. On a timeout
    it writes to `timeout_record` and returns; later waits then return at once.
    """
    expected = value.to(tl.int64)
    limit = limit_unless_timed_out(timeout_record, limit)
    clock = counters + start.to(tl.int64) * 8
    time_by(clock)  # what it returns may be of an earlier wait
    begin = time_by(clock)
    now = begin
    actual, at = expected, start * 0
    seen = start * 0  # counters in a row that satisfied it: all of them in turn are such a pass
    while (seen < count) & (now - begin <= limit):
        polls = 0  # of counters that do not satisfy it
        while (seen < count) & (polls < POLLS):
            counter = counters + (start + at * step).to(tl.int64) * 8
            actual = look(counter)
            if satisfies(actual, comparison, expected):
                actual = acquire(counter)  # it may be another value
            if satisfies(actual, comparison, expected):
                seen += 1
                at = (at + 1) % count
            else:
                seen = seen * 0
                polls += 1
        now = time_by(clock)
    if seen < count:
        free = expected * 0
        index = free + first + start + at * step
        if tl.atomic_cas(timeout_record, free, index + 1, sem="relaxed", scope="sys") == 0:
            tl.store(timeout_record + 1, expected)
            tl.store(timeout_record + 2, actual)
            tl.store(timeout_record + 3, free + comparison)
    tl.debug_barrier()
