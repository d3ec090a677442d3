"""The parts that all benchmarks share: verification around a race, progress, and the description of
the machine.

A benchmark compares contenders: implementations of the same operation. `verified` checks all of
them before and after they are timed with `weft.measure.timing`.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

import weft._native as _native
import weft.cache as cache
from weft.cli.values import Shape, parse_sizes
from weft.host.placement import time_of_thread
from weft.measure.progress import progress
from weft.measure.timing import Statistics, largest
from weft.measure.versions import versions
from weft.world import World
from weft_tools.bench import nccl
from weft_tools.bench.verification import RUNS, Check

_FILES = {"json_file", "plot", "trace", "timeline", "save_outputs", "save_data"}
"""The options that name files, which are not in a result."""

BATCH, BATCHES = 1e-3, 2.0
"""Seconds of the calls of a batch, much longer than reading the clock or leaving a barrier; and the
most seconds for all batches of one contender, of which there are at least three.
"""
_SINGLES = 500
"""Calls of a round that are timed one by one. After the pause between two rounds a busy neighbour
has the core of a rank, which delays a call or two: not to be the 1 % beyond p99.
"""
_FEWEST = 3  # batches
_REPEATED = 5  # fewest calls of a batch, if short: the first finds data of others in the caches
_OVERSUBSCRIBED = 10  # factor of the length of a batch if ranks share cores

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
    """The times of rows as a JSON object; `runs` is the number of measured ones."""
    return {
        name: {key: getattr(times, key) for key in ("median", "mean", "min", "max", "p99")}
        | {"runs": times.iterations}
        for name, times in rows.items()
    }


def options_of(settings: Any) -> dict[str, Any]:
    """The options of a benchmark as a JSON object: warm-up, iterations, seed and all others that
    decide what is measured.
    """
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        name: str(value) if isinstance(value, Shape) else value
        for name, value in values.items()
        if name not in _FILES
    }


def utc() -> str:
    """The time of the end of a measurement."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment(world: World, settings: Any, **baselines: str) -> dict[str, Any]:
    """The entries of a result for its options, the time at which it ended (UTC), the machine and
    the versions; `baselines` are further versions.

    `cores` is the number of cores that the ranks may use together.
    """
    on_gpu = dict[str, Any]()
    if world.device.type == "cuda":
        on_gpu = gpu(world.device, min(world.ranks, torch.cuda.device_count()))
        on_gpu["nccl_most_channels"] = nccl.channels()
    on_hosts = zip(world.hosts, world.cores, strict=True)
    cores = len({(host, core) for host, own in on_hosts for core in own})
    return {
        "options": options_of(settings),
        "date": utc(),
        "machine": host(cores, torch.get_num_threads())
        | {"waited_for_core_percent": waited()}
        | on_gpu,
        "versions": versions(world.device.type) | baselines,
    }


def waited() -> float:
    """The percentage of this thread's runnable time that it spent in the run queue."""
    ran, late = time_of_thread()
    return round(100 * late / max(1, ran + late), 1)


def host(cores: int, threads: int) -> dict[str, Any]:
    """The properties of this host, and the `cores` of all hosts together that are used, by ranks of
    `threads` threads.
    """
    return {
        "cpu": cache.processor().partition(":")[0] or platform.processor() or platform.machine(),
        "cores": cores,
        "threads_per_rank": threads,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.release()}",
        "stores": _native.stores(),
    }


def gpu(device: torch.device, used: int) -> dict[str, Any]:
    """The name and properties of a GPU, `used` of which a benchmark uses."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpus": used,
        "sms": properties.multi_processor_count,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
    }


def link_of(world: World) -> dict[str, float] | None:
    """The entry of a result for the emulated link, if there is one."""
    if not world.emulated_link:
        return None
    return dict(zip(("gbps", "latency_us"), world.emulated_link, strict=True))


def verified(
    contenders: Sequence[Contender],
    verify: Callable[[Contender, int], Check],
    measure: Callable[[], Found],
) -> tuple[Found, list[Check]]:
    """The result of `measure`, and the worst check of each contender before and after it; every
    check is a run with other data than the `RUNS` - 1 before it.
    """
    runs = itertools.cycle(range(RUNS))
    before = [verify(contender, next(runs)) for contender in contenders]
    found = measure()
    after = [verify(contender, next(runs)) for contender in contenders]
    return found, [one.worse(other) for one, other in zip(before, after, strict=True)]


def every_size(
    settings: Sizes, world: World, rows: Callable[[int, Callable[[], None]], list[Found]]
) -> list[Found]:
    """The rows that `rows` measures for each of the sizes, with a progress bar on rank 0, which
    `rows` advances in every round.
    """
    sizes = parse_sizes(settings.sizes)
    steps = len(sizes) * (settings.warmup + settings.iterations)
    with progress("measuring", steps, shown=world.rank == 0) as advance:
        return [row for size in sizes for row in rows(size, advance)]


def batches(
    seconds: float,
    per_round: float = 1.0,
    oversubscribed: bool = False,
    longest: float = BATCHES,
) -> tuple[int, int]:
    """The number of calls in a batch, and of batches, for calls that take `seconds`, if the time of
    a round is `per_round` batches, and all may take `longest`.

    `oversubscribed`: ranks share cores, so that a barrier may take a time slice of each.
    """
    length = BATCH * (_OVERSUBSCRIBED if oversubscribed else 1)
    calls = max(1, round(length / seconds), min(_REPEATED, int(longest / 20 / seconds)))
    return calls, max(_FEWEST, int(longest / (per_round * calls * seconds)))


def singles(seconds: float, longest: float = BATCHES) -> tuple[int, int]:
    """The number of calls of a round, each timed by itself, and of rounds, for calls that take
    `seconds`, if all may take `longest`.
    """
    calls = max(1, min(_SINGLES, int(longest / 3 / seconds)))
    return calls, max(_FEWEST, int(longest / (calls * seconds)))


def poison(*tensors: Tensor) -> None:
    """Fill tensors with a value that no result has: NaN, or the least integer."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def worst(world: World, check: Check) -> Check:
    """The maxima of all ranks' checks; collective."""
    wrong, max_error, bound = largest(world, check)
    return Check(int(wrong), max_error, bound)
