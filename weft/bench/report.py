"""The result of a fused operator's benchmark as JSON and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench import tables
from weft.bench.alone import ALONE
from weft.bench.fused import Result
from weft.bench.harness import times_ms
from weft.measure.timing import Statistics
from weft.predict import figures


def to_json(result: Result) -> dict[str, Any]:
    """The result as a JSON object. Times are in milliseconds; an error that is not finite is null.

    `max_error` is the largest error of any product of weft, and `error_bound` the largest bound of
    any element.
    """
    settings, environment = result.settings, result.environment
    products = [
        check
        for name, check in result.checks.items()
        if name != "communicate" and name not in result.baselines
    ]
    report = {
        "benchmark": settings.operator.replace("_", "-"),
        "ranks": environment["ranks"],
        "hosts": environment["hosts"],
        "neighbours": environment["neighbours"],
        "shape": asdict(settings.shape),
        "dtype": settings.dtype,
        "out_dtype": settings.result_dtype,
        "algorithm": result.choice.variant.algorithm,
        "chunk_rows": result.chunk_rows,
        "link": environment["link"],
        "times_ms": times_ms(result.times),
        "baselines_ms": times_ms(result.baselines),
        **_figures(result),
        "verified": not any(check.wrong for check in result.checks.values()),
        "max_error": _finite(max(check.max_error for check in products)),
        "error_bound": _finite(max(check.bound for check in products)),
        "machine": environment["machine"],
        "versions": environment["versions"],
    }
    return report | ({"ablation_ms": times_ms(result.ablation)} if result.ablation else {})


def print_tables(result: Result, console: Console) -> None:
    """Print the times, the figures, and the notes that explain them."""
    console.print(Text(title(result), "bold"), soft_wrap=True)
    console.print(
        _table(result, result.times | result.baselines, result.baselines), _figure_table(result)
    )
    if result.ablation:
        first = next(iter(result.ablation))
        console.print(_table(result, result.ablation, {first: result.ablation[first]}))
    tables.print_notes(console, *_notes(result))


def title(result: Result) -> str:
    """The operator, the ranks, the shape, the dtypes, the algorithm and the link, in one line."""
    settings, environment = result.settings, result.environment
    dtypes = (
        settings.dtype
        if settings.result_dtype == settings.dtype
        else f"{settings.dtype} to {settings.result_dtype}"
    )
    link = (
        f", emulated link of {environment['link']['gbps']:g} Gbit/s" if environment["link"] else ""
    )
    ranks, hosts = environment["ranks"], environment["hosts"]
    size = f"{ranks} rank{'s' if ranks > 1 else ''}{f' on {hosts} hosts' if hosts > 1 else ''}"
    name, algorithm = settings.operator.replace("_", "-"), result.choice.variant.algorithm
    loaded = tables.loaded(environment)
    return f"{name}: {size}, {settings.shape}, {dtypes}, {algorithm}{link}{loaded}"


def _table(
    result: Result, rows: Mapping[str, Statistics], compared: Mapping[str, Statistics]
) -> Table:
    """The times of `rows`, and the ratios to the baselines `compared` of all that do the same."""
    versus = (f"vs {name.partition('+')[0]}" for name in compared)
    table = tables.table(("", *tables.TIMES.values(), "runs", *versus))
    for name, times in rows.items():
        incomparable = name in ("compute", "communicate") or name in compared
        ratios = [
            Text() if incomparable else tables.ratio(baseline.median / times.median)
            for baseline in compared.values()
        ]
        checked = result.checks.get(name)
        label = tables.named(name, checked.wrong if checked else 0)
        numbers = (f"{getattr(times, key):.3f}" for key in tables.TIMES)
        table.add_row(label, *numbers, str(times.iterations), *ratios)
    return table


def _figure_table(result: Result) -> Table:
    table, figure = Table(box=None, show_header=False, pad_edge=False), _figures(result)
    table.add_row("speedup", tables.ratio(figure["speedup"]), "sequential / pipelined")
    table.add_row(
        "overlap", f"{figure['overlap_percent']:.0f} %", "of communicate is hidden behind compute"
    )
    table.add_row(
        "limit ratio",
        f"{figure['limit_ratio']:.3f}",
        "pipelined / max(compute, communicate); 1 is the limit",
    )
    table.add_row("TFLOP/s", f"{figure['tflops']:.3f}", "of each rank's product, pipelined")
    table.columns[1].justify = "right"
    return table


def _notes(result: Result) -> Iterator[Text]:
    settings = result.settings
    yield Text()
    if emulated := result.environment["link"]:
        link = f"{emulated['gbps']:g} Gbit/s, {emulated['latency_us']:g} us per transfer"
        yield Text(
            "EMULATED LINK: each rank's copies to and from peers take at least as long as on a "
            f"link of {link}.",
            "yellow",
        )
    algorithm, reason = result.choice.variant.algorithm, result.choice.reason
    yield Text(f"{algorithm}, at most {result.chunk_rows} rows per transfer: {reason}.")
    yield from map(Text, result.notes)
    if ALONE in result.baselines:
        threads = result.environment["ranks"] * result.environment["machine"]["threads_per_rank"]
        yield Text(
            f"{ALONE}: the products of all ranks by torch.mm on rank 0 with {threads} threads, "
            "while the others sleep."
        )
    for name, times in {**result.times, **result.baselines, **result.ablation}.items():
        if times.iterations < settings.iterations:
            yield Text(
                f"{name} is too slow for {settings.iterations} runs: {times.iterations} measured.",
                "yellow",
            )
    wrong = [name for name, check in result.checks.items() if check.wrong]
    if wrong:
        yield Text(
            f"NOT VERIFIED: wrong results from {', '.join(wrong)}. The times are meaningless.",
            "bold red",
        )
    else:
        report = to_json(result)
        errors = f"largest error {report['max_error']:.2g}, bound {report['error_bound']:.2g}"
        yield Text(
            "Verified on every rank, before and after timing, on new inputs and poisoned outputs: "
            f"{errors}.",
            "green",
        )
    yield tables.machine(result.environment)


def _figures(result: Result) -> dict[str, float]:
    shape, medians = result.settings.shape, [times.median for times in result.times.values()]
    return figures.of_overlap(*medians) | {
        "tflops": figures.tflops(shape.m, shape.k, shape.n, medians[-1])
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
