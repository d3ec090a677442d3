"""Equivalence of plans by execution: whether changed plans give the results of a plan, bit by bit,
in adversarial orders on the reference engine.

In one order for each lane that lane is held back: it takes a step only when no other can. So all
that need not wait for its next instruction happens before that instruction, and of two instructions
that no signal orders, each comes first in some order. The contents show it: rows are random
integers, which float64 adds and multiplies exactly, others in successive calls; inputs and outputs
hold NaN outside a call; and before and after each call comes a witness, a plan whose results show
whether the call keeps the contract between plans.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engines.reference import Buffers, Call, Step, run
from weft.errors import PlanError
from weft.plan import (
    Buffer,
    Compute,
    Copy,
    Instruction,
    Notify,
    Plan,
    Region,
    Role,
    Signal,
    Wait,
)
from weft.plan.binding import bind
from weft.plan.messages import ending, is_channel

COLUMNS, LARGEST = 2, 1000  # of matrices, and of their integers
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
        self.plan, self.seed = plan, seed
        self.dice, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
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
        return all(
            self.held_back(plans, rank, lanes) for rank, lanes in enumerate(self.plan.lanes)
        ) and self.at_random(plans)

    def held_back(self, plans: Sequence[Plan], rank: int, lanes: Collection[str]) -> bool:
        """Whether they have if any of a rank's lanes, or the rank between calls, is held back."""
        steps = [(rank, name) for name in ("", *lanes)]
        steps += [(rank, ending(name)) for name in lanes if is_channel(name)]
        witness = self.witness(rank)
        calls, wanted = (
            self.calls(each, self.full, witness) for each in (plans, [self.plan] * len(plans))
        )
        results = run(*wanted)
        return all(_agree(calls, results, last=step) for step in steps)

    def at_random(self, plans: Sequence[Plan]) -> bool:
        """Whether they have in random orders, one directly after the other."""
        calls, wanted = (
            self.calls(each, self.ragged) for each in (plans, [self.plan] * len(plans))
        )
        results = run(*wanted)
        return all(
            _agree(calls, results, order=random.Random(self.seed + i)) for i in range(RANDOM_ORDERS)
        )

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
                plan, space = witness[i % len(witness)], self.space[i % SETTINGS]
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
        drawn = torch.randint(-LARGEST, LARGEST, (rows, COLUMNS), generator=self.numbers)
        return drawn.double()


def _workspace_rows(bound: Plan) -> int:
    """The most rows of workspace on a rank."""
    spaces = [buffer.rows for buffer in bound.buffers.values() if buffer.role == "workspace"]
    return max(map(sum, zip(*spaces, strict=True)), default=0)


def _agree(
    calls: Sequence[Call],
    wanted: Sequence[Sequence[Buffers]],
    order: random.Random | None = None,
    last: Step | None = None,
) -> bool:
    """Whether calls have the wanted results, bit by bit, in an order of `reference.run`."""
    try:
        found = run(*calls, order=order, last=last)
    except PlanError:
        return False
    return all(
        torch.equal(one[name].view(torch.int64), other[name].view(torch.int64))
        for results, others in zip(found, wanted, strict=True)
        for one, other in zip(results, others, strict=True)
        for name in one
    )


def release_witness(ranks: int, rows: int, reader: int) -> Plan:
    """A plan whose results show whether the plans before and after it release `rows` rows of
    workspace as the contract demands: all ranks but the `reader` write to the workspace of every
    rank, the same rows so that they need not wait for each other, and all ranks read them.

    The reader's own late writes of the plan before remain, and others read after it.
    """
    whole, others = range(ranks), [r for r in range(ranks) if r != reader]
    lanes: list[list[Instruction]] = []
    for r in whole:
        own, peers = Region(r, "a", 0, rows), [p for p in whole if p != r]
        spaces = [Region(p, "space", 0, rows) for p in whole]
        enter = [Wait(Signal("free", p), 0) for p in peers]
        write = [Copy(own, space) for space in spaces if r != reader]
        tell = (
            [Wait(Signal("written", p), 1) for p in others]
            if r == reader
            else [Notify(reader, Signal("written", r))]
        )
        read = [
            Copy(space, Region(r, "out", p * rows, (p + 1) * rows))
            for p, space in enumerate(spaces)
        ]
        lanes.append([*enter, *write, *tell, *read, *(Notify(p, Signal("free", r)) for p in peers)])
    return _witness(lanes, {"a": rows, "space": rows, "out": ranks * rows})


def synchronization_witness(ranks: int, turn: int) -> Plan:
    """A plan whose results show whether the plan before it synchronizes: each rank reads what all
    ranks wrote in the call of the other `turn` before, and writes its input for the next one,
    without any signal.
    """
    lanes = [
        [
            *(
                Copy(Region(p, "space", 1 - turn, 2 - turn), Region(r, "out", p, p + 1))
                for p in range(ranks)
            ),
            Copy(Region(r, "a", 0, 1), Region(r, "space", turn, turn + 1)),
        ]
        for r in range(ranks)
    ]
    return _witness(lanes, {"a": 1, "space": 2, "out": ranks})


def _witness(lanes: Sequence[Sequence[Instruction]], rows: Mapping[str, int]) -> Plan:
    roles: dict[str, Role] = {"a": "input", "space": "workspace", "out": "output"}
    buffers = {name: Buffer(roles[name], (many,) * len(lanes)) for name, many in rows.items()}
    return Plan("witness", "", buffers, tuple({"compute": tuple(lane)} for lane in lanes))
