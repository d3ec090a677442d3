"""The one kind of table of all results, and the lines below it that one must know to read it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(columns: Iterable[str], left: Collection[str] = ("",)) -> Table:
    """An empty table of numbers, with words in the columns of `left`."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", no_wrap=name in left)
    return made


def ratio(times: float) -> Text:
    """How many times as fast weft is; below 1 it says so."""
    return (
        Text(f"{times:.2f}x") if round(times, 2) >= 1 else Text(f"{times:.2f}x SLOWER", "bold red")
    )


def count(wrong: int) -> Text:
    """A number of wrong elements."""
    return Text(str(wrong), "bold red" if wrong else "")


def named(name: str, wrong: int) -> Text:
    """The name of what was measured, and whether it is wrong."""
    return Text(f"{name} WRONG", "bold red") if wrong else Text(name)


def machine(result: dict[str, Any]) -> Text:
    """What a result was measured on, and with which versions."""
    on, versions = result["machine"], result["versions"]
    where = f"{on['cpu']}, {on['cores']} cores, threads per rank: {on['threads_per_rank']}"
    return Text(
        f"{where}; {', '.join(f'{name} {version}' for name, version in versions.items())}", "dim"
    )


def verdict(result: dict[str, Any], what: str) -> Text:
    """What was verified, or that something is wrong."""
    if result["verified"]:
        return Text(f"Verified: {what}", "green")
    return Text("NOT VERIFIED: there are wrong results. Their times mean nothing.", "bold red")


def tell(console: Console, *notes: Text | str) -> None:
    """Print lines that fold nowhere."""
    for note in notes:
        console.print(Text(note) if isinstance(note, str) else note, soft_wrap=True)
