"""Sweeps over message size: a row, its bandwidths, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from weft.bench import tables
from weft.bench.harness import Times


def bandwidths(
    operation: str, size_bytes: int, ranks: int, microseconds: float
) -> tuple[float, float]:
    """``(algbw, busbw)`` in GB/s of 1e9 bytes, as nccl-tests define them (``doc/PERFORMANCE.md``
    there).

    ``algbw = S / time`` and ``busbw = algbw · factor`` with n ranks:

    - all_gather: S is the gathered whole, n times each rank's input; factor (n − 1) / n
    - reduce_scatter: S is each rank's input; factor (n − 1) / n
    - all_reduce: S is each rank's input; factor 2 (n − 1) / n
    - broadcast: S is the tensor; factor 1
    - all_to_all: S is each rank's input; factor (n − 1) / n

    `size_bytes` is each rank's input for all of them.
    """
    whole = size_bytes * (ranks if operation == "all_gather" else 1)
    algbw = whole / (microseconds * 1e-6) / 1e9
    part = (ranks - 1) / ranks
    return algbw, algbw * {"broadcast": 1.0, "all_reduce": 2 * part}.get(operation, part)


def row(
    what: dict[str, Any], times: Times, algbw: float, busbw: float, **found: Any
) -> dict[str, Any]:
    """A row of a result: what was measured, its microseconds and bandwidths, and what else was
    found.
    """
    return what | {"time_us": times._asdict(), "algbw_gbps": algbw, "busbw_gbps": busbw} | found


def print_table(rows: Sequence[dict[str, Any]], baselines: Sequence[str], console: Console) -> None:
    """Print JSON rows as nccl-tests do, a line for each size and implementation, beside how weft
    compares with each baseline.
    """
    places = sorted({row["in_place"] for row in rows})
    of_places = [
        name
        for place in places
        for name in (f"{'in' if place else 'out of'} place\nus", "\nalgbw", "\nbusbw", "\n#wrong")
    ]
    table = tables.table(
        ("\nsize B", "\ncount", "\ntype", "", *of_places, *(f"\nvs {name}" for name in baselines))
    )
    for _, of_size in groupby(rows, key=lambda row: row["size_bytes"]):
        found = {(row["implementation"], row["in_place"]): row for row in of_size}
        head = [str(next(iter(found.values()))[key]) for key in ("size_bytes", "count", "dtype")]
        for name in dict.fromkeys(name for name, _ in found):
            cells = [cell for place in places for cell in _cells(found.get((name, place)))]
            first = next(place for place in places if (name, place) in found)
            theirs = [
                None if name in baselines else found.get((baseline, first))
                for baseline in baselines
            ]
            ours = found[name, first]["time_us"]["median"]
            compared = [
                tables.ratio(row["time_us"]["median"] / ours) if row else Text() for row in theirs
            ]
            table.add_row(*head, name, *cells, *compared)
            head = [""] * 3
        table.add_section()
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    console.width = max(console.width, needed)  # in a pipe there is no edge to fold columns at
    console.print(table)


def _cells(row: dict[str, Any] | None) -> list[Text]:
    if row is None:
        return [Text()] * 4
    numbers = row["time_us"]["median"], row["algbw_gbps"], row["busbw_gbps"]
    return [*(Text(f"{number:.2f}") for number in numbers), tables.count(row["wrong"])]
