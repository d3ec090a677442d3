"""The parts that all benchmarks share: verification around a race, progress, and the description of
the machine.

A benchmark has contenders: implementations of the same thing, each of which can be verified and
timed. `verified` checks all of them before and after they are timed by `weft.measure.timing`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import weft.cache as cache
from weft.bench.settings import parse_sizes
from weft.measure.timing import Statistics, largest
from weft.measure.verification import Check
from weft.version import __version__
from weft.world import World

BATCH, BATCHES = 1e-3, 2.0
"""Seconds that the calls of a batch are to take together, much longer than reading the clock or
leaving a barrier; and seconds for all batches of one contender. Slower contenders get fewer
batches, at least three.
"""
_OVERSUBSCRIBED = 10  # times as long a batch is where ranks share cores

Contender = TypeVar("Contender")
Found = TypeVar("Found")


class Sizes(Protocol):
    """The settings of a benchmark over message size."""

    @property
    def sizes(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def iterations(self) -> int: ...


def times_ms(rows: Mapping[str, Statistics]) -> dict[str, dict[str, float]]:
    """The times of rows as a JSON object."""
    return {
        name: {"median": times.median, "min": times.min, "max": times.max}
        for name, times in rows.items()
    }


def where(world: World, **beside: str) -> dict[str, Any]:
    """The machine and the versions, as every result has them; `beside` are versions of baselines.

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
    """The versions of weft, torch and Python."""
    return {
        "weft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def link_of(world: World) -> dict[str, float] | None:
    """The emulated link, if there is one."""
    if not world.emulated_link:
        return None
    return dict(zip(("gbps", "latency_us"), world.emulated_link, strict=True))


def verified(
    contenders: Sequence[Contender],
    verify: Callable[[Contender, int], Check],
    measure: Callable[[], Found],
) -> tuple[Found, list[Check]]:
    """The result of `measure`, and the worst check of each contender before and after it; every
    check is a run with data of its own.
    """
    before = [verify(contender, run) for run, contender in enumerate(contenders)]
    found = measure()
    after = [verify(contender, run) for run, contender in enumerate(contenders, len(contenders))]
    return found, [one.worse(other) for one, other in zip(before, after, strict=True)]


def every_size(
    settings: Sizes, world: World, rows: Callable[[int, Callable[[], None]], list[Found]]
) -> list[Found]:
    """The rows that `rows` measures for each of the sizes, behind a progress bar of rank 0, which
    it advances every round.
    """
    sizes = parse_sizes(settings.sizes)
    steps = len(sizes) * (settings.warmup + settings.iterations)
    with progress("measuring", steps, shown=world.rank == 0) as advance:
        return [row for size in sizes for row in rows(size, advance)]


def batches(seconds: float, per_turn: float = 1.0, oversubscribed: bool = False) -> tuple[int, int]:
    """The number of calls in a batch, and of batches, for calls that take `seconds`; each turn
    takes `per_turn` batches' time.

    `oversubscribed`: ranks share cores, so that a barrier may take a time slice of each.
    """
    calls = max(1, round(BATCH * (_OVERSUBSCRIBED if oversubscribed else 1) / seconds))
    return calls, max(3, int(BATCHES / (per_turn * calls * seconds)))


@contextmanager
def progress(what: str, steps: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on stderr that the yielded function advances by one step, if `shown` and stderr is a
    terminal.

    It is drawn within that function and not by a thread, which would disturb what is measured.
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task, drawn = bar.add_task(what, total=steps), 0.0

        def advance() -> None:
            nonlocal drawn
            bar.advance(task)
            if monotonic() - drawn > 0.1:
                drawn = monotonic()
                bar.refresh()

        yield advance


def poison(*tensors: Tensor) -> None:
    """Fill with a value that no result has: NaN, or the least integer."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def worst(world: World, check: Check) -> Check:
    """The worst of all ranks' checks; collective."""
    wrong, max_error, bound = largest(world, check)
    return Check(int(wrong), max_error, bound)
