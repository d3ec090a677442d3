"""The comparison of a fused call with the cascade that it replaces, rank by rank: the output, and
the gathered rows that the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from weft.world import World
from weft_tools.bench.between_ranks import everyones
from weft_tools.bench.harness import poison
from weft_tools.bench.verification import Problem, compare


class Agreement(NamedTuple):
    """The comparison on one rank.

    `output_wrong` elements of the output differ from the cascade's by more than rounding can, at
    most by `largest_difference`; `gathered_wrong` elements of the gathered rows differ at all.
    """

    output_wrong: int
    largest_difference: float
    gathered_wrong: int

    @property
    def wrong(self) -> int:
        return self.output_wrong + self.gathered_wrong


class CascadeGathering(Protocol):
    """An operator that returns the gathered rows, which `gathered` has after each call."""

    problem: Problem
    out: Tensor
    gathered: Tensor
    views: dict[str, Any]

    def renew(self, run: int) -> None: ...


def compare_with_cascade(subject: CascadeGathering, world: World, run: int) -> list[Agreement]:
    """The comparisons on all ranks, on the inputs of a new run; collective."""
    subject.renew(run)
    subject.views["sequential"].call()
    out, gathered = subject.out.clone(), subject.gathered
    subject.gathered = gathered.clone()
    poison(subject.out, subject.gathered)
    subject.views["pipelined"].call()
    rounding = 2 * subject.problem.bound[run : run + len(out)]  # of both
    check = compare(subject.out, out.double(), rounding)
    own = Agreement(check.wrong, check.max_error, int((subject.gathered != gathered).sum()))
    return everyones(world, own)


def sentences(ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the comparisons of a result as JSON found, for groups of ranks that found the same."""
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks):
        found.setdefault(_found(one), []).append(rank)
    for text, group in found.items():
        names = ", ".join(map(str, group))
        yield f"Fused and cascade on rank{'s' if len(group) > 1 else ''} {names}: {text}."


def _found(one: dict[str, Any]) -> str:
    if one["output_wrong"]:
        output = f"{one['output_wrong']} elements of the output DIFFER"
    elif one["largest_difference"]:
        output = "equal outputs, up to rounding"
    else:
        output = "equal outputs, bit for bit"
    if one["gathered_wrong"]:
        return f"{output}; {one['gathered_wrong']} elements of the gathered rows DIFFER"
    return f"{output}; equal gathered rows, bit for bit"
