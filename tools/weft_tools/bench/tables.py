"""The cells of the tables of results, and the notes below a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from weft.cli.tables import table as table
from weft.doctor.cores import BUSY
from weft_tools.bench import noise
from weft_tools.bench.settings.shared import CHECKING

TIMES = {"median": "median ms", "min": "min ms", "p99": "p99 ms"}
"""The columns of milliseconds, by the keys of times in JSON."""


def print_wide(console: Console, *tables: Table) -> None:
    """Print tables without folding any column, also in a pipe."""
    for each in tables:
        needed = Measurement.get(console, console.options.update(max_width=1000), each).maximum
        console.width = max(console.width, needed)
        console.print(each)


def ratio(times: float) -> Text:
    """The speed of weft relative to another, marked if it is below 1."""
    return (
        Text(f"{times:.2f}x") if round(times, 2) >= 1 else Text(f"{times:.2f}x SLOWER", "bold red")
    )


def count(wrong: int) -> Text:
    """A number of wrong elements, red unless it is 0."""
    return Text(str(wrong), "bold red" if wrong else "")


def named(name: str, wrong: int) -> Text:
    """The name of a measured call, marked if it has wrong elements."""
    return Text(f"{name} WRONG", "bold red") if wrong else Text(name)


def options_of(result: dict[str, Any]) -> dict[str, Any]:
    """The options of a result; results of earlier versions have none."""
    found: dict[str, Any] = result.get("options", {})
    return found


def loaded(result: dict[str, Any]) -> str:
    """What the heading of a result says of GPUs, of an engine that is not the default, and of busy
    neighbours.
    """
    options, count, words = options_of(result), result.get("neighbours"), ""
    if options.get("device") == "cuda":
        gpus = result["machine"]["gpus"]
        words = f", on {gpus} GPU{'s' if gpus > 1 else ''}"
    if options.get("engine"):
        words += f", engine {options['engine']}"
    return words + (f", beside {count} busy process{'es' if count > 1 else ''}" if count else "")


def times_of(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The times in milliseconds of all measured calls of a result, by their names."""
    kinds = (
        "times_ms",
        "without_gathered_ms",
        "streamed_ms",
        "baselines_ms",
        "slow_baselines_ms",
        "ablation_ms",
    )
    return {name: times for kind in kinds for name, times in result.get(kind, {}).items()}


def is_slow(result: dict[str, Any], name: str) -> bool:
    """Whether this is a baseline that multiplies more slowly than another of torch."""
    return name in result.get("slow_baselines_ms", {})


def is_scaled(result: dict[str, Any], name: str) -> bool:
    """Whether the times of a call were measured on fewer rows than it is said to have."""
    times = result.get("slow_baselines_ms", {}).get(name, {})
    return bool(times) and times["measured_rows"] != result["shape"]["m"]


def cut_short(result: dict[str, Any]) -> Iterator[Text]:
    """A warning of measured calls that had fewer runs than were asked for, and why."""
    options = options_of(result)
    asked = options.get("iterations", 0)
    runs = {name: time.get("runs", asked) for name, time in times_of(result).items()}
    if few := {name: number for name, number in runs.items() if number < asked}:
        names, least, most = ", ".join(few), min(few.values()), max(few.values())
        measured = f"{least}" if least == most else f"{least} to {most}"
        if "seconds" in options:  # preparations take a part of them, too
            why = f"--seconds {options['seconds']:g} left no time for {asked} runs of {names}"
        else:
            why = f"{names} {'is' if len(few) == 1 else 'are'} too slow for {asked} runs"
        yield Text(f"{why}: {measured} measured.", "yellow")


def milliseconds(times: Mapping[str, float]) -> Iterator[str]:
    """The cells of `TIMES`, without digits that are noise; results of earlier versions have no
    p99.
    """
    digits = noise.decimals(times)
    return (f"{times[key]:.{digits}f}" if key in times else "-" for key in TIMES)


def busy(result: dict[str, Any]) -> bool:
    """Whether other programs than its neighbours took the cores of a result's ranks: its ratios
    tell nothing.
    """
    waited: float = result.get("machine", {}).get("waited_for_core_percent", 0)
    disturbed = waited >= 100 * BUSY and not result.get("neighbours")
    return disturbed and not _shares_cores(result)


def _shares_cores(result: dict[str, Any]) -> bool:
    """Whether the ranks of a result have more threads than cores."""
    on = result["machine"]
    threads: int = result.get("ranks", 1) * (on.get("threads_per_rank") or 1)
    return bool(result.get("hosts", 1) == 1 and threads > on["cores"])


def ratio_in(result: dict[str, Any], times: float) -> Text:
    """As `ratio`, or a word in its place if the machine was busy."""
    return Text(BUSY_MACHINE, "dim") if busy(result) else ratio(times)


def compared(
    result: dict[str, Any], times: Mapping[str, float], other: Mapping[str, float]
) -> Text:
    """The speed of a call of a result relative to another one, roughly if it is noise."""
    if busy(result):
        return Text(BUSY_MACHINE, "dim")
    times_as_fast = other["median"] / times["median"]
    if noise.alike(times, other) and noise.spread(times):
        return Text(f"{times_as_fast:.1f}x", "dim")
    return ratio(times_as_fast)


class Gain(NamedTuple):
    """A figure of overlap: its name, its value, and its meaning; of one that is noise the value is
    that word.
    """

    name: str
    value: Text
    meaning: str


NOISE = "noise"
"""The value of a figure that is no more than noise."""
BUSY_MACHINE = "busy"
"""The value of a figure that was measured while the machine was busy."""
WHILE_BUSY = "measured while other programs had the cores"


def gains(result: dict[str, Any], meanings: Mapping[str, str]) -> Iterator[Gain]:
    """The figures of overlap of a result, in the order of their `meanings`, which are by the keys
    speedup, overlap_percent and limit_ratio.
    """
    values = {
        "speedup": ratio(result["speedup"]),
        "overlap_percent": Text(f"{result['overlap_percent']:.0f} %"),
        "limit_ratio": Text(f"{result['limit_ratio']:.2f}"),
    }
    doubts = noise.doubts(result)
    for key, meaning in meanings.items():
        name = key.removesuffix("_percent").replace("_", " ")
        number = values[key].plain.partition(" SLOWER")[0]
        if busy(result):
            yield Gain(name, Text(BUSY_MACHINE, "yellow"), f"{number}: {WHILE_BUSY}")
        elif key in doubts:
            yield Gain(name, Text(NOISE, "yellow"), f"{number}: {doubts[key]}")
        else:
            yield Gain(name, values[key], meaning)


def noisy(result: dict[str, Any]) -> Iterator[Text]:
    """A note if figures of a result are noise."""
    if noise.doubts(result) and not busy(result):
        yield Text(
            "Figures that are noise are so named. More --iterations, a larger shape or an idle "
            "machine would tell.",
            "yellow",
        )


def disturbed(result: dict[str, Any]) -> Iterator[Text]:
    """Warnings of ranks that share cores, and of cores that other programs used meanwhile."""
    on = result["machine"]
    if _shares_cores(result):
        threads = result.get("ranks", 1) * on["threads_per_rank"]
        yield Text(
            f"OVERSUBSCRIBED: the ranks have {threads} threads in all on {on['cores']} core(s), so "
            "they wait for each other's time slices: use fewer --ranks or --threads.",
            "yellow",
        )
    if busy(result):
        yield Text(
            f"BUSY MACHINE: rank 0 waited for a core in {on['waited_for_core_percent']:.0f} % of "
            "its time, as other programs ran: the times are longer than on an idle machine, and "
            "noisy, so no ratios are shown.",
            "yellow",
        )


def checking(result: dict[str, Any]) -> Iterator[Text]:
    """A warning if the engine of a result is for checks."""
    engine = options_of(result).get("engine")
    if engine in CHECKING:
        yield Text(f"The engine {engine} checks results: its times are no speeds.", "yellow")


def machine(result: dict[str, Any]) -> Text:
    """The machine and the versions of a result."""
    on, versions = result["machine"], result["versions"]
    where = f"{on['cpu']}, {on['cores']} cores, threads per rank: {on['threads_per_rank']}"
    if "gpu" in on:
        where = f"{on['gpus']} x {on['gpu']}, {on['sms']} SMs; {where}"
    return Text(
        f"{where}; {', '.join(f'{name} {version}' for name, version in versions.items())}", "dim"
    )


def about(result: dict[str, Any]) -> str:
    """The date, the machine and the versions of a result, the line below its pictures."""
    return f"{result['date']}; {machine(result)}"


def verdict(result: dict[str, Any], sentence: str) -> Text:
    """A sentence on the verification, or a warning of wrong results."""
    if result["verified"]:
        return Text(f"Verified: {sentence}", "green")
    return Text("NOT VERIFIED: there are wrong results. Their times are meaningless.", "bold red")


def print_notes(console: Console, *notes: Text | str) -> None:
    """Print each note on one line, which the console may wrap."""
    for note in notes:
        console.print(Text(note) if isinstance(note, str) else note, soft_wrap=True)
