"""Texts, boxes and lines of the pictures of `make house`, as SVG that does not depend on anything
but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

FONT = "font-family='-apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"
INK, PALE, LINE = "#16343a", "#5c7479", "#8fa7ab"
Point = tuple[float, float]


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    at: Point,
    content: str,
    size: float = 13,
    color: str = INK,
    bold: bool = False,
    anchor: str = "middle",
) -> str:
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{number(at[0])}' y='{number(at[1])}' font-size='{number(size)}'{weight} "
        f"fill='{color}' text-anchor='{anchor}'>{escape(content)}</text>"
    )


def box(at: Point, size: Point, fill: str, title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title else ""
    return (
        f"<rect x='{number(at[0])}' y='{number(at[1])}' width='{number(size[0])}' "
        f"height='{number(size[1])}' rx='6' fill='{fill}' stroke='{LINE}'>{hint}</rect>"
    )


def line(path: str, dashed: bool = False) -> str:
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    return (
        f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.4'{dashes} "
        "marker-end='url(#arrow)'/>"
    )


def write(path: Path, width: float, height: float, label: str, parts: Iterable[str]) -> None:
    """Write a picture on white, so that it is legible on pages of any color."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {number(width)} {number(height)}' "
        f"role='img' aria-label='{escape(label, quote=True)}' {FONT}>",
        "<defs><marker id='arrow' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='{LINE}'/></marker></defs>",
        f"<rect width='{number(width)}' height='{number(height)}' rx='8' fill='#ffffff'/>",
    )
    path.write_text("\n".join((*head, *parts, "</svg>")) + "\n")
