"""The benchmark of one-sided copies over message size: put and get between two ranks. On a CPU
synchronous, asynchronous and staged, compared with local copies; on a GPU by the copy engine and by
a kernel on several numbers of SMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from weft.measure.timing import session
from weft_tools.bench import tables
from weft_tools.bench.copies import ASYNC, COPY_, MEMCPY, WEFT, HostCopies
from weft_tools.bench.gpu.copies import ENGINE, ENGINE_ASYNC, StreamCopies
from weft_tools.bench.gpu.ticks import DEVICE, INTERPRETED
from weft_tools.bench.harness import environment, every_size
from weft_tools.bench.neighbours import neighbours
from weft_tools.bench.pictures import COLOURS, DASHED, picture
from weft_tools.bench.plots import over_sizes, size_name
from weft_tools.bench.settings.copies import CopySettings

_LOCAL = {MEMCPY: DASHED, COPY_: (0, (1, 2))}  # the style of their lines in the picture


def measure(settings: CopySettings) -> dict[str, Any]:
    """Measure on this rank, collectively; the result as a JSON object, which is complete on rank 0.

    In its rows `time_us` is of single copies and `algbw_gbps` of windows, in 1e9 bytes per second
    (`busbw_gbps` is the same for two ranks). `transfer_cycles` are those of a single copy until it
    is complete, `cycles` those that a copy costs its caller, in ticks of the counter that the
    result names with its `mhz`; null without such a counter.
    """
    with (
        session(settings.threads, **settings.place) as world,
        neighbours(world, settings.neighbours),
    ):
        copies = (StreamCopies if world.stream_ordered else HostCopies)(settings, world)
        rows = every_size(settings, world, copies.rows)
        return {
            "benchmark": "p2p",
            "ranks": world.ranks,
            "hosts": len(set(world.hosts)),
            "neighbours": settings.neighbours,
            "counter": copies.ticks.counter(),
            "rows": rows,
            "verified": not any(row["wrong"] for row in rows),
            **environment(world, settings),
        }


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the rows of a result, and notes on how to read them."""
    on_streams = any(row["implementation"] == ENGINE for row in result["rows"])
    against = ENGINE if on_streams else MEMCPY
    ratio = "vs engine" if on_streams else f"vs {MEMCPY}"
    columns = ("size", "", "us", "p99", "GB/s", ratio, "kcycles", "caller", "wrong")
    table = tables.table(columns)
    for size, of_size in groupby(result["rows"], key=lambda row: row["size_bytes"]):
        rows, head = list(of_size), size_name(size)
        speeds = {(row["operation"], row["implementation"]): row["algbw_gbps"] for row in rows}
        for row in rows:
            compared = speeds.get((row["operation"] if on_streams else "local", against))
            same = compared is None or row["implementation"] == against
            table.add_row(
                head,
                escape(_named(row)),
                _short(row["time_us"]["median"]),
                _short(row["time_us"]["p99"]),
                f"{row['algbw_gbps']:.1f}",
                Text() if same else _ratio(result, row["algbw_gbps"] / (compared or 1)),
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
        "these are compared" + (", with the copy engine in that direction." if on_streams else "."),
        _of_cycles(result.get("counter")),
        *_bought(result["rows"]),
        *(
            ["On a CPU the engine is torch's copy, and streams are threads."]
            if on_streams and tables.options_of(result).get("device") == "cpu"
            else []
        ),
        *tables.checking(result),
        tables.verdict(
            result,
            "every element, bit by bit, in targets poisoned before every implementation and size, "
            "before and after timing.",
        ),
        *tables.disturbed(result),
        tables.machine(result),
    )


def _named(row: dict[str, Any]) -> str:
    """``put``, ``get async``, ``put engine``, ``get 4 SMs``, ``memcpy``, …"""
    words = [word.strip("(,)") for word in _label(row).split()]
    if row["operation"] == "local":
        return " ".join(words)
    implied = {WEFT, "copy", "kernel", *(["engine"] if "async" in words else [])}
    return " ".join([row["operation"], *(word for word in words if word not in implied)])


def _label(row: dict[str, Any]) -> str:
    """The implementation of a row, with the number of SMs of a kernel."""
    sms = row.get("comm_sms")
    return f"{row['implementation']}, {sms} SMs" if sms else str(row["implementation"])


def _ratio(result: dict[str, Any], speed: float) -> Text:
    """A relative speed, red if it is below 1; the word for that has no place in this table."""
    if tables.busy(result):
        return Text(tables.BUSY_MACHINE, "dim")
    return Text(f"{speed:.2f}x", "bold red" if round(speed, 2) < 1 else "")


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _thousands(cycles: float | None) -> str:
    return "" if cycles is None else _short(cycles / 1e3)


def _of_cycles(counter: dict[str, Any] | None) -> str:
    if counter is None or counter["name"] is None:
        return "kcycles: the result does not name a counter of the processor."
    costs = (
        "for how long a copy holds the caller's stream"
        if counter["name"] in (DEVICE, INTERPRETED)
        else "what a copy costs its thread"
    )
    return (
        f"kcycles: 1000 ticks of the {counter['name']}, {counter['mhz']:,g} MHz, of a single copy "
        f"until it is complete; caller: {costs}, asynchronous its submission."
    )


def _bought(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What an asynchronous get buys at the smallest and the largest size, by its figures."""
    found = {
        (row["size_bytes"], row["implementation"]): row for row in rows if row["operation"] == "get"
    }
    sizes = sorted({size for size, _ in found})
    said = list[str]()
    for size in dict.fromkeys([sizes[0], sizes[-1]]):
        one, other = (
            next(found[size, name] for name in names if (size, name) in found)
            for names in ((ASYNC, ENGINE_ASYNC), (WEFT, ENGINE))
        )
        if not one["cycles"] or not other["cycles"]:
            return []
        bandwidth = one["algbw_gbps"] / other["algbw_gbps"]
        cycles = one["cycles"] / other["cycles"]
        said.append(
            f"{size_name(size)}: {bandwidth:.2f} of the bandwidth of get for {cycles:.2f} of its "
            f"caller's cycles, which buys {bought(bandwidth, cycles)}"
        )
    return [f"get async, {'; '.join(said)}."]


def bought(bandwidth: float, cycles: float) -> str:
    """What one copy has more of than another, with this part of its bandwidth and of its caller's
    cycles; a twentieth is none.
    """
    gains = [
        *(["bandwidth"] if bandwidth > 1.05 else []),
        *(["the caller's time"] if cycles < 0.95 else []),
    ]
    return " and ".join(gains) or "nothing"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the bandwidth of all implementations over size, for put and for get, with local copies,
    into a PNG or SVG file.
    """
    title = f"p2p: rank 0 and rank {result['ranks'] - 1}, and local copies"
    about = tables.about(result)
    with picture(path, 11, 4.4, title, verified=result["verified"], about=about) as figure:
        for axes, operation in zip(figure.subplots(1, 2, sharey=True), ("put", "get"), strict=True):
            rows = [row for row in result["rows"] if row["operation"] in (operation, "local")]
            series = dict[str, list[dict[str, Any]]]()
            for row in rows:
                series.setdefault(_label(row), []).append(row)
            for label, own in series.items():
                name = own[0]["implementation"]
                axes.plot(
                    [row["size_bytes"] for row in own],
                    [row["algbw_gbps"] for row in own],
                    label=label,
                    marker="o",
                    color=COLOURS[name],
                    linestyle=_LOCAL.get(name, "-"),
                    alpha=_alpha(own[0], rows),
                )
            over_sizes(axes, [row["size_bytes"] for row in rows], "bytes of a copy")
            axes.set_title(f"{operation}, GB/s")
            axes.set_ylim(bottom=0)
        labelled = {  # of both panels, each once
            label: line
            for axes in figure.axes
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=4)


def _alpha(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    """The opacity of a line: a kernel's grows with its SMs."""
    numbers = sorted({row["comm_sms"] for row in rows if row.get("comm_sms")})
    return (numbers.index(row["comm_sms"]) + 1) / len(numbers) if row.get("comm_sms") else 1.0
