"""The benchmarks of the collectives over message size, beside gloo and DeepSpeed in the same
processes and MPI in its own.

What is compared takes turns, batch by batch, so that noise hits all alike; whoever is not timed
sleeps. Each batch follows a call that is not timed and a barrier, and lasts until the slowest rank
is done.

Data is random, and numbers are whole and so small that sums over all ranks are exact in every
dtype: every element of every result must be equal to what is expected, on every rank, before and
after timing, on new data and poisoned outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch import Tensor

import weft
from weft.bench import deepspeed, sweep, tables
from weft.bench.baselines import gloo_collective
from weft.bench.harness import (
    Stopwatch,
    Times,
    batches,
    every_size,
    largest,
    per_call,
    poison,
    race,
    session,
    verified,
    where,
)
from weft.bench.mpi import MPIS, MpiRanks
from weft.bench.settings import SweepSettings, parse_sizes
from weft.bench.verification import RUNS, Check, everyones_sum
from weft.world import World

PLACES = {
    "all_gather": (False, True),
    "reduce_scatter": (False, True),
    "all_reduce": (False, True),
    "broadcast": (True,),
    "all_to_all": (False,),
}
"""The operations, and whether they are measured out of place (False), in place (True) or both."""

REDUCTIONS = ("reduce_scatter", "all_reduce")
_OF_PARTS = ("reduce_scatter", "all_to_all")  # each rank gets a part of every input
WEFT, PLAIN, GLOO = "weft", "weft (plain)", "gloo"

_DIGITS = {
    "float16": 11,
    "bfloat16": 8,
    "float32": 24,
    "float64": 53,
    "int8": 7,
    "int32": 31,
    "int64": 63,
}
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
}  # all others add


class Data:
    """The numbers that every rank puts in, and what must come out on this one.

    Those of run 0, 1, … are a window onto a longer stream that moves by one element, so each
    element differs from what lay in its place before.
    """

    def __init__(self, world: World, settings: SweepSettings, count: int) -> None:
        self.rank, self.operation, self.op = world.rank, settings.operation, settings.op
        self.dtype = getattr(torch, settings.dtype)
        limit = limit_of(settings.dtype, world.ranks)
        seeded = (
            torch.Generator().manual_seed(settings.seed * world.ranks + rank)
            for rank in range(world.ranks)
        )
        self.streams = [
            torch.randint(-limit, limit + 1, (count + RUNS,), generator=each).to(self.dtype)
            for each in seeded
        ]

    def own(self, run: int, count: int) -> Tensor:
        """This rank's input of `count` elements in this run."""
        return self.streams[self.rank][run : run + count]

    def expected(self, run: int, count: int) -> Tensor:
        """This rank's result of inputs of `count` elements in this run."""
        sources = [stream[run : run + count] for stream in self.streams]
        if self.operation == "broadcast":
            return sources[0]
        if self.operation in _OF_PARTS:
            sources = [source.chunk(len(sources))[self.rank] for source in sources]
        if self.operation not in REDUCTIONS:
            return torch.cat(sources)
        reduced = functools.reduce(_COMBINE.get(self.op, torch.add), sources)
        if self.op == "avg":
            reduced = reduced.to(torch.promote_types(self.dtype, torch.float32)) / len(sources)
        return reduced.to(self.dtype)


class Local:
    """An implementation in this process, in place or not: its tensors, and a call on them;
    collective, as `Mpi` is.
    """

    def __init__(
        self,
        name: str,
        in_place: bool,
        call: Callable[[], object],
        tensors: tuple[Tensor, Tensor],
        bench: Bench,
    ) -> None:
        self.implementation, self.in_place, self.call, self.bench = name, in_place, call, bench
        self.a, self.out = tensors

    def verify(self, run: int) -> Check:
        """Run once on the data of `run` into a poisoned output; how many elements are wrong, of all
        ranks.
        """
        poison(self.out)
        self.a.copy_(self.bench.data.own(run, len(self.a)))
        self.call()
        return _total(int((self.out != self.bench.data.expected(run, len(self.a))).sum()))

    def time(self, calls: int) -> float:
        """Seconds that this rank takes for so many calls, after one that is not timed."""
        self.call()
        return self.bench.stopwatch.time(self.call, calls)


class Mpi:
    """An implementation in MPI's processes, which rank 0 asks while the others sleep in a
    collective of gloo.
    """

    def __init__(self, name: str, in_place: bool, ranks: MpiRanks | None, bench: Bench) -> None:
        self.implementation, self.in_place, self.ranks, self.bench = name, in_place, ranks, bench

    def verify(self, run: int) -> Check:
        """Have the ranks of MPI run once on the data of `run` into poisoned outputs; how many
        elements are wrong, of all ranks.
        """
        return _total(sum(self.ranks.ask("verify", self.in_place, run)) if self.ranks else 0)

    def time(self, calls: int) -> float:
        """Seconds until the slowest rank of MPI is done with so many calls; on rank 0, and no less
        on the others.
        """
        dist.barrier()
        return largest(
            self.bench.world,
            [max(self.ranks.ask("time", self.in_place, calls)) if self.ranks else 0.0],
        )[0]


Contender = Local | Mpi


class Bench:
    """The measurement of one operation on this rank: its data and tensors, which all sizes share."""

    def __init__(self, settings: SweepSettings, world: World) -> None:
        self.settings, self.world, self.stopwatch = settings, world, Stopwatch(world)
        dtype, ranks = getattr(torch, settings.dtype), world.ranks
        largest_count = count_of(max(parse_sizes(settings.sizes)), settings, ranks)
        self.data, self.places = Data(world, settings, largest_count), PLACES[settings.operation]
        outputs = output_count(settings.operation, largest_count, ranks)
        counts = {False: (largest_count, outputs), True: (max(largest_count, outputs),)}
        self.memory = {  # of zeros: pages are there before anything is timed
            (name, in_place): [empty(count, dtype=dtype).zero_() for count in counts[in_place]]
            for name, empty in ((WEFT, world.empty), (PLAIN, torch.empty))
            for in_place in self.places
        }

    def contenders(self, count: int, mpis: dict[str, MpiRanks | None]) -> list[Contender]:
        """All implementations, for inputs of `count` elements."""
        settings, found = self.settings, list[Contender]()
        for in_place in self.places:
            for name in (WEFT, PLAIN):
                tensors = self.tensors(name, in_place, count)
                found.append(
                    Local(
                        name,
                        in_place,
                        weft_collective(settings, *tensors, self.world),
                        tensors,
                        self,
                    )
                )
            if GLOO in settings.baselines:  # on the plain tensors
                found.append(
                    Local(
                        GLOO,
                        in_place,
                        gloo_collective(settings.operation, *tensors, settings.op),
                        tensors,
                        self,
                    )
                )
            if in_place and deepspeed.NAME in settings.baselines:
                found.append(
                    Local(deepspeed.NAME, in_place, deepspeed.all_reduce(tensors[1]), tensors, self)
                )
            found += [Mpi(name, in_place, ranks, self) for name, ranks in mpis.items()]
        carrier, limit = numpy_dtype(settings), limit_of(settings.dtype, self.world.ranks)
        for asked in filter(None, mpis.values()):
            asked.ask("case", settings.operation, count, carrier, limit, settings.op, settings.seed)
        return found

    def tensors(self, name: str, in_place: bool, count: int) -> tuple[Tensor, Tensor]:
        """The input of `count` elements and the output; in place the smaller is a part of the
        larger.
        """
        outputs, rank = (
            output_count(self.settings.operation, count, self.world.ranks),
            self.world.rank,
        )
        if not in_place:
            a, out = self.memory[name, False]
            return a[:count], out[:outputs]
        [whole] = self.memory[name, True]
        whole, part = whole[: max(count, outputs)], min(count, outputs)
        own = whole if part == len(whole) else whole[rank * part : (rank + 1) * part]
        return (whole, own) if count > outputs else (own, whole)

    def rows(
        self, size: int, mpis: dict[str, MpiRanks | None], advance: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Verify, measure and verify again all implementations for one size; the rows of the
        result, as JSON objects.
        """
        count = count_of(size, self.settings, self.world.ranks)
        contenders = self.contenders(count, mpis)
        timings, checks = verified(
            contenders, lambda one, run: one.verify(run), lambda: self._race(contenders, advance)
        )
        size = count * self.data.dtype.itemsize
        found = []
        for one, (calls, seconds), check in zip(contenders, timings, checks, strict=True):
            counts = {"wrong": check.wrong, "batches": len(seconds), "calls": calls}
            found.append(
                row(self.settings, size, self.world.ranks, one, per_call(seconds, calls), **counts)
            )
        return found

    def _race(
        self, contenders: Sequence[Contender], advance: Callable[[], None]
    ) -> list[tuple[int, list[float]]]:
        """Time batches of all contenders in turn: for each the calls per batch, and the seconds of
        its batches.
        """
        rounds, world = self.settings.iterations, self.world
        sized = functools.partial(batches, crowded=world.oversubscribed)
        few = [
            sized(largest(world, [contender.time(3)])[0] / 3)[0] for contender in contenders
        ]  # which may be slow at first
        sizes = [
            sized(largest(world, [c.time(calls)])[0] / calls)
            for c, calls in zip(contenders, few, strict=True)
        ]
        turns = [
            functools.partial(contender.time, calls)
            for contender, (calls, _) in zip(contenders, sizes, strict=True)
        ]
        found = race(
            turns, [min(rounds, most) for _, most in sizes], self.settings.warmup, rounds, advance
        )
        return [(calls, largest(world, own)) for (calls, _), own in zip(sizes, found, strict=True)]


def measure(settings: SweepSettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object, which is complete on rank 0."""
    local = [name for name in settings.baselines if name != GLOO]
    with ExitStack() as stack:
        alone = (
            f"the baseline {local[0]} has all its ranks on one: use --baseline gloo, or none"
            if local
            else ""
        )
        world = stack.enter_context(session(settings.threads, alone))
        asked = [name for name in local if name in MPIS]
        if deepspeed.NAME in local:
            deepspeed.connect()
        mpis = {
            name: stack.enter_context(closing(MpiRanks(name, world.cores)))
            if world.rank == 0
            else None
            for name in asked
        }
        bench = Bench(settings, world)
        rows = every_size(settings, world, lambda size, advance: bench.rows(size, mpis, advance))
        return {
            "benchmark": settings.operation.replace("_", "-"),
            "ranks": world.ranks,
            "hosts": len(set(world.hosts)),
            "dtype": settings.dtype,
            "op": settings.op if settings.operation in REDUCTIONS else None,
            "algorithm": settings.algorithm,
            "size_bytes_of": "each rank's input",
            "rows": rows,
            "verified": not any(row["wrong"] for row in rows),
            **where(world, **{name: ranks.version for name, ranks in mpis.items() if ranks}),
        }


def row(
    settings: SweepSettings, size: int, ranks: int, one: Contender, times: Times, **counts: int
) -> dict[str, Any]:
    """What an implementation takes for one size, that of each rank's input in bytes."""
    what = {
        "size_bytes": size,
        "count": size // getattr(torch, settings.dtype).itemsize,
        "dtype": settings.dtype,
        "operation": settings.operation,
        "implementation": one.implementation,
        "in_place": one.in_place,
    }
    return sweep.row(
        what, times, *sweep.bandwidths(settings.operation, size, ranks, times.median), **counts
    )


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the rows of a result, and what one must know to read them."""
    op = f", {result['op']}" if result["op"] else ""
    console.print(
        Text(
            f"{result['benchmark']}: {result['ranks']} ranks, {result['dtype']}{op}, "
            f"{result['algorithm']}",
            "bold",
        )
    )
    names = dict.fromkeys(row["implementation"] for row in result["rows"])
    sweep.print_table(
        result["rows"], [name for name in names if name not in (WEFT, PLAIN)], console
    )
    tables.tell(
        console,
        "size and count: each rank's input. Times: median of batches, divided by their calls. "
        "algbw, busbw: GB/s of 1e9 bytes",
        "as nccl-tests define them. weft: tensors in symmetric memory; weft (plain) and gloo: "
        "ordinary ones; MPI: numpy's.",
        tables.verdict(
            result, "every element on every rank equals what it must be, before and after timing."
        ),
        tables.machine(result),
    )


def weft_collective(
    settings: SweepSettings, a: Tensor, out: Tensor, world: World
) -> Callable[[], object]:
    """weft's call on these tensors."""
    call = getattr(weft, settings.operation)
    if settings.operation == "broadcast":
        return functools.partial(call, out, 0, world=world)
    asked = {"op": settings.op} if settings.operation in REDUCTIONS else {}
    if settings.algorithm != "auto":
        asked["algorithm"] = settings.algorithm
    return functools.partial(call, a, out=out, world=world, **asked)


def limit_of(dtype: str, ranks: int) -> int:
    """The largest whole number of which as many as there are ranks add up exactly in `dtype`."""
    return int(2 ** _DIGITS[dtype] - 1) // ranks


def count_of(size: int, settings: SweepSettings, ranks: int) -> int:
    """Elements of each rank's input for a size in bytes, rounded up to whole elements, and parts
    where it is cut into some.
    """
    parts = ranks if settings.operation in _OF_PARTS else 1
    step: int = getattr(torch, settings.dtype).itemsize * parts
    return -(-size // step) * parts


def output_count(operation: str, count: int, ranks: int) -> int:
    """Elements of each rank's result for inputs of `count`."""
    return {"all_gather": count * ranks, "reduce_scatter": count // ranks}.get(operation, count)


def numpy_dtype(settings: SweepSettings) -> str:
    """What MPI's ranks take for the dtype: where nothing is added up, whole numbers as wide do."""
    itemsize: int = getattr(torch, settings.dtype).itemsize
    return settings.dtype if itemsize > 2 or settings.dtype == "int8" else f"int{8 * itemsize}"


def _total(wrong: int) -> Check:
    return Check(int(everyones_sum(torch.tensor(wrong))))
