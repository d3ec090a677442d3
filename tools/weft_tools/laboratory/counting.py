"""The share of wrong plans that are found by counting: whether each rank signals another as often
as that one waits for it, over channels of one kind. MSCCL++ checks its execution plans so when it
writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from weft.plan import Notify, Plan, Wait
from weft.plan.proof import accepts
from weft_tools.laboratory.mutation import MUTATIONS


@dataclass(frozen=True)
class Found:
    """Numbers of mutants: in all, rejected by the proof, and of these found by counting."""

    mutants: int = 0
    rejected: int = 0
    counted: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(
            self.mutants + other.mutants,
            self.rejected + other.rejected,
            self.counted + other.counted,
        )


def counts_agree(plan: Plan) -> bool:
    """Whether ranks signal each other as often as they wait for it, over each kind of channel."""
    raised, waits = Counter[tuple[int, int, str]](), Counter[tuple[int, int, str]]()
    for rank, instruction in plan.instructions():
        match instruction:
            case Notify(peer, signal) if peer != rank:
                raised[rank, peer, signal.name.partition(" ")[0]] += 1
            case Wait(signal) if signal.source != rank:
                waits[signal.source, rank, signal.name.partition(" ")[0]] += 1
    return raised == waits


def found(plan: Plan) -> Mapping[str, Found]:
    """The numbers for all mutants of a plan, by what happens to an instruction."""
    return {
        name: sum((_found(mutant.plan) for mutant in mutation(plan)), Found())
        for name, mutation in MUTATIONS.items()
    }


def _found(mutant: Plan) -> Found:
    rejected = not accepts(mutant)
    return Found(1, int(rejected), int(rejected and not counts_agree(mutant)))
