"""The lanes of a plan by the cores that can do them: cube cores multiply, vector cores do the
rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from weft.plan import Compute, Instruction, Notify, Plan, Region, Signal, Wait
from weft.plan.language import Lanes, reads, writes

PRODUCTS, OTHERS = "compute", "comm1"
_DONE = {PRODUCTS: "multiplied", OTHERS: "moved"}
"""The signals by which the cores of a rank tell each other."""


def by_cores(plan: Plan) -> Plan:
    """The plan with another lane, ``comm1``, of what lane ``compute`` has beside products.

    Both are ordered where one uses rows of the other, and before notifies; the proof decides
    whether that is enough for this plan.
    """
    return replace(plan, lanes=tuple(_split(rank, lanes) for rank, lanes in enumerate(plan.lanes)))


def _split(rank: int, lanes: Lanes) -> Lanes:
    made: dict[str, list[Instruction]] = {PRODUCTS: [], OTHERS: []}
    unordered: dict[str, list[Instruction]] = defaultdict(list)  # of which the other has not heard
    raised: Counter[str] = Counter()
    waits: list[Instruction] = []
    core = ""
    for instruction in lanes.get(PRODUCTS, ()):
        if isinstance(instruction, Wait):
            waits.append(instruction)
            continue
        if not core:  # what is waited for at the beginning holds back both
            made[PRODUCTS] += waits
            made[OTHERS] += waits
            waits = []
        notifies = isinstance(instruction, Notify)
        if not notifies or not core:
            core = PRODUCTS if isinstance(instruction, Compute) else OTHERS
        other = OTHERS if core == PRODUCTS else PRODUCTS
        if any(notifies or _conflict(instruction, each) for each in unordered[other]):
            signal = Signal(_DONE[other], rank)
            raised[other] += 1
            made[other].append(Notify(rank, signal))
            made[core].append(Wait(signal, raised[other]))
            unordered[other] = []
        made[core] += [*waits, instruction]
        waits = []
        if not notifies:
            unordered[core].append(instruction)
    made[core or PRODUCTS] += waits
    split = {name: tuple(lane) for name, lane in made.items() if _works(lane)}
    return {**split, **{name: lane for name, lane in lanes.items() if name != PRODUCTS}}


def _works(lane: Sequence[Instruction]) -> bool:
    return not all(isinstance(each, Wait) for each in lane)


def _conflict(one: Instruction, other: Instruction) -> bool:
    """Whether one writes rows that the other uses."""

    def meet(some: Sequence[Region], others: Sequence[Region]) -> bool:
        return any(each.overlaps(region) for each in some for region in others)

    return meet(writes(one), (*reads(other), *writes(other))) or meet(reads(one), writes(other))
