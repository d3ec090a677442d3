"""Predictions for ``weft predict``: as JSON objects, and as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant, Workload
from weft_tools.predict import figures, overlap
from weft_tools.predict.collectives import collective_candidates
from weft_tools.predict.copies import ASYNCHRONOUS, copies
from weft_tools.predict.forecast import forecast, savings
from weft_tools.predict.machine import THIS, Machine

_WORTH = 0.02  # of the time: a change that saves less is not mentioned
RESOURCES = {
    "products twice as fast": "the product",
    "links of twice the bandwidth": "the link",
    "memory twice as fast": "memory",
    "no latencies": "latency",
    "no interference": "interference of communication and computation",
}
"""The bottleneck that each of `weft_tools.predict.changes` would remove."""


def answer(
    case: Workload, machine: Machine, algorithm: str = "auto", chunk_rows: int | None = None
) -> dict[str, Any]:
    """The prediction for a case as a JSON object: times in milliseconds, K of a rank's product."""
    prediction = forecast(case, machine, algorithm, chunk_rows)
    best, fastest = prediction.variants[0]
    times = (*prediction[:3], fastest)
    overlap = figures.of_overlap(*times) if prediction.communicate else {"overlap_percent": None}
    return {
        "predicted": case.operator.replace("_", "-"),
        "machine": machine.name,
        "ranks": case.ranks,
        "hosts": len(set(machine.hosts or (0,))),
        "shape": {"m": sum(case.rows), "k": case.k, "n": case.n},
        "dtype": case.dtype,
        "out_dtype": case.out_dtype,
        "link": machine.links[-1].gbs * 8 if machine.links[-1].idle else None,
        **to_json(case, best),
        "times_ms": {
            name: 1e3 * seconds for name, seconds in zip(figures.VIEWS, times, strict=True)
        },
        "ways": [
            {**to_json(case, each), "ms": 1e3 * seconds} for each, seconds in prediction.variants
        ],
        "speedup": figures.speedup(prediction.sequential, fastest),
        "limit_ratio": figures.limit_ratio(prediction.compute, prediction.communicate, fastest),
        **overlap,
        "saved_percent": {change: 100 * saved for change, saved in savings(case, best, machine)},
        "measured_on": machine.ranks,
    }


def variant(entry: dict[str, Any]) -> Variant:
    """The variant of an entry of an answer's variants; of the answer itself, the fastest one."""
    return Variant(entry["algorithm"], entry["pieces"], entry["order"])


def baseline(result: dict[str, Any]) -> str:
    """The algorithm without overlap of an answer's operator."""
    return OPERATORS[result["predicted"].replace("-", "_")].baseline


def to_json(case: Workload, variant: Variant) -> dict[str, Any]:
    """A variant as a JSON object, with the largest number of rows in one of its transfers."""
    rows = OPERATORS[case.operator].chunk_rows(case.rows, variant)
    return {**variant.to_json(), "chunk_rows": rows}


def collective(operator: str, sizes: Sequence[int], ranks: int, machine: Machine) -> dict[str, Any]:
    """The predictions for a collective as a JSON object; times in microseconds.

    `sizes` are numbers of bytes on each rank.
    """
    rows = [
        {"bytes": size, "way": each.name, "us": 1e6 * each.seconds, "notifies": each.notifies}
        for size in sizes
        for each in collective_candidates(operator, size, ranks, machine)
    ]
    return {
        "predicted": operator.replace("_", "-"),
        "machine": machine.name,
        "ranks": ranks,
        "notify_us": machine.notify_us,
        "notify_source": machine.notify_source,
        "rows": rows,
    }


def copy(
    sizes: Sequence[int], ranks: int, synchronous: Machine, asynchronous: Machine
) -> dict[str, Any]:
    """The predictions for one-sided copies as a JSON object: microseconds, GB/s of 1e9 bytes, and
    cycles of the device, None where the profile does not know its counter.
    """
    rows = [
        {
            "bytes": size,
            "way": call,
            "us": 1e6 * seconds,
            "gbps": size / seconds / 1e9,
            "cycles": cycles,
        }
        for size in sizes
        for call, seconds, cycles in copies(size, ranks, synchronous, asynchronous)
    ]
    link = synchronous.link(0, ranks - 1)
    return {
        "predicted": "copy",
        "machine": asynchronous.name.removesuffix(f"/{ASYNCHRONOUS}"),
        "ranks": ranks,
        "starts": bool(
            link.latency_us or link.line_us or (synchronous.launch_us and not synchronous.in_place)
        ),
        "rows": rows,
    }


def beside(
    cases: Sequence[overlap.Beside], ways: Mapping[str, Machine], machine: Machine
) -> dict[str, Any]:
    """The predictions for a product and an independent all-gather as a JSON object: milliseconds of
    each alone and of both one after the other on `machine`, and of both at once in each of `ways`.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        compute, communicate, sequential = (
            1e3 * overlap.time(case, part, machine) for part in overlap.ALONE
        )
        for part, took in zip(overlap.ALONE, (compute, communicate, sequential), strict=True):
            rows.append({"bytes": case.size, "way": part, "ms": took})
        for name, on in ways.items():
            took = 1e3 * overlap.time(case, overlap.AT_ONCE, on)
            of = figures.of_overlap(compute, communicate, sequential, took)
            rows.append({"bytes": case.size, "way": name, "ms": took, **of})
    first = cases[0]
    return {
        "predicted": "overlap",
        "machine": machine.name,
        "ranks": first.ranks,
        "shape": {"m": first.m, "k": first.k, "n": first.n},
        "dtype": first.dtype,
        "rows": rows,
        "interference": any(
            on.compute_slowdown > 1 or on.communicate_slowdown > 1 for on in ways.values()
        ),
    }


def words(result: dict[str, Any]) -> list[str]:
    """An answer as sentences: the gain of overlap, the bottleneck, and its remedies."""
    best = variant(result)
    times = result["times_ms"]
    sequential, pipelined = (ms(times[name]) for name in ("sequential", "pipelined"))
    alone = times["compute"] + times["communicate"]  # by the fastest transfers, without overlap
    if best.algorithm == baseline(result):
        line = (
            f"Overlap would not help: one after the other takes {sequential} ms, and no "
            "overlapping algorithm is faster."
        )
    elif result["speedup"] < 1 + _WORTH:
        line = f"Overlap would hardly help: {best} takes {pipelined} ms, sequential {sequential}."
    else:
        gain = (
            f"takes {pipelined} ms instead of {sequential}, {result['speedup']:.2f} times as fast"
        )
        line = f"Overlap helps: {best} {gain}."
        transfers = times["sequential"] / alone
        hidden = alone / times["pipelined"]
        if transfers > hidden:
            line = (
                f"{str(best).capitalize()} {gain}: {transfers:.2f} times by faster transfers than "
                f"those of sequential, {hidden:.2f} times by overlap."
            )
    others = [entry for entry in result["ways"][1:] if entry["algorithm"] != baseline(result)]
    if others:
        name = str(variant(others[0]))
        line += f" {name[0].upper()}{name[1:]} would take {ms(others[0]['ms'])} ms."
    lines = [line]
    saved = {
        change: f"{change} would save {percent:.0f} %"
        for change, percent in result["saved_percent"].items()
        if percent > 100 * _WORTH
    }
    if saved:
        lines.append(
            f"The bottleneck is {RESOURCES[next(iter(saved))]}: {', '.join(saved.values())}."
        )
    impossible = times["pipelined"] < (1 - _WORTH) * times["compute"]
    if result["machine"] == THIS and impossible:
        lines.append(
            "The times contradict each other: less than the product alone. So the profile was "
            "measured while other programs used the cores; measure it again by weft calibrate."
        )
    if result["measured_on"] and result["ranks"] > result["measured_on"]:
        lines.append(
            f"The profile was fitted on {result['measured_on']} ranks; beyond them its second link "
            "is an assumption."
        )
    return lines


def total(results: Sequence[dict[str, Any]]) -> str:
    """A sentence on the time of several operators, one after the other."""
    compute, _, sequential, pipelined = (
        sum(result["times_ms"][name] for result in results) for name in figures.VIEWS
    )
    less = 100 * (1 - pipelined / sequential)
    return (
        f"Together: {ms(pipelined)} ms instead of {ms(sequential)}: "
        f"{sequential / pipelined:.2f} times as fast, {less:.0f} % less time. "
        f"The products alone take {ms(compute)} ms, which no overlap can beat."
    )


def ms(milliseconds: float) -> str:
    """Milliseconds with one decimal from 100 on, and else three."""
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.1f}"
