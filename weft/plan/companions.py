"""Companions of rows: further matrices that have a row for each row of an input, such as the scales
of quantized rows or the experts that tokens chose.

A plan with companions moves each of them as it moves the rows, in the same blocks and between the
same signals, through separate buffers; computations of the rows read them beside these. They are
ordinary instructions, so the proof knows which companion a result was computed from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from weft.errors import PlanError
from weft.plan.language import Compute, Copy, Instruction, Lanes, Plan, Reduce, Region, reads
from weft.plan.lazy import Deferred
from weft.plan.values import Term, Value, mapped


def companion(buffer: str, name: str) -> str:
    """The name of the buffer that has the companions `name` of the rows of a buffer."""
    return f"{buffer}.{name}"


def of_region(region: Region, name: str) -> Region:
    """The companions `name` of the rows of a region."""
    return region._replace(buffer=companion(region.buffer, name))


def of_value(value: Value, name: str) -> Value:
    """The value of the companions `name` of rows with this value, which are rows of an input."""

    def term(one: Term) -> Term:
        return one._replace(buffer=companion(one.buffer, name))

    return mapped(value, term)


def with_companions(plan: Plan, names: Sequence[str], rows: str = "a") -> Plan:
    """The plan, in which the rows of the input `rows` have companions of these names: inputs of the
    plan, moved with them, and outputs where the rows are one.

    Raises `PlanError` for a plan that adds rows up before it has multiplied them, or whose copies a
    kernel of a GPU executes in one launch.
    """
    if plan.launch is not None:
        raise PlanError(f"{plan.operator} by {plan.algorithm} in one launch moves no companions")
    carrying = _carrying(plan, rows)

    def moved(one: Instruction) -> Iterator[Instruction]:
        yield one
        if isinstance(one, Copy) and one.src.buffer in carrying:
            for name in names:
                yield Copy(of_region(one.src, name), of_region(one.dst, name))

    def changed(lanes: Lanes) -> Lanes:
        return {
            lane: tuple(made for one in instructions for made in moved(one))
            for lane, instructions in lanes.items()
        }

    def result() -> Mapping[Region, Value]:
        of_rows = {at: value for at, value in plan.result.items() if at.buffer in carrying}
        beside = {
            of_region(at, name): of_value(value, name)
            for at, value in of_rows.items()
            for name in names
        }
        return {**plan.result, **beside}

    buffers = {companion(name, each): plan.buffers[name] for name in carrying for each in names}
    return plan.with_lanes(
        changed,
        f"{plan.request} with {', '.join(names)}",
        buffers={**plan.buffers, **buffers},
        result=Deferred(result),
    )


def _carrying(plan: Plan, rows: str) -> Collection[str]:
    """The buffers to which rows of an input are copied, and the input."""
    found = {rows: True}
    instructions = [one for _, one in plan.common([0]).instructions()]
    copies = {(i.src.buffer, i.dst.buffer): True for i in instructions if isinstance(i, Copy)}
    grown = True
    while grown:
        new = {dst: True for src, dst in copies if src in found and dst not in found}
        found |= new
        grown = bool(new)
    for one in instructions:
        if isinstance(one, Reduce) and any(region.buffer in found for region in reads(one)):
            raise PlanError(f"{one}: rows with companions are not added up")
    return found


def compute_with(one: Compute, names: Sequence[str]) -> Compute:
    """A computation of rows that reads their companions of these names, too."""
    return replace(one, srcs=(*one.srcs, *(of_region(one.srcs[0], name) for name in names)))
