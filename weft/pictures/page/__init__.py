"""The page of results: one HTML file, which needs no network and no other file.

`page.html` is its template, with `page.css` and `page.js` inside. All that comes from results is
escaped, and a policy in the page forbids requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent


def html(sections: Sequence[Any], version: str) -> str:
    """The page of `sections`, which are those of `weft.bench.page`; `version` is weft's."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        sections=sections,
        version=version,
        style=Markup((FOLDER / "page.css").read_text()),
        program=Markup((FOLDER / "page.js").read_text()),
    )
