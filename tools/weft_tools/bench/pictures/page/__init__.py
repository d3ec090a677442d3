"""The page of results: one HTML file, which needs no network and no other file.

`page.html` is its template, which takes in the style and the program, plain files beside it. All
that comes from results is escaped, and a policy in the page forbids requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent
_PROGRAM = "page.js", "spans.js", "drawing.js", "timeline.js", "gestures.js"


def html(sections: Sequence[Any], version: str) -> str:
    """The page of `sections`, which are those of `weft_tools.bench.page`; `version` is weft's."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        sections=sections,
        version=version,
        style=_text("page.css"),
        program=Markup("\n").join(map(_text, _PROGRAM)),
    )


def _text(name: str) -> Markup:
    """A file of this package, which is not escaped."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))
