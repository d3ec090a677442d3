"""Time on all ranks: from a barrier to the last rank's finish, several things in turn within one run."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.engines import engine
from weft.schedules.barrier import barrier
from weft.world import World

BUDGET = 10.0
"""Seconds that the iterations of one view may take together; slower views get fewer."""


class Statistics(NamedTuple):
    """Milliseconds over `iterations`, each of them the time of the slowest rank."""

    median: float
    min: float
    max: float
    iterations: int


def summarize(seconds: Sequence[float]) -> Statistics:
    """The statistics of the iterations' seconds."""
    times = [1e3 * second for second in seconds]
    return Statistics(statistics.median(times), min(times), max(times), len(times))


class Stopwatch:
    """Times calls that all ranks of a world make together."""

    def __init__(self, world: World) -> None:
        self.world, self.barrier = world, barrier(world.ranks)

    def time(self, call: Callable[[], object]) -> float:
        """This rank's seconds from a barrier to the end of its own `call`."""
        engine(self.world).execute(self.barrier, {})
        start = perf_counter()
        call()
        return perf_counter() - start

    def interleave(
        self, views: Mapping[str, Callable[[], object]], warmup: int, iterations: int, advance: Callable[[], None] = lambda: None
    ) -> dict[str, Statistics]:
        """Time each of `views` `iterations` times, one of each per round, after `warmup` rounds.

        Rounds have an order drawn anew, alike on all ranks, so that no view always follows the same other. At least one round
        warms up, and tells which views are so slow that their iterations would take longer than `BUDGET`: these are measured
        fewer times, the slowest by this one run alone. `advance` is called after every round.
        """
        first = dict(zip(views, largest(self.world, [self.time(call) for call in views.values()]), strict=True))
        turns = {name: min(iterations, max(1, int(BUDGET / max(seconds, 1e-9)))) for name, seconds in first.items()}
        samples: dict[str, list[float]] = {name: [seconds] if seconds >= BUDGET else [] for name, seconds in first.items()}
        timed = [name for name in views if not samples[name]]
        shuffle = random.Random(0).shuffle
        with no_garbage_collection():
            for turn in range(1 - max(warmup, 1), iterations):
                advance()
                shuffle(timed)
                for name in timed:
                    if 0 <= turn < turns[name]:
                        samples[name].append(self.time(views[name]))
                    elif turn < 0 and turns[name] == iterations:
                        self.time(views[name])
        return {name: summarize(largest(self.world, own)) for name, own in samples.items()}


def largest(world: World, values: Sequence[float]) -> list[float]:
    """Element by element the largest value that any rank has; collective over the default process group."""
    merged = torch.tensor(values, dtype=torch.float64)
    if world.ranks > 1:
        dist.all_reduce(merged, dist.ReduceOp.MAX)
    return merged.tolist()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A part of a measurement that Python's garbage collector must not interrupt."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
