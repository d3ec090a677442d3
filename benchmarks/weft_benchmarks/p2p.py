"""The benchmark of one-sided copies over message size: put and get, synchronous and asynchronous,
compared with local copies.

Rank 0 copies to and from the last rank, which sleeps meanwhile; the implementations alternate in
one process. Each round begins with a copy that is not timed, then times single copies (latency),
then a window of copies back to back (bandwidth, and the cycles of the calling thread). An
asynchronous copy is timed until it is complete, but costs its caller only the submission.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

import weft._native as _native
from weft.bench import sweep, tables
from weft.bench.harness import batches, environment, every_size, verified, worst
from weft.bench.neighbours import neighbours
from weft.bench.plots import over_sizes, size_name
from weft.bench.settings import parse_sizes
from weft.measure.timing import per_call, race, session
from weft.measure.verification import RUNS, Check
from weft.ops.barrier import barrier
from weft.ops.onesided import Transfer, get, get_async, put, put_async
from weft.pictures import COLOURS, DASHED, picture
from weft.world import World
from weft_benchmarks.settings import CopySettings

MEMCPY, COPY_ = "memcpy", "torch.copy_"
_LOCAL = {MEMCPY: DASHED, COPY_: (0, (1, 2))}  # the style of their lines in the picture


class Copier(NamedTuple):
    """An implementation of a copy from `source`, on rank `giver`, to `target`, on rank `owner`."""

    operation: str
    implementation: str
    call: Callable[[], object]
    source: Tensor
    target: Tensor
    giver: int
    owner: int


class Samples(NamedTuple):
    """Seconds of single copies, seconds per copy in windows, and the caller's cycles per copy in a
    window.
    """

    singles: list[float]
    windows: list[float]
    cycles: list[float]


class Buffers:
    """The buffers of one rank, shared by all sizes: the random bytes, a source and a target."""

    def __init__(self, settings: CopySettings, world: World) -> None:
        self.settings, self.world = settings, world
        largest_size = max(parse_sizes(settings.sizes))
        generator = torch.Generator().manual_seed(settings.seed)
        self.stream = torch.randint(
            256, (largest_size + RUNS,), dtype=torch.uint8, generator=generator
        )
        made = [
            empty(largest_size, dtype=torch.uint8)
            for empty in (world.empty, torch.empty, torch.empty)
        ]
        # allocates the pages before anything is timed
        self.shared, self.source, self.target = (tensor.zero_() for tensor in made)

    def contenders(self, size: int) -> list[Copier]:
        """All implementations, for copies of `size` bytes."""
        shared, source, target, peer = (
            self.shared[:size],
            self.source[:size],
            self.target[:size],
            self.world.ranks - 1,
        )
        memmove = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)
        return [
            Copier("put", "weft", partial(put, shared, source, peer), source, shared, 0, peer),
            Copier(
                "put",
                "weft (async)",
                partial(put_async, shared, source, peer),
                source,
                shared,
                0,
                peer,
            ),
            Copier("get", "weft", partial(get, target, shared, peer), shared, target, peer, 0),
            Copier(
                "get",
                "weft (async)",
                partial(get_async, target, shared, peer),
                shared,
                target,
                peer,
                0,
            ),
            Copier("local", MEMCPY, memmove, source, target, 0, 0),
            Copier("local", COPY_, partial(target.copy_, source), source, target, 0, 0),
        ]

    def verify(self, contender: Copier, run: int) -> Check:
        """Copy the bytes of `run` to a target that holds their complement; the number of wrong
        bytes on the target's owner. Collective.
        """
        expected, rank = self.stream[run : run + len(contender.source)], self.world.rank
        if rank == contender.giver:
            contender.source.copy_(expected)
        if rank == contender.owner:
            contender.target.copy_(~expected)
        barrier(self.world)
        if rank == 0:
            _complete(contender.call())
        barrier(self.world)
        wrong = int((contender.target != expected).sum()) if rank == contender.owner else 0
        return worst(self.world, Check(wrong))

    def rows(self, size: int, advance: Callable[[], None]) -> list[dict[str, Any]]:
        """Verify, measure and verify again all implementations at one size; complete on rank 0."""
        contenders = self.contenders(size)
        samples, checks = verified(contenders, self.verify, lambda: self._race(contenders, advance))
        return (
            [_row(size, *found) for found in zip(contenders, samples, checks, strict=True)]
            if samples
            else []
        )

    def _race(self, contenders: Sequence[Copier], advance: Callable[[], None]) -> list[Samples]:
        """Run all implementations alternately, while the other ranks wait."""
        found, rounds = list[Samples](), self.settings.iterations
        if self.world.rank == 0:
            sizes = [
                batches(max(_round(contender, 1).windows), per_round=2) for contender in contenders
            ]
            calls = [
                partial(_round, one, min(100, copies))
                for one, (copies, _) in zip(contenders, sizes, strict=True)
            ]
            samples = race(
                calls,
                [min(rounds, most) for _, most in sizes],
                self.settings.warmup,
                rounds,
                advance,
            )
            found = [
                Samples(*(list(chain.from_iterable(lists)) for lists in zip(*own, strict=True)))
                for own in samples
            ]
        barrier(self.world)
        return found


def measure(settings: CopySettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object, which is complete on rank 0.

    In its rows `time_us` is of single copies and `algbw_gbps` of windows, in 1e9 bytes per second
    (`busbw_gbps` is the same for two ranks); `cycles` is the cost of a copy for its caller, in
    ticks of the processor's time-stamp counter, null without such a counter.
    """
    one_host = "one-sided calls stay within one: run weft bench p2p without a launcher there"
    with session(settings.threads, one_host) as world, neighbours(world, settings.neighbours):
        rows = every_size(settings, world, Buffers(settings, world).rows)
        return {
            "benchmark": "p2p",
            "ranks": world.ranks,
            "neighbours": settings.neighbours,
            "rows": rows,
            "verified": not any(row["wrong"] for row in rows),
            **environment(world, settings),
        }


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the rows of a result, and notes on how to read them."""
    table = tables.table(("size", "", "us", "p99 us", "GB/s", "kcycles", f"vs {MEMCPY}", "wrong"))
    for size, of_size in groupby(result["rows"], key=lambda row: row["size_bytes"]):
        rows = {(row["operation"], row["implementation"]): row for row in of_size}
        head, local = size_name(size), rows["local", MEMCPY]["algbw_gbps"]
        for (operation, name), row in rows.items():
            table.add_row(
                head,
                name
                if operation == "local"
                else f"{operation} async"
                if "async" in name
                else operation,
                f"{row['time_us']['median']:.1f}",
                f"{row['time_us']['p99']:.1f}",
                f"{row['algbw_gbps']:.1f}",
                "" if row["cycles"] is None else f"{row['cycles'] / 1e3:.1f}",
                Text() if name == MEMCPY else tables.ratio(row["algbw_gbps"] / local),
                tables.count(row["wrong"]),
            )
            head = ""
        table.add_section()
    pair = f"p2p: rank 0 and rank {result['ranks'] - 1} of {result['ranks']}"
    console.print(Text(pair + tables.loaded(result), "bold"), table)
    tables.print_notes(
        console,
        "us: median of single copies, until complete. GB/s of 1e9 bytes: copies back to back; "
        "these are compared.",
        "kcycles: the cost of a copy for its caller, in 1000 ticks of the time-stamp counter; "
        "asynchronous: its submission."
        if result["rows"][0]["cycles"] is not None
        else "kcycles: this processor has no time-stamp counter that can be read.",
        tables.verdict(
            result,
            "every byte, in targets poisoned before every implementation and size, before and "
            "after timing.",
        ),
        tables.machine(result),
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw bandwidth over size for put and for get, synchronous and asynchronous, with local
    copies, into a PNG or SVG file.
    """
    title = f"p2p: rank 0 and rank {result['ranks'] - 1}, and local copies"
    with picture(path, 11, 4.4, title, verified=result["verified"]) as figure:
        for axes, operation in zip(figure.subplots(1, 2, sharey=True), ("put", "get"), strict=True):
            rows = [row for row in result["rows"] if row["operation"] in (operation, "local")]
            for name in dict.fromkeys(row["implementation"] for row in rows):
                points = [
                    (row["size_bytes"], row["algbw_gbps"])
                    for row in rows
                    if row["implementation"] == name
                ]
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    marker="o",
                    color=COLOURS[name],
                    linestyle=_LOCAL.get(name, "-"),
                )
            over_sizes(axes, [row["size_bytes"] for row in rows], "bytes of a copy")
            axes.set_title(f"{operation}, GB/s")
            axes.set_ylim(bottom=0)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _round(contender: Copier, copies: int) -> Samples:
    """One round: a copy that is not timed, `copies` single ones, and as many (at least two) back to
    back.
    """
    call, singles, window = contender.call, [], max(2, copies)
    _complete(call())
    for _ in range(copies):
        start = perf_counter()
        _complete(call())
        singles.append(perf_counter() - start)
    last, start, ticks = None, perf_counter(), _native.cycles()
    for _ in range(window):
        last = call()
    ticks = _native.cycles() - ticks
    _complete(last)
    return Samples(singles, [(perf_counter() - start) / window], [ticks / window])


def _complete(handle: object) -> None:
    if isinstance(handle, Transfer):
        handle.wait()


def _row(size: int, contender: Copier, samples: Samples, check: Check) -> dict[str, Any]:
    speed = size / statistics.median(samples.windows) / 1e9
    return sweep.row(
        {
            "size_bytes": size,
            "operation": contender.operation,
            "implementation": contender.implementation,
        },
        per_call(samples.singles),
        speed,
        speed,
        cycles=statistics.median(samples.cycles) or None,
        wrong=check.wrong,
        copies=len(samples.singles),
        windows=len(samples.windows),
    )
