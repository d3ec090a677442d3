"""The harness of all benchmarks: verify, race, verify again. What is compared takes turns in one
run, on all ranks.

A benchmark has contenders: things that compute the same, and can be verified in a given run and
timed. `verified` checks all of them before and after `race` lets them take turns; `Stopwatch` times
calls from a barrier to the last rank's finish.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import weft
import weft.cache as cache
from weft.bench.progress import progress
from weft.bench.settings import CopySettings, SweepSettings, parse_sizes
from weft.bench.verification import Check
from weft.errors import WeftError
from weft.ops.barrier import barrier
from weft.world import World, init

BUDGET = 10.0
"""Seconds that the iterations of one view may take together; slower views get fewer."""

BATCH, BATCHES = 1e-3, 2.0
"""Seconds that the calls of a batch are to take together: much longer than reading the clock, or
leaving a barrier; and those that all batches of one contender may take. Slower ones get fewer
batches, at least three.
"""

_TURNS = 10  # times as long a batch then is
_TIMEOUT = 600.0  # seconds; a baseline may keep one rank longer than another

Contender = TypeVar("Contender")
Found = TypeVar("Found")


class Statistics(NamedTuple):
    """Milliseconds over `iterations`, each of them the time of the slowest rank."""

    median: float
    min: float
    max: float
    iterations: int


class Times(NamedTuple):
    """Microseconds per call, over the batches measured; each is the time of the slowest rank."""

    median: float
    min: float
    p99: float


def summarize(seconds: Sequence[float]) -> Statistics:
    """The statistics of the iterations' seconds."""
    times = [1e3 * second for second in seconds]
    return Statistics(statistics.median(times), min(times), max(times), len(times))


def times_ms(rows: Mapping[str, Statistics]) -> dict[str, dict[str, float]]:
    """The times of rows as a JSON object."""
    return {
        name: {"median": times.median, "min": times.min, "max": times.max}
        for name, times in rows.items()
    }


def per_call(seconds: Sequence[float], calls: int = 1) -> Times:
    """The statistics per call of batches of `calls` calls; p99 is the smallest that 99 % of the
    batches do not exceed.
    """
    times = sorted(1e6 * second / calls for second in seconds)
    return Times(statistics.median(times), times[0], times[math.ceil(0.99 * len(times)) - 1])


@contextmanager
def session(threads: int | None, one_host: str = "") -> Iterator[World]:
    """The world in which this rank measures, with so many compute threads, or torch's own number of
    them, without gradients, and patient with slow baselines.

    Raises `WeftError` where ranks are on several hosts and must not be: `one_host` says why, and
    what would do.
    """
    if threads:
        torch.set_num_threads(threads)
    with init(timeout=_TIMEOUT) as world, torch.no_grad():
        if one_host and world.multi_host:
            raise WeftError(f"ranks are on {len(set(world.hosts))} hosts: {one_host}")
        yield world


def where(world: World, **beside: str) -> dict[str, Any]:
    """What every result says of the machine, and of the versions of weft and of what is measured
    beside it.

    The cores are those that the ranks may use together, the memory is in GiB.
    """
    machine = {
        "cpu": cache.processor().partition(":")[0] or platform.processor() or platform.machine(),
        "cores": len(frozenset[int]().union(*world.cores)),
        "threads_per_rank": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
    }
    return {"machine": machine, "versions": versions() | beside}


def versions() -> dict[str, str]:
    """Of what takes part in every measurement."""
    return {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def link_of(world: World) -> dict[str, float] | None:
    """The emulated link, if there is one."""
    return (
        dict(zip(("gbps", "latency_us"), world.emulated_link, strict=True))
        if world.emulated_link
        else None
    )


def verified(
    contenders: Sequence[Contender],
    verify: Callable[[Contender, int], Check],
    measure: Callable[[], Found],
) -> tuple[Found, list[Check]]:
    """What `measure` finds, and the worst check of each contender before and after it; every one is
    a run with data of its own.
    """
    before = [verify(contender, run) for run, contender in enumerate(contenders)]
    found = measure()
    after = [verify(contender, run) for run, contender in enumerate(contenders, len(contenders))]
    return found, [one.worse(other) for one, other in zip(before, after, strict=True)]


def race(
    turns: Sequence[Callable[[], Found]],
    most: Sequence[int],
    warmup: int,
    iterations: int,
    advance: Callable[[], None],
) -> list[list[Found]]:
    """Let all take their turns in `iterations` rounds, after some that warm up; what the turns of
    each found.

    Rounds have an order drawn anew, alike on all ranks, so that none always follows the same other.
    `most`: the turns of each; who is too slow for all `iterations` has none to warm up either.
    `advance` is called before every round.
    """
    found: list[list[Found]] = [[] for _ in turns]
    order, shuffle = list(range(len(turns))), random.Random(0).shuffle
    with ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        for turn in range(-warmup, iterations):
            advance()
            shuffle(order)
            for index in order:
                if 0 <= turn < most[index]:
                    found[index].append(turns[index]())
                elif turn < 0 and most[index] == iterations:
                    turns[index]()
    return found


def every_size(
    settings: SweepSettings | CopySettings,
    world: World,
    rows: Callable[[int, Callable[[], None]], list[Found]],
) -> list[Found]:
    """What `rows` measures for each of the sizes, behind a progress bar of rank 0, which it is to
    advance every round.
    """
    sizes = parse_sizes(settings.sizes)
    with progress(
        "measuring", len(sizes) * (settings.warmup + settings.iterations), shown=world.rank == 0
    ) as advance:
        return [row for size in sizes for row in rows(size, advance)]


def batches(seconds: float, per_turn: float = 1.0, crowded: bool = False) -> tuple[int, int]:
    """For calls that take this long: how many make a batch, and how many batches, each of
    `per_turn` such, the budget allows.

    `crowded`: ranks share cores, so that a barrier may take a turn of each.
    """
    calls = max(1, round(BATCH * (_TURNS if crowded else 1) / seconds))
    return calls, max(3, int(BATCHES / (per_turn * calls * seconds)))


class Stopwatch:
    """Times calls that all ranks of a world make together."""

    def __init__(self, world: World) -> None:
        self.world = world

    def time(self, call: Callable[[], object], calls: int = 1) -> float:
        """This rank's seconds from a barrier to the end of its own calls."""
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
    ) -> dict[str, Statistics]:
        """Time each of `views` `iterations` times, one of each per round of a `race`, after
        `warmup` rounds.

        At least one round warms up, and tells which views are so slow that their iterations would
        take longer than `BUDGET`: these are measured fewer times, the slowest by this one run
        alone.
        """
        first = largest(self.world, [self.time(call) for call in views.values()])
        most = [
            0 if seconds >= BUDGET else min(iterations, max(1, int(BUDGET / max(seconds, 1e-9))))
            for seconds in first
        ]
        turns = [lambda call=call: self.time(call) for call in views.values()]
        found = race(turns, most, max(warmup, 1) - 1, iterations, advance)
        samples = [own or [seconds] for own, seconds in zip(found, first, strict=True)]
        return {
            name: summarize(largest(self.world, own))
            for name, own in zip(views, samples, strict=True)
        }


def poison(*tensors: Tensor) -> None:
    """Fill with what no result has: NaN, or the least integer."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def largest(world: World, values: Sequence[float]) -> list[float]:
    """Element by element the largest value that any rank has; collective over the default process
    group.
    """
    merged = torch.tensor(values, dtype=torch.float64)
    if world.ranks > 1:
        dist.all_reduce(merged, dist.ReduceOp.MAX)
    return merged.tolist()


def worst(world: World, check: Check) -> Check:
    """The worst of all ranks' checks; collective."""
    wrong, max_error, bound = largest(world, check)
    return Check(int(wrong), max_error, bound)
