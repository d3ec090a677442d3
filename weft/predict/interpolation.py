"""Between measured values: linear in the logarithms of everything, since times and sizes range over
orders of magnitude.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log


@dataclass(frozen=True)
class Grid:
    """Positive `values` where all points of the `axes` cross, each axis rising, the last one
    fastest.
    """

    axes: Sequence[Sequence[float]]
    values: Sequence[float]

    def at(self, *point: float) -> float:
        """The value at a point; beyond the end of an axis it is that at the end."""
        corners = [(0, 1.0)]
        for axis, x in zip(self.axes, point, strict=True):
            right = min(max(bisect_right(axis, x), 1), len(axis) - 1)
            left = right - 1
            part = min(max(log(x / axis[left]) / log(axis[right] / axis[left]), 0.0), 1.0)
            sides = [(place, share) for place, share in ((left, 1 - part), (right, part)) if share]
            corners = [
                (index * len(axis) + place, weight * share)
                for index, weight in corners
                for place, share in sides
            ]
        return exp(sum(weight * log(self.values[index]) for index, weight in corners))
