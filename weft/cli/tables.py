"""The table format of all commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def table(columns: Iterable[str], left: Collection[str] = ("",)) -> Table:
    """An empty table of numbers, with words in the columns of `left`. No name is markup."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(
            Text(name), justify="left" if name in left else "right", no_wrap=name in left
        )
    return made
