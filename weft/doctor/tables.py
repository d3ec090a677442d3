"""The table format of the doctor, in which no cell is cut."""

from __future__ import annotations

from rich.table import Column, Table


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; words longer than a cell are continued on its next line."""
    headers = (Column(name, overflow="fold") for name in columns)
    return Table(*headers, title=title, title_justify="left")
