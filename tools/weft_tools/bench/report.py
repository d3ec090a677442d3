"""The result of a fused operator's benchmark as JSON, and the tables of such a JSON object."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.values import Shape
from weft.plan.trace import Trace
from weft.schedules.device_options import DEFAULT, DeviceOptions, tile_of
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, Variant
from weft_tools.bench import cascade, noise, tables
from weft_tools.bench.alone import ALONE
from weft_tools.bench.harness import times_ms
from weft_tools.bench.result import Result
from weft_tools.predict import figures


def to_json(result: Result) -> dict[str, Any]:
    """The result as a JSON object. Times are in milliseconds; an error that is not finite is null.

    `max_error` is the largest error of any product of weft, and `error_bound` the largest bound of
    any element.
    """
    settings, environment = result.settings, result.environment
    products = [
        check
        for name, check in result.checks.items()
        if name != "communicate" and name not in {*result.baselines, *result.slow}
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
        "order": result.choice.variant.order,
        "reason": result.choice.reason,
        "notes": [*result.notes],
        "link": environment["link"],
        "times_ms": times_ms(result.times),
        "baselines_ms": times_ms(result.baselines),
        "baselines_multiply_in": result.multiplied_in or settings.result_dtype,
        "slow_baselines_ms": {
            name: times | {"measured_rows": result.measured_rows}
            for name, times in times_ms(result.slow).items()
        },
        "streamed_ms": times_ms(result.streamed),
        **_figures(result),
        "hidden_percent": {trace.title: hidden(trace) for trace in result.traces},
        "wrong": {name: check.wrong for name, check in result.checks.items()},
        "verified": not any(check.wrong for check in result.checks.values()),
        "max_error": _finite(max(check.max_error for check in products)),
        "error_bound": _finite(max(check.bound for check in products)),
        **{key: environment[key] for key in ("options", "date", "machine", "versions")},
    }
    if result.without_gathered:
        report["without_gathered_ms"] = times_ms(result.without_gathered)
        report["cascade"] = [one._asdict() for one in result.cascade]
    return report | ({"ablation_ms": times_ms(result.ablation)} if result.ablation else {})


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Print the times, the figures, and the notes that explain them, of a result as JSON."""
    console.print(Text(title(report), "bold"), soft_wrap=True)
    baselines, ablation = report["baselines_ms"], report.get("ablation_ms", {})
    rows = report["times_ms"] | report.get("without_gathered_ms", {}) | report["streamed_ms"]
    rows |= baselines | report.get("slow_baselines_ms", {})
    tables.print_wide(console, _table(report, rows, baselines), _figure_table(report))
    if ablation:
        first = next(iter(ablation))
        tables.print_wide(console, _table(report, ablation, {first: ablation[first]}))
    tables.print_notes(console, *_notes(report))


def title(report: dict[str, Any]) -> str:
    """The operator, the ranks, the shape, the dtypes, the algorithm, the options of the call and
    the link, in one line.
    """
    dtype, result_dtype = report["dtype"], report["out_dtype"]
    dtypes = dtype if result_dtype == dtype else f"{dtype} to {result_dtype}"
    link = f", emulated link of {report['link']['gbps']:g} Gbit/s" if report["link"] else ""
    ranks, hosts = report["ranks"], report["hosts"]
    size = f"{ranks} rank{'s' if ranks > 1 else ''}{f' on {hosts} hosts' if hosts > 1 else ''}"
    what = ", ".join([size, str(Shape(**report["shape"])), dtypes, _variant(report)])
    options = "".join(f", {words}" for words in _options(report["options"]))
    return f"{report['benchmark']}: {what}{options}{link}{tables.loaded(report)}"


def _variant(report: dict[str, Any]) -> str:
    return str(Variant(report["algorithm"], order=report.get("order", ORDERS[0])))


def _options(options: dict[str, Any]) -> Iterator[str]:
    """The options that decide what is measured, in words."""
    if options.get("bias"):
        yield "bias"
    if options.get("return_gathered"):
        yield "gathered rows returned"
    if (threads := options.get("comm_threads", 1)) > 1:
        yield f"{threads} comm threads"
    tile, own = (
        tile_of(name) if (name := options.get(option)) else None for option in ("tile", "own_tile")
    )
    device = DeviceOptions(
        tile,
        options.get("compute_sms"),
        options.get("comm_sms", 0),
        options.get("links", 1),
        own,
    )
    if device != DEFAULT:
        yield str(device)


Times = Mapping[str, Mapping[str, float]]
"""Times in milliseconds as in JSON, by the names of the measured calls."""


def _table(report: dict[str, Any], rows: Times, compared: Times) -> Table:
    """The times of `rows`, and the ratios to the baselines `compared` of all that do the same."""
    versus = (f"vs {name.partition('+')[0]}" for name in compared)
    table = tables.table(("", *tables.TIMES.values(), "runs", *versus))
    for name, times in rows.items():
        parts = "compute", figures.IN_CHUNKS, "communicate"
        incomparable = name in parts or name in compared or tables.is_slow(report, name)
        ratios = [
            Text() if incomparable else tables.compared(report, times, baseline)
            for baseline in compared.values()
        ]
        label = tables.named(called(report, name), report["wrong"].get(name, 0))
        numbers = tables.milliseconds(times)
        table.add_row(label, *numbers, str(times["runs"]), *ratios)
    return table


def overlaps(report: dict[str, Any]) -> bool:
    """Whether the measured algorithm is another than the one without overlap beside it."""
    operator = OPERATORS.get(report["benchmark"].replace("-", "_"))
    return operator is None or report["algorithm"] != operator.baseline


def called(report: dict[str, Any], name: str) -> str:
    """The label of a measured call: weft's algorithm; a baseline's compute dtype if it differs from
    that of the results; a mark if its times are scaled.
    """
    if tables.is_scaled(report, name):
        return f"{name}, SCALED"
    other = report.get("baselines_multiply_in", report.get("out_dtype"))
    if name in report.get("baselines_ms", ()) and other != report.get("out_dtype"):
        return f"{name} in {other}"
    if name != "pipelined":
        return name
    return f"{name if overlaps(report) else 'weft'} ({_variant(report)})"


def _figure_table(report: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    if overlaps(report):
        meanings = {
            "speedup": "sequential / pipelined",
            "overlap_percent": "of communicate is hidden behind compute",
            "limit_ratio": "pipelined / max(compute, communicate); 1 is the limit",
        }
        for gain in tables.gains(report, meanings):
            table.add_row(*gain)
    if "chunking_ms" in report:
        overlapped = next(iter(report["streamed_ms"]), "pipelined")
        times = report["times_ms"]
        digits = noise.decimals(*(times[name] for name in ("compute", "pipelined")))
        for name, meaning in (
            ("chunking", f"cost of cutting: {figures.IN_CHUNKS} - compute"),
            ("exposed", f"cost of waiting: {overlapped} - {figures.IN_CHUNKS}"),
        ):
            cost = round(report[f"{name}_ms"], digits) + 0.0  # no -0
            table.add_row(name, f"{cost:.{digits}f} ms", meaning)
    for name, hidden in report.get("hidden_percent", {}).items():
        if hidden is not None:
            table.add_row("hidden", f"{hidden:.0f} %", f"of copying is behind products: {name}")
    table.add_row("TFLOP/s", f"{report['tflops']:.3g}", "of each rank's product, by weft")
    table.columns[1].justify = "right"
    return table


def _notes(report: dict[str, Any]) -> Iterator[Text]:
    yield Text()
    if emulated := report["link"]:
        link = f"{emulated['gbps']:g} Gbit/s, {emulated['latency_us']:g} us per transfer"
        yield Text(
            "EMULATED LINK: each rank's copies to and from peers take at least as long as on a "
            f"link of {link}.",
            "yellow",
        )
    chunk = f"at most {report['chunk_rows']} rows per transfer"
    yield Text(f"{_variant(report)}, {chunk}: {report['reason']}.")
    if not overlaps(report):
        yield Text(
            "Nothing overlaps: weft and sequential are the same calls, so their times differ by "
            "noise. Overlap gains where communicate takes long: try --link-gbps auto."
        )
    for name, times in report["streamed_ms"].items():
        if not tables.busy(report):
            yield Text(_why_not_streamed(report, name, times["median"]))
    yield from map(Text, report["notes"])
    for times in report.get("without_gathered_ms", {}).values():
        pipelined = report["times_ms"]["pipelined"]
        more = pipelined["median"] - times["median"]
        digits = noise.decimals(pipelined, times)
        yield Text(f"To return the gathered rows takes {more:+.{digits}f} ms.")
    if ALONE in report["baselines_ms"]:
        threads = report["ranks"] * report["machine"]["threads_per_rank"]
        yield Text(
            f"{ALONE}: the products of all ranks by torch.mm on rank 0 with {threads} threads, "
            "while the others sleep."
        )
    yield from _slow_baselines(report)
    yield from tables.checking(report)
    yield from tables.disturbed(report)
    if overlaps(report):
        yield from tables.noisy(report)
    yield from map(Text, cascade.sentences(report.get("cascade", [])))
    yield from tables.cut_short(report)
    wrong = [name for name, count in report["wrong"].items() if count]
    if wrong:
        yield Text(
            f"NOT VERIFIED: wrong results from {', '.join(wrong)}. The times are meaningless.",
            "bold red",
        )
    else:
        errors = f"largest error {report['max_error']:.2g}, bound {report['error_bound']:.2g}"
        yield Text(
            "Verified on every rank, before and after timing, on new inputs and poisoned outputs: "
            f"{errors}.",
            "green",
        )
    yield tables.machine(report)


def _slow_baselines(report: dict[str, Any]) -> Iterator[Text]:
    """How baselines were measured that multiply more slowly than others."""
    slow = report.get("slow_baselines_ms", {})
    if not slow:
        return
    names, rows = " and ".join(slow), report["shape"]["m"]
    measured = next(iter(slow.values()))["measured_rows"]
    if measured == rows:
        yield Text(f"{names}: by torch.mm as it is, without ratios.")
        return
    verb = "was" if len(slow) == 1 else "were"
    yield Text(
        f"SCALED: {names} {verb} measured, and verified, on {measured} of {rows} rows, and the "
        f"times multiplied by {rows / measured:g}, since all rows would take seconds, and rather "
        "more than that. No ratio is to them.",
        "yellow",
    )


def _why_not_streamed(report: dict[str, Any], name: str, streamed: float) -> str:
    """A sentence on what an algorithm that streams would take, in milliseconds, and why."""
    compute, communicate, _, pipelined = (
        report["times_ms"][view]["median"] for view in figures.VIEWS
    )
    takes = f"{name}, which multiplies while rows arrive, takes {streamed / pipelined:.2f} times"
    if streamed < pipelined:
        return f"{takes} the time of {report['algorithm']}: too little gain for auto to be sure of."
    return (
        f"{takes} the time of {report['algorithm']}: communicate is {communicate / compute:.0%} of "
        "compute, and cutting the product costs more than hiding that gains."
    )


def _figures(result: Result) -> dict[str, float]:
    shape, medians = result.settings.shape, {n: time.median for n, time in result.times.items()}
    pipelined = medians["pipelined"]
    found = figures.of_overlap(*(medians[name] for name in figures.VIEWS))
    found["tflops"] = figures.tflops(shape.m, shape.k, shape.n, pipelined)
    if figures.IN_CHUNKS in medians:
        overlapped = next((time.median for time in result.streamed.values()), pipelined)
        found |= figures.of_cutting(medians["compute"], medians[figures.IN_CHUNKS], overlapped)
    return found


def hidden(trace: Trace) -> float | None:
    """The percentage of copying behind products; None if nothing is copied."""
    part = trace.hidden_copies()
    return None if part is None else 100 * part


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
