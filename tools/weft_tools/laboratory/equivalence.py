"""Equivalence of plans by execution: whether changed plans give the results of a plan, bit by bit,
in adversarial orders on the reference engine.

In one order for each lane that lane is held back: it takes a step only when no other can. So all
that need not wait for its next instruction happens before that instruction, and of two instructions
that no signal orders, each comes first in some order. The contents show it: rows are random
integers, which float64 adds and multiplies exactly, others in successive calls; inputs and outputs
hold NaN outside a call; and between calls come `weft_tools.laboratory.witnesses`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engines.reference import Buffers, Call, run
from weft.errors import PlanError
from weft.plan import Compute, Plan
from weft.plan.binding import bind
from weft.plan.messages import ending, is_channel
from weft_tools.laboratory.witnesses import release_witness, synchronization_witness

COLUMNS = 2  # of matrices
LARGEST = 1000  # of their integers
SETTINGS = 3  # no divisor of the 2 or 4 calls after which eager buffers are used again
RANDOM_ORDERS = 3
TOGETHER = 16  # changed plans that are executed one after the other in one run

Inputs = list[dict[str, Tensor]]


class Setting(NamedTuple):
    """The rows of each shard in a call, and its inputs on each rank."""

    sizes: Sequence[int]
    inputs: Inputs


class Equivalence:
    """A plan with which changed plans are compared; `seed` determines sizes, contents and random
    orders.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.dice = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        names = {i.weight for _, i in plan.instructions() if isinstance(i, Compute) and i.weight}
        self.weights = [
            {name: self.matrix(COLUMNS) for name in sorted(names)} for _ in range(plan.ranks)
        ]
        self.full, self.ragged = (
            [self.setting(least, most) for _ in range(SETTINGS)] for least, most in ((2, 5), (0, 3))
        )
        rows = max(_workspace_rows(bind(plan, each.sizes)) for each in self.full)
        self.space = [self.matrix(max(rows, 1)) for _ in range(SETTINGS)]

    def differing(self, changed: Sequence[Plan]) -> list[int]:
        """The positions of the `changed` plans that differ from the plan in some run: in a result,
        or by a deadlock.
        """
        every = range(len(changed))
        batches = (every[start : start + TOGETHER] for start in every[::TOGETHER])
        return [at for batch in batches for at in self._differing(changed, batch)]

    def _differing(self, changed: Sequence[Plan], positions: range) -> list[int]:
        if self.agree([changed[at] for at in positions]):
            return []
        half = len(positions) // 2
        parts = (positions[:half], positions[half:]) if half else ()
        found = [at for part in parts for at in self._differing(changed, part)]
        return found or [*positions]  # all, if they differ only together

    def agree(self, plans: Sequence[Plan]) -> bool:
        """Whether `plans`, executed one after the other, have the plan's results in all orders."""
        at_random = [{"order": random.Random(self.seed + i)} for i in range(RANDOM_ORDERS)]
        return self._agree(plans, self.ragged, (), at_random) and all(
            self._agree(plans, self.full, self.witness(rank), held_back(rank, lanes))
            for rank, lanes in enumerate(self.plan.lanes)
        )

    def _agree(
        self,
        plans: Sequence[Plan],
        settings: Sequence[Setting],
        witness: Sequence[Plan],
        orders: Iterable[Mapping[str, Any]],
    ) -> bool:
        """Whether they have them in these orders, which are arguments of `reference.run`."""
        wanted = run(*self.calls([self.plan] * len(plans), settings, witness))
        calls = self.calls(plans, settings, witness)
        try:
            return all(_equal(run(*calls, **order), wanted) for order in orders)
        except PlanError:  # a deadlock
            return False

    def witness(self, rank: int) -> Sequence[Plan]:
        """The plans to execute between calls if `rank` is held back."""
        if self.plan.synchronizes:
            return [synchronization_witness(self.plan.ranks, turn) for turn in range(2)]
        if any(buffer.role == "workspace" for buffer in self.plan.buffers.values()):
            return [release_witness(self.plan.ranks, len(self.space[0]), rank)]
        return []

    def calls(
        self, plans: Sequence[Plan], settings: Sequence[Setting], witness: Sequence[Plan] = ()
    ) -> list[Call]:
        """Calls of the plans in successive settings, between calls of the witness."""
        found = []
        for i in range(len(plans) + 1):
            if witness:
                plan = witness[i % len(witness)]
                space = self.space[i % SETTINGS]
                found.append(Call(plan, [{"a": space[: plan.buffers["a"].rows[0]]}] * plan.ranks))
            if i < len(plans):
                sizes, inputs = settings[i % SETTINGS]
                found.append(Call(bind(plans[i], sizes), inputs, self.weights))
        return found

    def setting(self, least: int, most: int) -> Setting:
        """A setting with from `least` to `most` rows of each shard."""
        sizes = [self.dice.randint(least, most) for _ in self.plan.pieces]
        buffers = bind(self.plan, sizes).buffers
        inputs = {name: buffer.rows for name, buffer in buffers.items() if buffer.role == "input"}
        return Setting(
            sizes,
            [
                {name: self.matrix(rows[rank]) for name, rows in inputs.items()}
                for rank in range(self.plan.ranks)
            ],
        )

    def matrix(self, rows: int) -> Tensor:
        drawn = torch.randint(
            -LARGEST, LARGEST, (rows, COLUMNS), generator=self.numbers, device="cpu"
        )
        return drawn.double()


def _workspace_rows(bound: Plan) -> int:
    """The most rows of workspace on a rank."""
    spaces = [buffer.rows for buffer in bound.buffers.values() if buffer.role == "workspace"]
    return max(map(sum, zip(*spaces, strict=True)), default=0)


def held_back(rank: int, lanes: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """The orders that hold back a rank between calls, and each of its lanes."""
    for name in ("", *lanes):
        yield {"last": (rank, name)}
        if is_channel(name):
            yield {"last": (rank, ending(name))}


def _equal(found: Sequence[Sequence[Buffers]], wanted: Sequence[Sequence[Buffers]]) -> bool:
    """Whether the results of calls have the same bits."""
    return all(
        torch.equal(one[name].view(torch.int64), other[name].view(torch.int64))
        for results, others in zip(found, wanted, strict=True)
        for one, other in zip(results, others, strict=True)
        for name in one
    )
