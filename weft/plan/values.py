"""Values: the symbols that stand for a plan's rows while it is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The result of a kernel, or of a reduction that is no sum, for one row of each source, or all
    rows of it (`Whole`).
    """

    kernel: str
    sources: tuple[Value, ...]
    weight: Weight | None = None


class Whole(NamedTuple):
    """All rows of a source of a kernel, made by `whole`: for each part that has one value, the
    numbers of its blocks, and the value as a function of the row's number in the part.
    """

    parts: tuple[tuple[tuple[int, ...], Value], ...]


Symbol = Term | Applied | Whole
Value = tuple[Symbol, ...]
"""A sum of terms and results of kernels; an empty sum is no value. `reduced` makes the values of
other reductions. All rows of a source are a value by themselves.
"""


def whole(parts: Iterable[tuple[Sequence[int], Value]]) -> Value:
    """The value of all rows of these parts, in their order: for each the numbers of its blocks
    (`weft.plan.language.ROW` for rows), and its value as a function of the row's number in the
    part. Parts that continue the value of the part before are joined to it.
    """
    joined: list[tuple[tuple[int, ...], Value]] = []
    for numbers, value in parts:
        before, start = joined[-1] if joined else ((), ())
        if joined and ordered(value) == ordered(shifted(start, len(before))):
            joined[-1] = (*before, *numbers), start
        elif numbers:
            joined.append(((*numbers,), value))
    return (Whole(tuple(joined)),)


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


def mapped(
    value: Value,
    change: Callable[[Term], Symbol],
    change_whole: Callable[[Whole], Symbol] = lambda one: one,
) -> Value:
    """The value with every term of the row itself changed, and all rows of sources by another
    function.
    """

    def symbol(one: Symbol) -> Symbol:
        match one:
            case Term():
                return change(one)
            case Whole():
                return change_whole(one)
        sources = tuple(mapped(source, change, change_whole) for source in one.sources)
        return one._replace(sources=sources)

    return tuple(map(symbol, value))


def terms(value: Value) -> Iterator[Term]:
    """All terms of the row itself in a value, also the operands of kernels."""
    for one in value:
        if isinstance(one, Term):
            yield one
        elif isinstance(one, Applied):
            for source in one.sources:
                yield from terms(source)


def wholes(value: Value) -> Iterator[tuple[tuple[int, ...], Value]]:
    """The parts of all sources in a value of which kernels need every row."""
    for one in value:
        sources = one.sources if isinstance(one, Applied) else ()
        parts = one.parts if isinstance(one, Whole) else ()
        yield from parts
        for inner in (*sources, *(part for _, part in parts)):
            yield from wholes(inner)


def shifted(value: Value, by: int) -> Value:
    """The value as a function of a row number that is smaller by `by`."""
    return mapped(value, lambda term: term._replace(shift=term.shift + by)) if by else value


def ordered(value: Value) -> Value:
    """The value with its sums and other reductions in one order, so that equal ones are equal."""

    def symbol(one: Symbol) -> Symbol:
        if isinstance(one, Term):
            return one
        if isinstance(one, Whole):
            return Whole(tuple((numbers, ordered(part)) for numbers, part in one.parts))
        sources = map(ordered, one.sources)
        return one._replace(
            sources=tuple(sorted(sources, key=str) if one.kernel in REDUCTIONS else sources)
        )

    return tuple(sorted(map(symbol, value), key=str))


def text(value: Value | None) -> str:
    """A value as a formula."""

    def symbol(one: Symbol) -> str:
        if isinstance(one, Term):
            product = f" @ B{one.weights[0]}" if one.weights else ""
            return f"{one.buffer}@{one.rank}[row{one.shift:+d}]{product}"
        if isinstance(one, Whole):
            return "; ".join(f"{len(numbers)} of {text(part)}" for numbers, part in one.parts)
        weight = [f"{one.weight[1]}@{one.weight[0]}"] if one.weight else []
        return f"{one.kernel}({', '.join([*map(text, one.sources), *weight])})"

    return " + ".join(map(symbol, value)) if value else "nothing"
