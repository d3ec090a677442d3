"""Saved results of ``weft bench`` and their traces, and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from weft.outside import parsed, read_text
from weft.plan.trace import Trace, from_perfetto
from weft_tools.bench import tables
from weft_tools.bench.benchmarks import Result

MOST_BYTES = 1 << 30
"""Of a result or a trace that is read."""
_PASSING = {"waited_for_core_percent"}
"""Entries of a machine that differ in every run."""


def load(file: Path) -> Result:
    """The result in a file. Raises `ValueError` if it is none or cannot be read."""
    found = _json(file)
    if not isinstance(found, dict) or not isinstance(found.get("benchmark"), str):
        raise ValueError(f"{file} is no result of weft bench --json")
    return found


def load_together(files: Sequence[Path]) -> Result:
    """The result in a file; of several files of one benchmark over sizes one result with the rows
    of all, of which an implementation that an earlier file has too is named after its own file.
    Raises as `load`, and `ValueError` for results that do not compare.
    """
    first, *others = map(load, files)
    if not others:
        return first
    rows = list(first.get("rows", []))
    for file, other in zip(files[1:], others, strict=True):
        for key in ("benchmark", "ranks", "hosts", "dtype", "op"):
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{file} is of {key} {other.get(key)}, and {files[0]} of {first.get(key)}: "
                    "show them one by one"
                )
        for key, differs in (("machine", "on another machine"), ("versions", "by other versions")):
            one, two = (result.get(key, {}) for result in (first, other))
            shared = (one.keys() & two.keys()) - _PASSING
            if any(one[name] != two[name] for name in shared):
                raise ValueError(
                    f"{file} was measured {differs} than {files[0]}: show them one by one"
                )
        if "rows" not in first or first["benchmark"] == "p2p":
            raise ValueError(f"{files[0]} is no result of a collective over sizes: show it alone")
        known = {_case(row) for row in rows}
        for row in other["rows"]:
            if _case(row) in known:
                row = row | {"implementation": f"{row['implementation']} ({file.stem})"}
            rows.append(row)
    rows.sort(key=lambda row: row["size_bytes"])
    verified = all(result["verified"] for result in (first, *others))
    return first | {"rows": rows, "verified": verified}


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("implementation", "size_bytes", "in_place"))


def load_traces(file: Path) -> list[Trace]:
    """The traces in a file. Raises as `load`."""
    found = _json(file)
    try:
        return from_perfetto(found)
    except ValueError as error:
        raise ValueError(f"{file} is no trace of weft bench --trace: {error}") from None


def _json(file: Path) -> Any:
    text = read_text(file, MOST_BYTES)
    try:
        return parsed(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise `ValueError` if the result of a file turns out to lack what this version expects."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as missing:
        raise ValueError(
            f"{file}: another version of weft has written it ({missing!r}); use that one, or "
            "weft show --csv"
        ) from None


def to_csv(result: Result) -> str:
    """A line for each row of a result: its case, and its times in microseconds or milliseconds as
    the columns say.
    """
    rows = [*_rows(result)]
    columns = dict.fromkeys(column for row in rows for column in row)
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(result: Result) -> Iterator[dict[str, Any]]:
    """The measured implementations, each with its numbers side by side."""
    for row in result.get("rows", []):
        yield _flat(row)
    for name, figures in result.get("ways", {}).items():
        yield {"implementation": name} | _flat(figures)
    for name, times in tables.times_of(result).items():
        yield {"view": name} | {
            key if key in ("runs", "measured_rows") else f"{key}_ms": time
            for key, time in times.items()
        }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers and words of a row; those of an object in it are named after it."""
    flat = dict[str, Any]()
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key}_{name.removeprefix('time_')}": each for key, each in value.items()}
        elif not isinstance(value, list):
            flat[name] = value
    return flat
