"""Texts that others have written, such as files of other programs: read within bounds, and made
printable, so that none can look like a line of weft's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Of a file that is read whole."""
DEEPEST = 100
"""Objects and lists in each other."""


def printable(text: str) -> str:
    """The text with escapes in place of line breaks, and of all else that a terminal may obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, but for line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file. Raises `ValueError` if it has more than `most` bytes, or cannot be
    read as text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes, the most that weft reads")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """The JSON value in a file, as `parsed`. Raises as `read_text` and `parsed`."""
    return parsed(read_text(path, most))


def parsed(text: str, loads: Callable[[str], Any] = json.loads) -> Any:
    """The value of a text, by default of JSON, in which all texts are `printable`. Raises
    `ValueError` for another text, and for one that is nested too deep.
    """
    try:
        return _printable(loads(text), 0)
    except RecursionError:
        raise ValueError(_too_deep()) from None


def _printable(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list):
        return value
    if depth == DEEPEST:
        raise ValueError(_too_deep())
    if isinstance(value, list):
        return [_printable(each, depth + 1) for each in value]
    return {printable(name): _printable(each, depth + 1) for name, each in value.items()}


def _too_deep() -> str:
    return f"it has more than {DEEPEST} objects and lists in each other, the most that weft reads"
