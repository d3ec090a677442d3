"""The benchmark of a collective over message size, compared with baselines.

Batches of calls of all contenders alternate, so that noise affects all equally; processes of other
contenders sleep meanwhile. Each batch follows an untimed call and a barrier, and ends on the
slowest rank; with `neighbours`, also 0, each call is a batch, so that percentiles are of calls.
Every result is verified before and after timing, on new data and poisoned outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from torch import Tensor

from weft.cli.values import parse_sizes
from weft.measure.timing import (
    Times,
    largest,
    per_call,
    race,
    stopwatch_of,
)
from weft.plan.launch import Launch
from weft.world import World
from weft_tools.bench import tables
from weft_tools.bench.between_ranks import session
from weft_tools.bench.budget import Budget
from weft_tools.bench.collective_baselines import opened
from weft_tools.bench.collectives import COLLECTIVES, Data, bandwidths, count_of, weft_collective
from weft_tools.bench.contenders import PLAIN, WEFT, Baseline, Contender, Local
from weft_tools.bench.graphs import captured
from weft_tools.bench.harness import BATCHES, batches, environment, every_size, singles, verified
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.settings.sweeps import SweepSettings
from weft_tools.bench.systems import SYSTEMS

_SETTLING, _SETTLING_CALLS = 1.0, 150
"""The most seconds and calls before a contender is timed."""
_MEASURED = 0.4
"""The part of a contender's time for its batches, beside as much before them, and its checks."""


class Sweep:
    """The measurement of one operation on this rank: its data and tensors, shared by all sizes."""

    def __init__(
        self, settings: SweepSettings, world: World, baselines: Sequence[Baseline] = ()
    ) -> None:
        self.settings, self.world, self.stopwatch = settings, world, stopwatch_of(world)
        self.baselines, self.collective = baselines, COLLECTIVES[settings.operation]
        self.budget = Budget(world, settings.seconds)
        self.sizes_left = len(parse_sizes(settings.sizes))
        most = count_of(max(parse_sizes(settings.sizes)), settings, world.ranks)
        self.data, outputs = Data(world, settings, most), self.collective.outputs(most, world.ranks)
        counts = {False: (most, outputs), True: (max(most, outputs),)}
        plain = partial(torch.empty, device=world.device)
        self.memory = {  # filled with zeros, so that all pages are mapped before timing
            (name, in_place): [
                empty(count, dtype=self.data.dtype).zero_() for count in counts[in_place]
            ]
            for name, empty in ((WEFT, world.empty), (PLAIN, plain))
            for in_place in self.collective.places
        }

    def contenders(self, count: int) -> list[Contender]:
        """All implementations, for inputs of `count` elements."""
        for baseline in self.baselines:
            baseline.prepare(self, count)
        contenders = list[Contender]()
        for in_place in self.collective.places:
            for name in (WEFT, PLAIN):
                tensors = self.tensors(name, in_place, count)
                call = weft_collective(self.settings, *tensors, self.world)
                contenders.append(Local(name, in_place, call, tensors, self))
            tensors = self.tensors(WEFT, in_place, count)
            for launch in self.settings.launches:
                call = weft_collective(self.settings, *tensors, self.world, launch)
                about = launch._asdict()
                contenders.append(Local(_kernel(launch), in_place, call, tensors, self, about))
            others = (each.contender(self, in_place, count) for each in self.baselines)
            contenders += filter(None, others)
        return contenders

    def tensors(self, name: str, in_place: bool, count: int) -> tuple[Tensor, Tensor]:
        """The input of `count` elements and the output; in place, the smaller tensor is a part of
        the larger one.
        """
        rank, outputs = self.world.rank, self.collective.outputs(count, self.world.ranks)
        if not in_place:
            a, out = self.memory[name, False]
            return a[:count], out[:outputs]
        [memory] = self.memory[name, True]
        larger, part = memory[: max(count, outputs)], min(count, outputs)
        own = larger if part == len(larger) else larger[rank * part : (rank + 1) * part]
        return (larger, own) if count > outputs else (own, larger)

    def rows(self, size: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
        """The rows of the result for one size as JSON objects: one for each implementation,
        verified before and after timing.
        """
        count = count_of(size, self.settings, self.world.ranks)
        contenders = self.contenders(count)
        timings, checks = verified(
            contenders, lambda one, run: one.verify(run), lambda: self._race(contenders, advance)
        )
        size = count * self.data.dtype.itemsize
        rows = []
        for one, (calls, seconds), check in zip(contenders, timings, checks, strict=True):
            times = per_call(seconds, calls)
            case = {
                "size_bytes": size,
                "count": count,
                "dtype": self.settings.dtype,
                "operation": self.settings.operation,
                "implementation": one.implementation,
                "in_place": one.in_place,
                **one.about,
            }
            widths = bandwidths(self.settings.operation, size, self.world.ranks, times.median)
            counts = {"wrong": check.wrong, "batches": len(seconds), "calls": calls}
            rows.append(row(case, times, *widths, **counts))
        return rows

    def _race(
        self, contenders: Sequence[Contender], advance: Callable[[], None]
    ) -> list[tuple[int, list[float]]]:
        """The calls per batch and the seconds of all batches of each contender, interleaved."""
        if self.settings.graph:
            for one in contenders:
                if isinstance(one, Local):
                    one.call = captured(self.world, one.call)
        rounds = self.settings.iterations
        share = self.budget.left() / self.sizes_left / len(contenders)
        self.sizes_left -= 1
        sizes = [self._sizes(one, _MEASURED * share) for one in contenders]
        timed = [
            partial(one.time, *size) for one, (*size, _) in zip(contenders, sizes, strict=True)
        ]
        most = [min(rounds, most) for *_, most in sizes]
        found = race(timed, most, self.settings.warmup, rounds, advance)
        return [
            (calls, largest(self.world, [*chain(*own)]))
            for (calls, *_), own in zip(sizes, found, strict=True)
        ]

    def _sizes(self, contender: Contender, share: float) -> tuple[int, int, int]:
        """The calls of a batch of a contender, its batches in a round, and the most rounds, which
        take at most about a `share` of seconds.
        """
        longest = min(BATCHES, share)

        def seconds(calls: int) -> float:
            return largest(self.world, contender.time(calls))[0] / calls

        shared = self.world.placement.oversubscribed
        once = seconds(_settling(seconds(3), min(_SETTLING, share)))
        calls, most = batches(once, oversubscribed=shared, longest=longest)
        if self.settings.neighbours is not None:
            return 1, *singles(seconds(calls), longest)
        calls, most = batches(seconds(calls), oversubscribed=shared, longest=longest)
        return calls, 1, most


def _kernel(launch: Launch) -> str:
    """The name of a kernel with its launch."""
    compiler, tile = "gluon" if launch.gluon else "triton", launch.tile_bytes / 1024
    return f"kernel ({compiler}, {launch.comm_sms} SMs, {tile:g} KiB, {launch.warps} warps)"


def _settling(seconds: float, longest: float) -> int:
    """The number of calls, of `seconds` each and of `longest` together, after which all contenders
    take the time of later calls: weft and MPIs measure algorithms in the first ones.
    """
    return max(1, min(_SETTLING_CALLS, int(longest / seconds)))


def measure(settings: SweepSettings) -> dict[str, Any]:
    """The result as a JSON object, measured on this rank; collective. Complete on rank 0 only."""
    others = [name for name in settings.baselines if SYSTEMS[name].one_host]
    one_host = "runs on one host only: use --baseline gloo, or none"
    one_host = f"the baseline {others[0]} {one_host}" if others else ""
    with ExitStack() as stack:
        world = stack.enter_context(session(settings.threads, one_host, **settings.place))
        baselines = dict[str, Baseline]()
        for name in settings.baselines:
            baselines[name] = stack.enter_context(opened(name, world))
        stack.enter_context(neighbours(world, settings.neighbours))
        return _measured(settings, world, baselines)


def _measured(
    settings: SweepSettings, world: World, baselines: Mapping[str, Baseline]
) -> dict[str, Any]:
    bench = Sweep(settings, world, [*baselines.values()])
    rows = every_size(settings, world, bench.rows)
    versions = {name: each.version for name, each in baselines.items() if each.version}
    return {
        "benchmark": settings.operation.replace("_", "-"),
        "ranks": world.ranks,
        "hosts": len(set(world.hosts)),
        "dtype": settings.dtype,
        "op": settings.op if bench.collective.reduces else None,
        "algorithm": settings.algorithm,
        "size_bytes_of": "each rank's input",
        "neighbours": settings.neighbours,
        "rows": rows,
        "verified": not any(row["wrong"] for row in rows),
        **environment(world, settings, **versions),
    }


def row(
    case: dict[str, Any], times: Times, algbw: float, busbw: float, **figures: Any
) -> dict[str, Any]:
    """A row of a result: the case, its microseconds and bandwidths, and other figures."""
    return case | {"time_us": times._asdict(), "algbw_gbps": algbw, "busbw_gbps": busbw} | figures


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the rows of a result, and the notes that explain them."""
    op = f", {result['op']}" if result["op"] else ""
    about = f"{result['ranks']} ranks, {result['dtype']}{op}, {result['algorithm']}"
    single = result.get("neighbours") is not None
    console.print(Text(f"{result['benchmark']}: {about}{tables.loaded(result)}", "bold"))
    _print_rows(result, console, single)
    times = (
        "median and p99 of single calls" if single else "median of batches, divided by their calls"
    )
    libraries = "nccl" if tables.options_of(result).get("device") == "cuda" else "gloo"
    tables.print_notes(
        console,
        f"size and count: each rank's input, in whole elements. Times: {times}. algbw, busbw: GB/s "
        "of 1e9 bytes, as nccl-tests define them. weft, kernel: symmetric memory; weft (plain) and "
        f"{libraries}: ordinary ones; MPI: numpy's.",
        *tables.checking(result),
        tables.verdict(
            result, "every element on every rank equals the expected one, before and after timing."
        ),
        *tables.disturbed(result),
        tables.machine(result),
    )


def _print_rows(result: dict[str, Any], console: Console, p99: bool) -> None:
    """Print the JSON rows of a result in the format of nccl-tests, a line for each size and
    implementation, with ratios to each baseline, and with the 99th percentiles of the times if
    `p99`.
    """
    rows, keys = result["rows"], ["median", "p99"] if p99 else ["median"]
    implementations = dict.fromkeys(row["implementation"] for row in rows)
    # also those of further files
    baselines = [name for name in implementations if not name.startswith((WEFT, "kernel"))]
    places = sorted({row["in_place"] for row in rows})
    columns = ["\nsize B", "\ncount", "\ntype", ""]
    for place in places:
        columns += [f"{'in' if place else 'out of'} place\nus", *(["\np99 us"] if p99 else [])]
        columns += ["algbw\nGB/s", "busbw\nGB/s", "\n#wrong"]
    table = tables.table([*columns, *(f"\nvs {name}" for name in baselines)])
    for _, of_size in groupby(rows, key=lambda row: row["size_bytes"]):
        found = {(row["implementation"], row["in_place"]): row for row in of_size}
        case = next(iter(found.values()))
        head = [escape(str(case[key])) for key in ("size_bytes", "count", "dtype")]
        for name in dict.fromkeys(name for name, _ in found):
            cells = [cell for place in places for cell in _cells(found.get((name, place)), keys)]
            first = next(place for place in places if (name, place) in found)
            ours = found[name, first]["time_us"]["median"]
            for baseline in baselines:
                row = None if name in baselines else found.get((baseline, first))
                ratio = row and tables.ratio_in(result, row["time_us"]["median"] / ours)
                cells.append(ratio or Text())
            table.add_row(*head, escape(name), *cells)
            head = [""] * 3
        table.add_section()
    tables.print_wide(console, table)


def _cells(row: dict[str, Any] | None, keys: Sequence[str]) -> list[Text]:
    if row is None:
        return [Text()] * (len(keys) + 3)
    times = [row["time_us"][key] for key in keys]
    numbers = *times, row["algbw_gbps"], row["busbw_gbps"]
    return [*(Text(f"{number:.2f}") for number in numbers), tables.count(row["wrong"])]
