"""The speeds of a machine's parts: of local products, and of the links between ranks. Sizes are in
bytes, bandwidths in GB/s of 1e9 bytes, and times in seconds, or in microseconds for names that end
in ``_us``.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_tools.predict.interpolation import RateGrid

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by dtype."""


@dataclass(frozen=True)
class ProductRate:
    """The local product ``(rows, K) @ (K, N)``: ``fixed + K·N·itemsize / weight_gbs + 2·rows·K·N /
    tflops``.

    `weight_gbs` is the rate at which a packed weight is read, or a plain one read and packed.
    `factors` are measured times divided by this formula, by rows and by K·N.
    """

    tflops: float
    weight_gbs: float = 1e6
    fixed_us: float = 0.0
    factors: RateGrid | None = None

    def seconds(self, rows: int, k: int, n: int, itemsize: int) -> float:
        """The time of one product; engines skip one of no rows."""
        if not rows:
            return 0.0
        fit = (
            self.fixed_us * 1e-6
            + k * n * itemsize / (self.weight_gbs * 1e9)
            + 2 * rows * k * n / (self.tflops * 1e12)
        )
        return fit * (self.factors.at(rows, k * n) if self.factors else 1.0)


@dataclass(frozen=True)
class LinkRate:
    """A link between two ranks: ``latency + bytes / gbs`` for each transfer.

    Attributes:
        reach: the size of the groups of ranks that it joins; None for all ranks.
        shared: a rank's transfers share one link out and one in, not one for each peer.
        idle: an emulated link: a transfer copies at memory speed and then sleeps until the link
            would be done; a rank makes one transfer at a time.
        factors: measured times divided by the formula, by bytes.
        core_gbs: the bandwidth at which a core that does nothing else sends or receives, for links
            that need the processor.
        line_us: the time for which a core waits for one cache line over the link: for each notify
            and, `Machine.fetches` at a time, for each peer from which it reads.
    """

    gbs: float
    latency_us: float = 0.0
    reach: int | None = None
    shared: bool = False
    idle: bool = False
    factors: RateGrid | None = None
    core_gbs: float | None = None
    line_us: float = 0.0

    @property
    def core(self) -> float:
        """The part of a core's time that a transfer takes, at each of its ends."""
        return self.gbs / self.core_gbs if self.core_gbs else 0.0

    def seconds(self, size: int) -> float:
        """Seconds of a transfer of `size` bytes that does not share the link."""
        return self.latency_us * 1e-6 + self.passing(size)

    def passing(self, size: int) -> float:
        """Seconds for which a transfer of `size` bytes occupies the link: its time without the
        latency.
        """
        return passing(size, self.gbs, self.factors)


def passing(size: int, gbs: float, factors: RateGrid | None) -> float:
    """Seconds of `size` bytes at a bandwidth, times the measured factor for this size."""
    return size / (gbs * 1e9) * (factors.at(size) if factors and size else 1.0)
