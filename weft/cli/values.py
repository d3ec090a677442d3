"""The values of options: shapes, sizes and numbers, and the options that take them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from typer import BadParameter, Option

POWERS = {"": 0, "K": 10, "M": 20, "G": 30}


@dataclass(frozen=True)
class Shape:
    """A product (m, k) @ (k, n)."""

    m: int
    k: int
    n: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.m, self.k, self.n))

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


SHAPE = Shape(2048, 2048, 1024)


def parse_shape(text: str) -> Shape:
    """The shape of a text ``MxKxN``. Raises `ValueError` for any other text."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        expected = "expected three positive numbers MxKxN such as 2048x2048x1024"
        raise ValueError(f"{expected}; got {text!r}")
    return Shape(*map(int, sizes))


def parse_sizes(text: str) -> list[int]:
    """The numbers of bytes of a text such as ``8,4K:64M:4``: sizes, and ranges of first, last and
    factor (default 2); K, M and G are binary. Raises `ValueError` for any other text.
    """
    sizes: list[int] = []
    for part in text.split(","):
        fields = part.split(":")
        factor = fields[2] if len(fields) > 2 else "2"
        if len(fields) > 3 or not factor.isdecimal() or int(factor) < 2:
            expected = "expected sizes such as 8,4K:64M:4 (first, last, factor of at least 2)"
            raise ValueError(f"{expected}; got {part!r}")
        size, end = _bytes(fields[0]), _bytes(fields[min(1, len(fields) - 1)])
        if end < size:
            raise ValueError(f"the last size comes before the first in {part!r}")
        while size <= end:
            sizes.append(size)
            size *= int(factor)
    return sorted(set(sizes))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"0*([1-9][0-9]*)([KMG]?)", text, re.IGNORECASE)
    if not found:
        expected = "expected a positive number of bytes such as 8, 4K, 64M or 1G"
        raise ValueError(f"{expected}; got {text!r}")
    return int(found[1]) << POWERS[found[2].upper()]


def gbps(text: str) -> None:
    """Check the bandwidth of an emulated link in 1e9 bits per second, or ``auto``."""
    with suppress(ValueError):
        if text == "auto" or 0 < float(text) < float("inf"):
            return
    raise ValueError(f"expected a positive number of Gbit/s, or auto; got {text!r}")


def positive(text: str) -> float:
    """The number of a text. Raises `ValueError` unless it is positive and finite."""
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(f"expected a positive number; got {text!r}")


def not_negative(text: str) -> float:
    """The number of a text. Raises `ValueError` unless it is finite and at least 0."""
    with suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise ValueError(f"expected a number of at least 0; got {text!r}")


def numbers(text: str) -> None:
    """Check positive numbers such as ``4,8,16``."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise ValueError(f"expected positive numbers such as 4,8,16; got {text!r}")


def option(parse: Callable[[str], Any], metavar: str, text: str, *, keep: bool = True) -> Any:
    """An option whose value `parse` checks. The value is the text itself if `keep`, or else the
    result of `parse`.
    """

    def parser(value: object) -> Any:
        try:
            parsed = parse(str(value))
        except ValueError as error:
            raise BadParameter(str(error)) from None
        return str(value) if keep else parsed

    return Option(parser=parser, metavar=metavar, help=text)


def product(text: str) -> Any:
    """An option that takes a shape."""
    return option(parse_shape, "MxKxN", text, keep=False)


def of_sizes(text: str, metavar: str = "FIRST:LAST:FACTOR,…") -> Any:
    """An option that takes sizes in bytes."""
    return option(parse_sizes, metavar, text)


def of_numbers(text: str, metavar: str = "N,…") -> Any:
    """An option that takes positive numbers."""
    return option(numbers, metavar, text)
