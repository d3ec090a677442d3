"""Mutants of a plan: plans with one instruction deleted, repeated, moved or aimed elsewhere, by
which the proof is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from weft.plan.language import (
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Reduce,
    Region,
    Signal,
    Wait,
)
from weft.plan.values import REDUCTIONS


class Mutant(NamedTuple):
    """A changed plan, and a description of the change."""

    change: str
    plan: Plan


Place = tuple[int, str, int]
"""An instruction's rank, lane and position in the lane."""


def places(plan: Plan) -> Iterator[tuple[Place, Instruction]]:
    """Every instruction with its place."""
    for rank, lanes in enumerate(plan.lanes):
        for name, lane in lanes.items():
            for i, instruction in enumerate(lane):
                yield (rank, name, i), instruction


def edited(plan: Plan, place: Place, *new: Instruction, span: int = 1) -> Plan:
    """The plan with `span` instructions from `place` on replaced by `new`."""
    rank, name, i = place
    lanes = list(plan.lanes)
    lane = lanes[rank].get(name, ())
    lanes[rank] = {**lanes[rank], name: (*lane[:i], *new, *lane[i + span :])}
    return replace(plan, lanes=tuple(lanes))


def deleted(plan: Plan) -> Iterator[Mutant]:
    """The plan without one instruction, for each instruction."""
    for place, instruction in places(plan):
        yield Mutant(f"{place}: without {instruction}", edited(plan, place))


def repeated(plan: Plan) -> Iterator[Mutant]:
    """The plan with one instruction executed twice, for each instruction."""
    for place, instruction in places(plan):
        yield Mutant(f"{place}: twice {instruction}", edited(plan, place, instruction, instruction))


def moved(plan: Plan) -> Iterator[Mutant]:
    """The plan with one instruction swapped with the next one, or moved to the beginning or to the
    end of its lane, for each instruction; every other order of a lane that results is had once.
    """
    for rank, lanes in enumerate(plan.lanes):
        for name, lane in lanes.items():
            found = {lane}
            for i, instruction in enumerate(lane):
                rest = (*lane[:i], *lane[i + 1 :])
                for to in (i + 1, 0, len(rest)):
                    order = (*rest[:to], instruction, *rest[to:])
                    if order not in found:
                        found.add(order)
                        yield Mutant(
                            f"{(rank, name, i)}: {instruction} at position {to}",
                            edited(plan, (rank, name, 0), *order, span=len(lane)),
                        )


def aimed_elsewhere(plan: Plan) -> Iterator[Mutant]:
    """The plan with one instruction aimed elsewhere, for each instruction: at each other rank,
    buffer, signal, weight or reduction, at adjacent blocks, at one block or one count more or less;
    of several sources of a kernel without one, or in another order.
    """
    every = [instruction for _, instruction in places(plan)]
    signals = [*dict.fromkeys(i.signal for i in every if isinstance(i, Notify | Wait))]
    weights = [*dict.fromkeys(i.weight for i in every if isinstance(i, Compute) and i.weight)]
    for place, instruction in places(plan):
        for new in dict.fromkeys(_aims(plan, instruction, signals, weights)):
            if new != instruction:
                yield Mutant(f"{place}: {new} in place of {instruction}", edited(plan, place, new))


def _aims(
    plan: Plan, instruction: Instruction, signals: Sequence[Signal], weights: Sequence[str]
) -> Iterator[Instruction]:
    """An instruction with one of its aims replaced by each other one, and possibly by its own."""
    match instruction:
        case Notify():
            for peer in range(plan.ranks):
                yield replace(instruction, rank=peer)
            for other in signals:
                yield replace(instruction, signal=other)
        case Wait(signal, count):
            for number in (count - 1, count + 1):
                yield Wait(signal, number)
            for other in signals:
                yield Wait(other, count)
        case Copy(src, dst):
            yield from (replace(instruction, src=other) for other in _elsewhere(plan, src))
            yield from (replace(instruction, dst=other) for other in _elsewhere(plan, dst))
        case Compute(_, srcs, dst) | Reduce(srcs, dst):
            for i, src in enumerate(srcs):
                for region in _elsewhere(plan, src):
                    yield replace(instruction, srcs=(*srcs[:i], region, *srcs[i + 1 :]))
            yield from (replace(instruction, dst=other) for other in _elsewhere(plan, dst))
            if isinstance(instruction, Compute):
                yield from (replace(instruction, weight=name) for name in weights)
                yield from (replace(instruction, srcs=others) for others in _fewer_or_swapped(srcs))
            else:
                yield from (replace(instruction, op=op) for op in REDUCTIONS)


def _fewer_or_swapped(srcs: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
    """Several sources without one of them, and with two neighbours in each other's place."""
    if len(srcs) > 1:
        yield from ((*srcs[:i], *srcs[i + 1 :]) for i in range(len(srcs)))
    for i, (one, other) in enumerate(pairwise(srcs)):
        yield *srcs[:i], other, one, *srcs[i + 2 :]


def _elsewhere(plan: Plan, region: Region) -> Iterator[Region]:
    """A region on each rank, in each buffer, moved by a block, and shorter and longer by one."""
    yield from (region._replace(rank=rank) for rank in range(plan.ranks))
    yield from (region._replace(buffer=name) for name in plan.buffers)
    for by in (-1, 1):
        yield region._replace(start=region.start + by, stop=region.stop + by)
        yield region._replace(stop=region.stop + by)
