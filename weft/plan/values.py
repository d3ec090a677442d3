"""Values: the symbols that stand for a plan's rows while it is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
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
    """The result of a kernel, or of a reduction that is no sum, for one row of each source."""

    kernel: str
    sources: tuple[Value, ...]
    weight: Weight | None = None


Value = tuple[Term | Applied, ...]
"""A sum of terms and results of kernels; an empty sum is no value. `reduced` makes the values of
other reductions.
"""


REDUCTIONS = ("sum", "avg", "max", "min")
"""The reductions of rows."""


def reduced(op: str, sources: Sequence[Value], ranks: int) -> Value:
    """The value of the reduction `op` of rows with these values, in a plan of `ranks` ranks: a sum
    of sums is one sum of all terms, a maximum of maxima one maximum of all.
    """
    total = tuple(chain.from_iterable(sources))
    if op in ("max", "min"):
        whole = [
            part
            for source in sources
            for part in (
                source[0].sources
                if len(source) == 1 and isinstance(source[0], Applied) and source[0].kernel == op
                else (source,)
            )
        ]
        return (Applied(op, tuple(whole)),) if len(whole) > 1 else total
    return (Applied(op, (total,)),) if op == "avg" and ranks > 1 else total


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
    """The value with its sums and other reductions in one order, so that equal ones are equal."""

    def symbol(one: Term | Applied) -> Term | Applied:
        if isinstance(one, Term):
            return one
        sources = map(ordered, one.sources)
        return one._replace(
            sources=tuple(sorted(sources, key=str) if one.kernel in REDUCTIONS else sources)
        )

    return tuple(sorted(map(symbol, value), key=str))


def text(value: Value | None) -> str:
    """A value as a formula."""

    def symbol(one: Term | Applied) -> str:
        if isinstance(one, Term):
            product = f" @ B{one.weights[0]}" if one.weights else ""
            return f"{one.buffer}@{one.rank}[row{one.shift:+d}]{product}"
        weight = [f"{one.weight[1]}@{one.weight[0]}"] if one.weight else []
        return f"{one.kernel}({', '.join([*map(text, one.sources), *weight])})"

    return " + ".join(map(symbol, value)) if value else "nothing"
