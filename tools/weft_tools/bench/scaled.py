"""Baselines by a kernel of torch that would take seconds for all rows: they are measured on few,
and their times scaled.
"""

from __future__ import annotations

from weft.measure.timing import Statistics

_SLOW = 8.0
"""Times as long as the fastest way: a product that takes more is by no kernel made for its dtype,
so its time is proportional to the number of rows.
"""
_ROWS = 8  # of each rank


def measured_rows(m: int, ranks: int, slowdown: float) -> int:
    """The rows of all ranks, `m`, or the few on which a product is measured that is so slow."""
    return m if slowdown <= _SLOW else min(m, _ROWS * ranks)


def scaled(times: Statistics, factor: float) -> Statistics:
    """The times, multiplied."""
    median, mean, least, most, p99 = (factor * each for each in times[:-1])
    return Statistics(median, mean, least, most, p99, times.iterations)
