"""The tables and notes that a benchmark prints, captured as data: pages show the values that the
terminal shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.values import POWERS


class Words(NamedTuple):
    """A text and its style, as rich names it; without one it is empty."""

    text: str
    style: str = ""


class TableCell(NamedTuple):
    """A cell of a table. `number` is the value by which it is sorted, None for words, and
    `repeated` tells that the terminal leaves it out since it equals the cell above.
    """

    words: Words
    number: float | None
    repeated: bool = False


class Column(NamedTuple):
    """The header of a column, and whether it has numbers, which are aligned to the right."""

    name: str
    numeric: bool


class TableGrid(NamedTuple):
    """A table. `groups` are its rows in groups, between which the terminal leaves a line empty;
    a table without `header` is a list of figures, each with its name and its meaning.
    """

    columns: list[Column]
    groups: list[list[list[TableCell]]]
    header: bool


class _Recorder(Console):
    """A console that keeps what is printed."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.found: list[TableGrid | Words] = []

    def print(self, *objects: Any, style: Any = "", **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                self.found.append(_grid(each))
            elif words := _words(each, str(style or "")):
                self.found.append(words)


def captured(
    printer: Callable[[dict[str, Any], Console], None], result: dict[str, Any]
) -> list[TableGrid | Words]:
    """The tables and the lines that `printer` prints of a result, in order."""
    recorder = _Recorder()
    printer(result, recorder)
    return recorder.found


def number(text: str) -> float | None:
    """The number with which a text begins: of ``-1,024``, ``0.95x SLOWER``, ``3 %``, and of sizes
    such as ``64M``, which are binary.
    """
    found = re.match(r"([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)([KMG]?)(?=x?(?:\W|$))", text)
    return float(found[1].replace(",", "")) * (1 << POWERS[found[2]]) if found else None


def _words(printed: Any, style: str = "") -> Words | None:
    """The words of a text in one style; None for an empty line."""
    text = printed if isinstance(printed, Text) else Text(str(printed))
    return Words(text.plain.strip(), str(text.style) or style) if text.plain.strip() else None


def _grid(table: Table) -> TableGrid:
    columns = [
        Column(" ".join(str(column.header).split()), column.justify == "right")
        for column in table.columns
    ]
    cells = [[_words(cell) or Words("") for cell in column.cells] for column in table.columns]
    groups: list[list[list[TableCell]]] = [[]]
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        above = groups[-1][-1] if groups[-1] else []
        groups[-1].append([*_row(texts, above)])
        if row.end_section:
            groups.append([])
    return TableGrid(columns, [group for group in groups if group], table.show_header)


def _row(texts: Sequence[Words], above: Sequence[TableCell]) -> Iterator[TableCell]:
    """The cells of a row; its first ones, if empty, repeat those `above`."""
    empty = len([*takewhile(lambda words: not words.text, texts)]) if above else 0
    for index, words in enumerate(texts):
        yield (
            above[index]._replace(repeated=True)
            if index < empty
            else TableCell(words, number(words.text))
        )
