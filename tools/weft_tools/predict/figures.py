"""The figures of a fused operator's overlap, from measured or predicted times of any one unit."""

from __future__ import annotations

VIEWS = ("compute", "communicate", "sequential", "pipelined")
"""The times from which the figures of overlap are computed, in this order."""
IN_CHUNKS = "compute in chunks"
"""The time of the products alone, cut as the operator that overlaps cuts them, with all rows there:
it tells what cutting costs from what waiting costs.
"""


def of_overlap(
    compute: float, communicate: float, sequential: float, pipelined: float
) -> dict[str, float]:
    """The figures of an operator that hides `communicate` behind `compute`, by their JSON keys."""
    return {
        "speedup": speedup(sequential, pipelined),
        "overlap_percent": overlap_percent(compute, communicate, pipelined),
        "limit_ratio": limit_ratio(compute, communicate, pipelined),
    }


def of_cutting(compute: float, in_chunks: float, overlapped: float) -> dict[str, float]:
    """What `overlapped` takes longer than one product, in two parts, by their JSON keys.

    ``chunking_ms``: ``in_chunks − compute``, the loss of several products in place of one.
    ``exposed_ms``: ``overlapped − in_chunks``, the communication that is not hidden: waits, and
    what the lane that multiplies moves and adds up itself. Noise may make either negative.
    """
    return {"chunking_ms": in_chunks - compute, "exposed_ms": overlapped - in_chunks}


def speedup(sequential: float, pipelined: float) -> float:
    """``sequential / pipelined``: how many times faster the fused operator is."""
    return sequential / pipelined


def overlap_percent(compute: float, communicate: float, pipelined: float) -> float:
    """``100 · max(0, 1 − (pipelined − compute) / communicate)``: the part of the communication that
    is hidden behind compute.

    The definition of the OSU micro-benchmarks for non-blocking collectives. `communicate` is
    measured alone, not derived from the other two. The value is not limited to 100: a larger one
    means that the fused operator took less time than compute alone, and so shows the noise.
    """
    return 100 * max(0.0, 1 - (pipelined - compute) / communicate)


def limit_ratio(compute: float, communicate: float, pipelined: float) -> float:
    """``pipelined / max(compute, communicate)``: 1.0 is perfect overlap, the limit."""
    return pipelined / max(compute, communicate)


def tflops(m: int, k: int, n: int, milliseconds: float) -> float:
    """``2·m·k·n / time`` in 1e12 operations per second: the rate of one rank's product of (m, k)
    and (k, n).
    """
    return 2 * m * k * n / (milliseconds * 1e-3) / 1e12
