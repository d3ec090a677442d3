"""Values: the symbols that stand for a plan's rows while it is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Weight = tuple[int, str]
"""A weight in a value: the rank that multiplied by it, and its name."""


class Term(NamedTuple):
    """Row ``row + shift`` of `buffer` on `rank`, multiplied by the weight `weights`, if any."""

    rank: int
    buffer: str
    shift: int
    weights: Weight | None = None


class Applied(NamedTuple):
    """The result of a kernel for one row of each source."""

    kernel: str
    sources: tuple[Value, ...]
    weight: Weight | None = None


Value = tuple[Term | Applied, ...]
"""A sum of terms and results of kernels; an empty sum is no value."""


def mapped(value: Value, change: Callable[[Term], Term]) -> Value:
    """The value with every term changed."""
    return tuple(
        change(one)
        if isinstance(one, Term)
        else one._replace(sources=tuple(mapped(source, change) for source in one.sources))
        for one in value
    )


def terms(value: Value) -> Iterator[Term]:
    """All terms of a value, also the operands of kernels."""
    for one in value:
        if isinstance(one, Term):
            yield one
        else:
            for source in one.sources:
                yield from terms(source)


def shifted(value: Value, by: int) -> Value:
    """The value as a function of a row number that is smaller by `by`."""
    return mapped(value, lambda term: term._replace(shift=term.shift + by)) if by else value


def ordered(value: Value) -> Value:
    """The value with its sums in one order, so that equal sums are equal."""
    found = (
        one if isinstance(one, Term) else one._replace(sources=tuple(map(ordered, one.sources)))
        for one in value
    )
    return tuple(sorted(found, key=str))


def text(value: Value | None) -> str:
    """A value as a formula."""

    def symbol(one: Term | Applied) -> str:
        if isinstance(one, Term):
            product = f" @ B{one.weights[0]}" if one.weights else ""
            return f"{one.buffer}@{one.rank}[row{one.shift:+d}]{product}"
        weight = [f"{one.weight[1]}@{one.weight[0]}"] if one.weight else []
        return f"{one.kernel}({', '.join([*map(text, one.sources), *weight])})"

    return " + ".join(map(symbol, value)) if value else "nothing"
