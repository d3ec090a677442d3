"""Interpolation between measured values: linear in the logarithms of points and values, since times
and sizes range over orders of magnitude.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True)
class RateGrid:
    """Positive `values` at all points of the product of ascending `axes`, in row-major order."""

    axes: Sequence[Sequence[float]]
    values: Sequence[float]

    def at(self, *point: float) -> float:
        """The value at a point; coordinates beyond the end of an axis are moved to the end."""
        corners = [(0, 1.0)]
        for axis, x in zip(self.axes, point, strict=True):
            right = min(max(bisect_right(axis, x), 1), len(axis) - 1)
            left = right - 1
            part = min(max(log(x / axis[left]) / log(axis[right] / axis[left]), 0.0), 1.0)
            sides = [(side, share) for side, share in ((left, 1 - part), (right, part)) if share]
            corners = [
                (index * len(axis) + side, weight * share)
                for index, weight in corners
                for side, share in sides
            ]
        return exp(sum(weight * log(self.values[index]) for index, weight in corners))
