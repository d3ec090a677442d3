"""The benchmark of one-sided copies over message size: put and get, synchronous, asynchronous and
staged, compared with local copies.

Rank 0 copies to and from the last rank, which sleeps meanwhile; the implementations alternate in
one process. Each round begins with a copy that is not timed, then times single copies until they
are complete (latency, and the cycles of the whole transfer), then a window of copies back to back
(bandwidth, and the cycles of the calling thread). An asynchronous copy costs its caller only the
submission. A staged get fetches one tile after the other into a small buffer, which stays in the
core's cache, and copies it on from there, as a processor does that reaches memory only through a
buffer of its own.
"""

from __future__ import annotations

import ctypes
import platform
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
from weft.bench.values import parse_sizes
from weft.measure.timing import per_call, race, session
from weft.measure.verification import RUNS, Check
from weft.ops.barrier import barrier
from weft.ops.onesided import Transfer, get, get_async, put, put_async
from weft.pictures import COLOURS, DASHED, picture
from weft.world import World
from weft_benchmarks.settings import CopySettings

MEMCPY, COPY_ = "memcpy", "torch.copy_"
WEFT, ASYNC, STAGED = "weft", "weft (async)", "weft (staged)"
_LOCAL = {MEMCPY: DASHED, COPY_: (0, (1, 2))}  # the style of their lines in the picture


Calls = dict[str, Callable[..., object]]
"""Copies by the name of their implementation."""


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
    """Seconds and cycles of single copies until they are complete; seconds, and the caller's
    cycles, per copy in windows.
    """

    singles: list[float]
    transfers: list[float]
    windows: list[float]
    callers: list[float]


class Buffers:
    """The buffers of one rank, shared by all sizes: random elements, a source and a target."""

    def __init__(self, settings: CopySettings, world: World) -> None:
        self.settings, self.world = settings, world
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        count = max(parse_sizes(settings.sizes)) // self.dtype.itemsize
        generator = torch.Generator().manual_seed(settings.seed)
        [tile] = parse_sizes(settings.tile)
        # all bits are random: floats are NaN and infinity, too
        self.stream = torch.randint(
            256,
            ((count + RUNS) * self.dtype.itemsize,),
            dtype=torch.uint8,
            generator=generator,
        ).view(self.dtype)
        # allocates the pages before anything is timed
        self.shared = world.empty(count, dtype=self.dtype).zero_()
        self.source, self.target, self.tile = (
            torch.zeros(n, dtype=self.dtype) for n in (count, count, tile // self.dtype.itemsize)
        )

    def contenders(self, size: int) -> list[Copier]:
        """All implementations, for copies of `size` bytes."""
        count, peer = size // self.dtype.itemsize, self.world.ranks - 1
        shared, source, target = self.shared[:count], self.source[:count], self.target[:count]
        memmove = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)
        puts: Calls = {WEFT: put, ASYNC: put_async}
        gets: Calls = {WEFT: get, ASYNC: get_async}
        local: Calls = {MEMCPY: memmove, COPY_: partial(target.copy_, source)}
        staged = partial(_staged_get, self._steps(target, shared, peer))
        return [
            *(
                Copier("put", name, partial(call, shared, source, peer), source, shared, 0, peer)
                for name, call in puts.items()
            ),
            *(
                Copier("get", name, partial(call, target, shared, peer), shared, target, peer, 0)
                for name, call in gets.items()
            ),
            Copier("get", STAGED, staged, shared, target, peer, 0),
            *(Copier("local", name, call, source, target, 0, 0) for name, call in local.items()),
        ]

    def _steps(self, target: Tensor, shared: Tensor, peer: int) -> list[Callable[[], object]]:
        """The calls of a staged get, two for each tile."""
        steps = list[Callable[[], object]]()
        for part, there in zip(*(t.split(len(self.tile)) for t in (target, shared)), strict=True):
            tile = self.tile[: len(part)]
            steps.append(partial(get, tile, there, peer))
            steps.append(partial(ctypes.memmove, part.data_ptr(), tile.data_ptr(), part.nbytes))
        return steps

    def verify(self, contender: Copier, run: int) -> Check:
        """Copy the elements of `run` to a target that holds their complement; the number of wrong
        elements, bit by bit, on the target's owner. Collective.
        """
        expected, rank = self.stream[run : run + len(contender.source)], self.world.rank
        if rank == contender.giver:
            contender.source.copy_(expected)
        if rank == contender.owner:
            _bits(contender.target).copy_(~_bits(expected))
        barrier(self.world)
        if rank == 0:
            _complete(contender.call())
        barrier(self.world)
        wrong = 0
        if rank == contender.owner:
            wrong = int((_bits(contender.target) != _bits(expected)).sum())
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
    (`busbw_gbps` is the same for two ranks). `transfer_cycles` are those of a single copy until it
    is complete, `cycles` those that a copy costs its caller, in ticks of the counter that the
    result names with its `mhz`; null without such a counter.
    """
    one_host = "one-sided calls stay within one: run weft bench p2p without a launcher there"
    with session(settings.threads, one_host) as world, neighbours(world, settings.neighbours):
        start = _native.cycles(), _native.now()
        rows = every_size(settings, world, Buffers(settings, world).rows)
        ticks, nanoseconds = _native.cycles() - start[0], _native.now() - start[1]
        return {
            "benchmark": "p2p",
            "ranks": world.ranks,
            "neighbours": settings.neighbours,
            "counter": {"name": _counter(), "mhz": round(1e3 * ticks / nanoseconds, 1)},
            "rows": rows,
            "verified": not any(row["wrong"] for row in rows),
            **environment(world, settings),
        }


def _counter() -> str | None:
    """The name of the counter of cycles of this processor."""
    names = {"x86_64": "time-stamp counter", "aarch64": "virtual counter"}
    return names.get(platform.machine())


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the rows of a result, and notes on how to read them."""
    columns = ("size", "", "us", "p99", "GB/s", f"vs {MEMCPY}", "kcycles", "caller", "wrong")
    table = tables.table(columns)
    for size, of_size in groupby(result["rows"], key=lambda row: row["size_bytes"]):
        rows = {(row["operation"], row["implementation"]): row for row in of_size}
        head, local = size_name(size), rows["local", MEMCPY]["algbw_gbps"]
        for (operation, name), row in rows.items():
            table.add_row(
                head,
                name if operation == "local" else _named(operation, name),
                _short(row["time_us"]["median"]),
                _short(row["time_us"]["p99"]),
                f"{row['algbw_gbps']:.1f}",
                Text() if name == MEMCPY else _ratio(row["algbw_gbps"] / local),
                *(_thousands(row.get(name)) for name in ("transfer_cycles", "cycles")),
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
        _of_cycles(result.get("counter")),
        *_bought(result["rows"]),
        tables.verdict(
            result,
            "every element, bit by bit, in targets poisoned before every implementation and size, "
            "before and after timing.",
        ),
        tables.machine(result),
    )


def _named(operation: str, implementation: str) -> str:
    """``put``, ``get async``, …"""
    return " ".join([operation, *implementation.removeprefix(WEFT).split()]).translate(_PLAIN)


_PLAIN = str.maketrans("", "", "()")


def _ratio(speed: float) -> Text:
    """A speed relative to memcpy's, red if it is below 1; the word for that has no place here."""
    return Text(f"{speed:.2f}x", "bold red" if round(speed, 2) < 1 else "")


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _thousands(cycles: float | None) -> str:
    return "" if cycles is None else _short(cycles / 1e3)


def _of_cycles(counter: dict[str, Any] | None) -> str:
    if counter is None or counter["name"] is None:
        return "kcycles: the result does not name a counter of the processor."
    return (
        f"kcycles: 1000 ticks of the {counter['name']}, {counter['mhz']:,g} MHz, of a single copy "
        "until it is complete; caller: what a copy costs its thread, asynchronous its submission."
    )


def _bought(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What asynchrony buys, and does not, at the smallest and the largest size."""
    found = {(row["size_bytes"], row["operation"], row["implementation"]): row for row in rows}
    sizes = sorted({row["size_bytes"] for row in rows})
    ends = dict.fromkeys([sizes[0], sizes[-1]])
    pairs = {size: (found[size, "get", ASYNC], found[size, "get", WEFT]) for size in ends}
    if any(not row["cycles"] for pair in pairs.values() for row in pair):
        return []
    said = (
        f"{one['algbw_gbps'] / other['algbw_gbps']:.2f} of the bandwidth of get for "
        f"{one['cycles'] / other['cycles']:.2f} of its caller's cycles ({size_name(size)})"
        for size, (one, other) in pairs.items()
    )
    return [
        f"On a CPU asynchrony buys the caller's time, not bandwidth. get async: {', '.join(said)}."
    ]


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
    call, window, cycles = contender.call, max(2, copies), _native.cycles
    singles, transfers = list[float](), list[float]()
    _complete(call())
    for _ in range(copies):
        start, ticks = perf_counter(), cycles()
        _complete(call())
        ticks = cycles() - ticks
        singles.append(perf_counter() - start)
        transfers.append(ticks)
    last, start, ticks = None, perf_counter(), cycles()
    for _ in range(window):
        last = call()
    ticks = cycles() - ticks
    _complete(last)
    return Samples(singles, transfers, [(perf_counter() - start) / window], [ticks / window])


def _complete(handle: object) -> None:
    if isinstance(handle, Transfer):
        handle.wait()


def _staged_get(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def _bits(tensor: Tensor) -> Tensor:
    """The elements of a tensor as integers of their size, which compare bit by bit."""
    return tensor.view(_INTEGERS[tensor.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        transfer_cycles=statistics.median(samples.transfers) or None,
        cycles=statistics.median(samples.callers) or None,
        wrong=check.wrong,
        copies=len(samples.singles),
        windows=len(samples.windows),
    )
