"""The tables of the benchmark of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from weft_tools.bench import tables
from weft_tools.bench.vllm.measure import PROMPT, SEQUENCES, TOKENS, verified
from weft_tools.bench.vllm.variants import COMMUNICATOR, SHARED, WEFT

Row = dict[str, Any]
Figure = Callable[[Row], float]


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Print the figures of every engine, and notes on how to read them."""
    options = result["options"]
    prompts, batches, counts = (options[name] for name in ("prefill", "batches", "neighbours"))
    console.print(Text(title(result), "bold"), soft_wrap=True)
    times = {f"{n} tokens": of("prefill_ms", n) for n in prompts}
    times |= {f"first of {n}": of("first_ms", n) for n in batches}
    _print(console, "Milliseconds of a prompt, and to the first token of a batch", result, times)
    times = dict[str, Figure]()
    for n in batches:
        times |= {f"batch {n}": of("token_ms", n, "median"), f"p99 {n}": of("token_ms", n, "p99")}
    _print(console, "Milliseconds of a token, median and p99", result, times)
    rates = {f"batch {n}": of("tokens_per_s", n) for n in batches}
    _print(console, "Tokens per second", result, rates, rates=True)
    if counts:
        times = {}
        for n in counts:
            kinds = {f"{n} busy": "median", f"p99 {n}": "p99"}
            times |= {head: of("neighbours_ms", n, kind) for head, kind in kinds.items()}
        words = "Milliseconds of a token of one sequence beside busy processes, median and p99"
        _print(console, words, result, times)
    tables.print_notes(console, *_notes(result))


def title(result: dict[str, Any]) -> str:
    """The client and the ranks."""
    return f"vLLM {result['versions']['vllm']}, {result['ranks']} ranks"


def base(result: dict[str, Any], row: Row) -> Row:
    """The row of the same model with which a row is compared: on vLLM's shared memory if it is
    measured.
    """
    same = [each for each in result["rows"] if kind(each) == kind(row)]
    return next((each for each in same if each["variant"] == SHARED), same[0])


def kind(row: Row) -> tuple[str, str]:
    """The model and the mode of a row."""
    return row["model"], row["mode"]


def of(figure: str, *keys: int | str) -> Figure:
    """The function that finds a figure in a row."""

    def found(row: Row) -> float:
        value = row[figure]
        for key in keys:
            value = value[str(key)]
        return float(value)

    return found


def _print(
    console: Console,
    heading: str,
    result: dict[str, Any],
    figures: dict[str, Figure],
    *,
    rates: bool = False,
) -> None:
    """Print a table with a column for each figure, and how many times as fast that is as `base`."""
    rows = [row for row in result["rows"] if row["neighbours_ms"] or "busy" not in heading]
    table = tables.table(("model", "mode", "", *figures), left=("model", "mode", ""))
    for before, row in zip((None, *rows), rows, strict=False):
        again = before is not None and kind(before) == kind(row)
        if before is not None and not again:
            table.add_section()
        name = tables.named(row["variant"], 0 if verified(row) else 1)
        table.add_row(
            *(("", "") if again else kind(row)), name, *_cells(result, row, figures, rates)
        )
    console.print(Text(heading), soft_wrap=True)
    tables.print_wide(console, table)


def _cells(
    result: dict[str, Any], row: Row, figures: dict[str, Figure], rates: bool
) -> Iterator[Text]:
    other = base(result, row)
    for figure in figures.values():
        mine, theirs = figure(row), figure(other)
        times = mine / theirs if rates else theirs / mine
        slower = row["variant"] in (COMMUNICATOR, WEFT) and round(times, 2) < 1
        yield Text(f"{mine:.1f} ").append(f"{times:5.2f}x", "bold red" if slower else "dim")


def _notes(result: dict[str, Any]) -> Sequence[Text | str]:
    against = base(result, result["rows"][0])["variant"]
    compared = f"{SEQUENCES * TOKENS} tokens of {SEQUENCES} sequences are the first variant's"
    least = min(row["shared_top"] for row in result["rows"])
    shown = {"verified": all(map(verified, result["rows"]))}  # engines that ended have no rows
    return (
        f"x: how many times as fast as {against}. Medians of {result['options']['rounds']} rounds "
        f"in which the engines of a model take turns; p99 of all tokens. Batches have prompts of "
        f"{PROMPT} tokens.",
        tables.verdict(
            shown,
            f"{compared}, and at least {least:.0%} of the likeliest tokens at each.",
        ),
        tables.machine(result),
    )
