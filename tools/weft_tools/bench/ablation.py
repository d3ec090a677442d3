"""The steps from the cascade to all-gather + matmul: its plan, rewritten without improvements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from weft.plan import Compute, Instruction, Plan, Region, Signal, Wait
from weft.schedules.operators import OPERATORS

Lane = list[Instruction]


def own_rows_last(plan: Plan) -> Plan:
    """The plan with own rows multiplied after all peers' rows."""
    return _rewritten(plan, _own_rows_last)


def split_arrivals(plan: Plan) -> Plan:
    """The plan with one product for each transfer, where products join several transfers."""
    return _rewritten(plan, _split_arrivals)


STEPS: dict[str, Callable[[Plan], Plan]] = {
    "overlapped": lambda plan: own_rows_last(split_arrivals(plan)),
    "+ own rows first": split_arrivals,
    "+ arrivals joined": lambda plan: plan,
}
"""The steps by name, in order."""


def _rewritten(plan: Plan, rewrite: Callable[[Sequence[Instruction]], Lane]) -> Plan:
    """The plan with its compute lanes rewritten; the baseline stays, as it has no overlap."""
    if plan.algorithm == OPERATORS[plan.operator].baseline:
        return plan

    return plan.with_lanes(
        lambda lanes: {
            name: tuple(rewrite(lane)) if name == "compute" else lane
            for name, lane in lanes.items()
        }
    )


def _own_rows_last(lane: Sequence[Instruction]) -> Lane:
    products = [one for one in lane if isinstance(one, Compute)]
    own = [
        one for one in products if one.srcs[0].buffer == "a" and one.srcs[0].rank == one.dst.rank
    ]
    others = [one for one in lane if one not in own]
    last = max((i for i, one in enumerate(others) if isinstance(one, Compute)), default=-1)
    if last < 0:  # there are no peers
        return [*lane]
    return [*others[: last + 1], *own, *others[last + 1 :]]


def _split_arrivals(lane: Sequence[Instruction]) -> Lane:
    """The lane with a wait and a product for each arrival, instead of one of each for several."""
    found, counts = Lane(), Counter[Signal]()
    for one in lane:
        wait = found[-1] if found else None
        if isinstance(one, Compute) and isinstance(wait, Wait):
            found.pop()
            before, counts[wait.signal] = counts[wait.signal], wait.count
            for count in range(before + 1, wait.count + 1):
                part = partial(_part, number=count - before - 1, parts=wait.count - before)
                found.append(replace(wait, count=count))
                found.append(replace(one, srcs=tuple(map(part, one.srcs)), dst=part(one.dst)))
        else:
            found.append(one)
    return found


def _part(region: Region, number: int, parts: int) -> Region:
    rows = region.rows // parts
    start = region.start + number * rows
    return region._replace(start=start, stop=start + rows)
