"""Timing of calls that all ranks of a world make together: from a barrier to the last rank's end.

Candidates are measured in one run, in rounds (`race`), so that noise affects all of them equally.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from weft.engines import use_reference
from weft.errors import WeftError
from weft.ops.barrier import barrier
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.world import World, init
from weft.world.values import all_gather_values

BUDGET = 24.0
"""The most seconds for all iterations of all views, each of which has an equal share: slower views
get fewer iterations, but `FEWEST`, unless a call takes a quarter of it and is not `QUICK`.
"""
FEWEST = 3
QUICK = 0.05
"""Seconds: calls that take less have their `FEWEST` runs even where no time is left."""

TIMEOUT = 600.0  # seconds; a baseline may take longer on one rank than on another

Found = TypeVar("Found")


class Statistics(NamedTuple):
    """Milliseconds of `iterations`, each the time of the slowest rank.

    p99 is the shortest time that 99 % of them do not exceed: of fewer than 100 the longest.
    """

    median: float
    mean: float
    min: float
    max: float
    p99: float
    iterations: int


class Times(NamedTuple):
    """Microseconds per call in the measured batches, each the time of the slowest rank."""

    median: float
    mean: float
    min: float
    p99: float


def summarize(seconds: Sequence[float]) -> Statistics:
    """The statistics of the iterations' seconds."""
    times = sorted(1e3 * second for second in seconds)
    middle = statistics.median(times), statistics.fmean(times)
    return Statistics(*middle, times[0], times[-1], _p99(times), len(times))


def per_call(seconds: Sequence[float], calls: int = 1) -> Times:
    """The statistics per call of batches of `calls` calls.

    p99 is the smallest time that 99 % of the batches do not exceed.
    """
    times = sorted(1e6 * second / calls for second in seconds)
    return Times(statistics.median(times), statistics.fmean(times), times[0], _p99(times))


def _p99(times: Sequence[float]) -> float:
    """The smallest of the sorted `times` that 99 % of them do not exceed."""
    return times[math.ceil(0.99 * len(times)) - 1]


@contextmanager
def session(
    threads: int | None,
    one_host: str = "",
    *,
    device: str = "cpu",
    engine: str = "host",
    comm_threads: int = 1,
    device_options: DeviceOptions = DEFAULT,
) -> Iterator[World]:
    """The world in which this rank measures: with `threads` compute threads, or torch's default for
    None, `comm_threads` in the background, `device_options`, without gradients, and with a timeout
    that slow baselines do not reach.

    `device` is ``cpu``, or ``cuda``, the GPU of this rank's local rank. `engine` executes plans:
    ``host`` (on a CPU), ``streams`` (lanes are streams of a GPU, or on a CPU threads), ``triton``
    (the same, with products by weft's persistent kernel), ``interpreter`` (that kernel on a CPU,
    by Triton's interpreter) or ``reference`` (each rank executes the plans of all ranks, slowly).
    Raises `WeftError` if ranks are on several hosts and `one_host` is a reason against that.
    """
    if threads:
        torch.set_num_threads(threads)
    if engine == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    place = torch.device("cpu")
    if device == "cuda":
        from weft.gpu.backend import device_of_rank

        place = device_of_rank()
    made = init(
        timeout=TIMEOUT,
        device=place,
        products=products_of(engine),
        streams=engine == "streams",
        comm_threads=comm_threads,
        device_options=device_options,
    )
    with made as world, torch.no_grad():
        if one_host and world.hosts.several:
            raise WeftError(f"ranks are on {world.hosts.number} hosts: {one_host}")
        if engine == "reference":
            use_reference(world)
        yield world


def products_of(engine: str) -> str:
    """The products of an engine, as `init` takes them."""
    return "triton" if engine in ("triton", "interpreter") else "torch"


def race(
    candidates: Sequence[Callable[[], Found]],
    most: Sequence[int],
    warmup: int,
    iterations: int,
    advance: Callable[[], None],
    over: Callable[[], bool] = lambda: False,
) -> list[list[Found]]:
    """The results of all `candidates`, each called once in each of `iterations` rounds, after
    `warmup` rounds.

    Every round has a random order, the same on all ranks, so that no candidate always follows the
    same other one. `most` limits the number of calls of each; a candidate limited to fewer than
    `iterations` is slow and is not warmed up. `advance` is called before every round, and `over`,
    equal on all ranks, before every measured one: if it is true there are no more.
    """
    found: list[list[Found]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    shuffle = random.Random(0).shuffle
    with ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        for number in range(-warmup, iterations):
            if number >= 0 and over():
                break
            advance()
            shuffle(order)
            for index in order:
                if 0 <= number < most[index]:
                    found[index].append(candidates[index]())
                elif number < 0 and most[index] == iterations:
                    candidates[index]()
    return found


class Stopwatch:
    """A stopwatch for calls that all ranks of a world make together."""

    def __init__(self, world: World) -> None:
        self.world = world

    def time(self, call: Callable[[], object], calls: int = 1) -> float:
        """This rank's seconds from a barrier to the end of its `calls` calls."""
        barrier(self.world)
        start = perf_counter()
        for _ in itertools.repeat(None, calls):
            call()
        return perf_counter() - start

    def interleave(
        self,
        views: Mapping[str, Callable[[], object]],
        warmup: int,
        iterations: int,
        advance: Callable[[], None] = lambda: None,
        around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        begins: Callable[[str], object] = lambda name: None,
        budget: float | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> dict[str, Statistics]:
        """The statistics of each of `views`, timed once per round of a `race`.

        `around` makes the context in which a view is called, and which its time does not include.
        `begins` is called with the name of each view before its first call.

        There is at least one warm-up round. The first one finds views whose iterations would take
        longer than their share of the budget, by default `BUDGET`: they get fewer iterations. If a
        single call takes a quarter of it, and is not `QUICK`, its first time is the only one. Once
        `over` is true, on all ranks alike, there are no more rounds.
        """
        budget = BUDGET if budget is None else budget

        def time(name: str) -> float:
            with around(name):
                return self.time(views[name])

        def first_time(name: str) -> float:
            begins(name)
            return time(name)

        first = largest(self.world, [first_time(name) for name in views])
        share = budget / len(views)
        most = [
            0
            if seconds >= max(QUICK, budget / 4)
            else min(iterations, max(FEWEST, int(share / max(seconds, 1e-9))))
            for seconds in first
        ]
        timed = [partial(time, name) for name in views]
        found = race(timed, most, max(warmup, 1) - 1, iterations, advance, over)
        samples = [own or [seconds] for own, seconds in zip(found, first, strict=True)]
        return {
            name: summarize(largest(self.world, own))
            for name, own in zip(views, samples, strict=True)
        }


class DeviceStopwatch(Stopwatch):
    """A stopwatch for calls on this rank's current stream, by the clock of its GPU."""

    def time(self, call: Callable[[], object], calls: int = 1) -> float:
        """The seconds between a barrier and the end of this rank's `calls` calls on the stream."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        barrier(self.world)
        start.record()
        for _ in itertools.repeat(None, calls):
            call()
        stop.record()
        stop.synchronize()
        return 1e-3 * float(start.elapsed_time(stop))


def stopwatch_of(world: World) -> Stopwatch:
    """The stopwatch for calls in this world."""
    return (DeviceStopwatch if world.device.type == "cuda" else Stopwatch)(world)


def largest(world: World, values: Sequence[float]) -> list[float]:
    """The largest value of any rank, by element; collective. Values travel as text, by none of the
    operators that are measured.
    """
    every = all_gather_values(world, [float(value).hex() for value in values], list[str])
    return [max(map(float.fromhex, each)) for each in zip(*every, strict=True)]


def in_threads(world: World) -> bool:
    """Whether several ranks are threads of one process."""
    return world.ranks > 1 and len({*world.pids}) == 1
