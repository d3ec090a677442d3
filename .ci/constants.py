"""The table of measured constants in docs/performance.md, from the docstrings beside them: a hook
of mkdocs, and `python .ci/constants.py`, which prints it.

A constant is listed if the string below it, in C++ the comment above it, ends with "Measured on",
a machine, a colon and the gain. Any other number needs no line anywhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
MARK = "<!-- the measured constants -->"
HEAD = "| constant | value | decides | measured on | gain |\n|---|---|---|---|---|"
_MEASURED = re.compile(r"(.*?)\s*Measured on ([^:]+): (.+)")
# a comment of whole lines, and the statement below it
_COMMENTED = re.compile(r"((?:^[ \t]*//[^\n]*\n)+)([^;{}]*=[^;]*);", re.MULTILINE)


class Constant(NamedTuple):
    """A row of the table; `path` is the file, from the root on."""

    path: str
    name: str
    value: str
    decides: str
    machine: str
    gain: str

    def row(self) -> str:
        cells = (f"`{self.name}`", f"`{self.value}`", self.decides, self.machine, self.gain)
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def measured(path: str, name: str, value: str, text: str) -> Iterator[Constant]:
    """The constant, if its text says where it was measured."""
    if found := _MEASURED.fullmatch(" ".join(text.split())):
        yield Constant(path, name, value, *found.groups())


def of_python(path: str, source: str) -> Iterator[Constant]:
    """The measured constants of a module and of its classes."""
    tree = ast.parse(source)
    for body in (tree.body, *(each.body for each in tree.body if isinstance(each, ast.ClassDef))):
        for statement, below in pairwise(body):
            match statement, below:
                case (
                    ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value),
                    ast.Expr(ast.Constant(str(text))),
                ) if value:
                    yield from measured(path, name, ast.unparse(value), text)


def of_native(path: str, source: str) -> Iterator[Constant]:
    """The measured constants of a file in C++."""
    for comment, statement in _COMMENTED.findall(source):
        declared, value = statement.split("=", 1)
        plain = re.sub(r"size_t\{(\d+)\}", r"\1", " ".join(value.split()))
        yield from measured(path, declared.split()[-1], plain, comment.replace("//", " "))


def constants(root: Path = ROOT) -> Iterator[Constant]:
    """All measured constants, file by file."""
    for package in ("weft", "tools/weft_tools"):
        for path in sorted((root / package).rglob("*.py")):
            yield from of_python(str(path.relative_to(root)), path.read_text())
    for path in sorted((root / "native").rglob("*.?pp")):
        yield from of_native(str(path.relative_to(root)), path.read_text())


def table() -> str:
    """The Markdown of the constants, a table for each file."""
    return "\n\n".join(
        "\n".join((f"**{path}**", "", HEAD, *(constant.row() for constant in found)))
        for path, found in groupby(constants(), lambda constant: constant.path)
    )


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with the table at its mark."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown


if __name__ == "__main__":
    print(table())
