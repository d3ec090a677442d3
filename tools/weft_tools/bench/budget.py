"""The time of a measurement, by whose end each of its parts ends, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

from weft.measure.timing import largest
from weft.world import World

PREPARING = 0.4
"""The part of the time that setting a link and tuning may take."""
_FITS = 0.8
"""A link that was set by a product is set again if the product takes less than this part of that
time: other programs had the cores.
"""
_FEWEST, _MOST, _ROUNDS = 3, 10, 0.1  # rounds of a product, and the part of the time for them


class Budget:
    """The `seconds` from now on that a measurement may take; `left` is collective."""

    def __init__(
        self, world: World, seconds: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self.world = world
        self.clock = clock
        self.ends = clock() + seconds

    def left(self) -> float:
        """The seconds that are left on the rank that has the fewest, at least 0."""
        return max(0.0, -largest(self.world, [self.clock() - self.ends])[0])

    def part(self, share: float) -> Budget:
        """A share of what is left."""
        return Budget(self.world, share * self.left(), self.clock)


def shortest(time: Callable[[], float], budget: Budget) -> float:
    """The shortest of several times, fewer if the budget is short: other programs make times
    longer, never shorter.
    """
    until, found = budget.part(_ROUNDS), list[float]()
    while len(found) < _FEWEST or (len(found) < _MOST and until.left()):
        found.append(time())
        if not budget.left():
            break
    return min(found)


def fitted(
    time: Callable[[], float],
    set_link: Callable[[float], None],
    tune: Callable[[Budget], bool],
    budget: Budget,
) -> bool:
    """Set a link by the time of a product, and tune on it; whether tuning has ended.

    The product is timed again afterwards, and a link that does not fit it any more is set again.
    """
    fits, tuned = math.inf, False
    while (product := shortest(time, budget)) < _FITS * fits:
        set_link(product)
        fits, tuned = product, tune(budget)
        if not budget.left():
            break
    return tuned
