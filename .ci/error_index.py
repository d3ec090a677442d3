"""The index of errors in docs/errors.md, from the source, and its messages in the site's search: a
hook of mkdocs, and `python .ci/error_index.py`, which prints the index.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
MARK = "<!-- the index of errors -->"


class Error(NamedTuple):
    """A message that is raised as an exception of class `kind`, in the file at `path`."""

    kind: str
    path: str
    message: str


def texts(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can have, with "…" for what is not known in the source."""
    match node:
        case ast.Constant(str(text)):
            yield text
        case ast.JoinedStr(parts):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
            )
        case ast.BinOp(left, ast.Add(), right):
            yield from (one + other for one in texts(left) for other in texts(right))
        case ast.IfExp(_, body, orelse):
            yield from (*texts(body), *texts(orelse))
        case _:
            yield "…"


def classes_of(source: str) -> set[str]:
    """The names of the classes of a module."""
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def of_module(path: str, source: str, own: set[str]) -> Iterator[Error]:
    """The errors that a module makes, of Python's classes, whose names end in Error, or `own`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            kind = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if kind in own or re.fullmatch(r"[A-Z]\w*Error", kind):
                for text in texts(node.args[0]):
                    if re.search(r"\w{3}", text):
                        yield Error(kind, path, " ".join(text.split()))


def errors(root: Path = ROOT) -> list[Error]:
    """All errors, by class."""
    own = classes_of((root / "weft/errors.py").read_text())
    return sorted(
        {
            error
            for package in ("weft", "tools/weft_tools")
            for path in sorted((root / package).rglob("*.py"))
            for error in of_module(str(path.relative_to(root)), path.read_text(), own)
        }
    )


def index() -> str:
    """The Markdown of the errors, a table for each class."""
    parts = []
    for kind, found in groupby(errors(), lambda error: error.kind):
        rows = (f"| `{e.message.replace('|', chr(92) + '|')}` | {e.path} |" for e in found)
        parts.append("\n".join((f"**{kind}**", "", "| message | file |\n|---|---|", *rows)))
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with the index at its mark."""
    return markdown.replace(MARK, index()) if MARK in markdown else markdown


found: list[dict[str, str]] = []
"""The entries of the search: a part of the page for each message, which a pasted one finds."""


def on_page_content(content: str, page: Page, **_: Any) -> str:
    """The page with a name for each row of a message."""
    if page.file.src_uri != "errors.md":
        return content
    names = set[str]()

    def named(row: re.Match[str]) -> str:
        message, file = row.groups()
        words = re.findall(r"\w+", html.unescape(message).lower())
        name = "-".join(words)[:60]
        while name in names:
            name += "-"
        names.add(name)
        found.append({"location": f"{page.url}#{name}", "title": message, "text": file})
        return row[0].replace("<tr>", f'<tr id="{name}">', 1)

    cells = r"<td><code>([^<]*)</code></td>\s*<td>(weft/[^<]*)</td>"
    return re.sub(rf"<tr>\s*{cells}\s*</tr>", named, content)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Add the messages to the index of the search, and to its copy for pages from a folder."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    index["docs"] += found
    path.write_text(text := json.dumps(index, separators=(",", ":")))
    path.with_suffix(".js").write_text(f"var __index = {text}")


if __name__ == "__main__":
    print(index())
