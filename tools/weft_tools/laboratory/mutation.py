"""The mutation score of the proof: how many wrong plans `weft.verify` rejects, and whether those
that it accepts are right.

Every plan is changed in one place, in every way of `weft_tools.laboratory.mutants`. A mutant that
the proof accepts is executed, and compared with its plan (`weft_tools.laboratory.equivalence`): it
is *equivalent* if it differs in no run, else the proof has *missed* it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.proof import accepts, verify
from weft.schedules.levels import nested
from weft.schedules.operators import COLLECTIVES, PLANNERS
from weft.schedules.workload import ORDERS, Request
from weft_tools.laboratory import accumulation, companions
from weft_tools.laboratory.equivalence import Equivalence
from weft_tools.laboratory.mutants import Mutant, aimed_elsewhere, deleted, moved, repeated

MUTATIONS: Mapping[str, Callable[[Plan], Iterator[Mutant]]] = {
    "deleted": deleted,
    "repeated": repeated,
    "moved": moved,
    "aimed elsewhere": aimed_elsewhere,
}
"""Changes of one instruction, by what happens to it."""

MADE: Mapping[str, Callable[[int], list[Plan]]] = {
    "accumulation": lambda ranks: [accumulation.gathered(ranks, 2), accumulation.in_turn(ranks, 2)],
    "companions": companions.plans,
}
"""Plans of kernels that no operator has, by the number of ranks: plans that accumulate, and those
of the fused operators for rows with companions.
"""

SUBJECTS = (*PLANNERS, *MADE)
"""The plans that are changed."""


def choices(ranks: int) -> tuple[dict[str, Any], ...]:
    """The defaults of a request, and departures from them: of exchanges two experts on each rank,
    of equal parts and of others, and 2, 0, 1, … experts.
    """
    several = {"weights": 2, "gathered": True}
    return (
        {},
        {"symmetric": True},
        {"order": ORDERS[1]},
        {"links": 2},
        {"remote_reads": False},
        {"symmetric_out": True},
        several | {"experts": (2,) * ranks},
        several | {"experts": (2,) * ranks, "uneven": True},
        several | {"experts": tuple((2, 0, 1)[rank % 3] for rank in range(ranks))},
    )


@dataclass(frozen=True)
class Score:
    """Numbers of mutants, and a description of each one that the proof missed."""

    mutants: int = 0
    rejected: int = 0
    missed: tuple[str, ...] = ()

    @property
    def equivalent(self) -> int:
        return self.mutants - self.rejected - len(self.missed)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.mutants + other.mutants,
            self.rejected + other.rejected,
            self.missed + other.missed,
        )


def plans(operator: str, ranks: int) -> list[Plan]:
    """The distinct plans of a subject in two pieces: of an operator by every algorithm, with the
    defaults and with each other choice that makes a difference, and by levels.
    """
    if operator in MADE:
        return MADE[operator](ranks)
    planner = PLANNERS[operator]
    collective = COLLECTIVES.get(operator)
    every = [
        planner.plan(Request(ranks, 2, algorithm, **choice))
        for algorithm in planner.algorithms
        for choice in choices(ranks)
    ]
    every += [collective.few_rows(nested(ranks, latency=0.0))] if collective else []
    return [plan for i, plan in enumerate(every) if plan not in every[:i]]


def score(plan: Plan, seed: int) -> dict[str, Score]:
    """The score of the proof on the mutants of a plan, for each of `MUTATIONS`. `seed` determines
    sizes, contents and orders of runs.

    Raises `PlanError` if the proof rejects the plan itself, or if its results depend on the order.
    """
    verify(plan)
    equivalence = Equivalence(plan, seed)
    if equivalence.differing([plan] * 2):
        raise PlanError(f"{plan.operator}/{plan.algorithm} differs from itself in some run")
    return {name: _score(plan, mutation, equivalence) for name, mutation in MUTATIONS.items()}


def _score(
    plan: Plan, mutation: Callable[[Plan], Iterator[Mutant]], equivalence: Equivalence
) -> Score:
    mutants = 0
    accepted = []
    for mutant in mutation(plan):
        mutants += 1
        if accepts(mutant.plan):
            accepted.append(mutant)
    missed = equivalence.differing([mutant.plan for mutant in accepted])
    return Score(
        mutants,
        mutants - len(accepted),
        tuple(f"{plan.operator}/{plan.algorithm}, {accepted[at].change}" for at in missed),
    )
