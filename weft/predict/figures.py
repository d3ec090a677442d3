"""The figures of an overlap, measured or predicted. All times of a call have the same unit."""

from __future__ import annotations

VIEWS = ("compute", "communicate", "sequential", "pipelined")
"""The times of which an overlap's figures are made, in this order."""


def of_overlap(
    compute: float, communicate: float, sequential: float, pipelined: float
) -> dict[str, float]:
    """The figures of a benchmark that hides `communicate` behind `compute`, by the names that its
    JSON gives them.
    """
    return {
        "speedup": speedup(sequential, pipelined),
        "overlap_percent": overlap_percent(compute, communicate, pipelined),
        "limit_ratio": limit_ratio(compute, communicate, pipelined),
    }


def speedup(sequential: float, pipelined: float) -> float:
    """``sequential / pipelined``: how many times faster the fused operator is."""
    return sequential / pipelined


def overlap_percent(compute: float, communicate: float, pipelined: float) -> float:
    """``100 · max(0, 1 − (pipelined − compute) / communicate)``: how much of the communication is
    hidden behind compute.

    The definition of the OSU micro-benchmarks for non-blocking collectives. `communicate` is
    measured alone, not derived from the other two. Not cut off at 100: more says that the fused
    operator took less than compute alone, that is, how far noise reaches.
    """
    return 100 * max(0.0, 1 - (pipelined - compute) / communicate)


def limit_ratio(compute: float, communicate: float, pipelined: float) -> float:
    """``pipelined / max(compute, communicate)``: 1.0 is perfect overlap of the two, which neither
    can beat by overlapping.
    """
    return pipelined / max(compute, communicate)


def tflops(m: int, k: int, n: int, milliseconds: float) -> float:
    """``2·m·k·n / time`` in 1e12 operations per second: the rate of one rank's product of (m, k)
    and (k, n).
    """
    return 2 * m * k * n / (milliseconds * 1e-3) / 1e12
