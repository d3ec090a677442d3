"""The execution of plans of other systems, beside what they promise.

Rows are random integers in float64, which are added exactly in every order, so results are compared
bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engines import engine
from weft.engines.reference import Call, run
from weft.errors import PlanError
from weft.plan import Applied, Plan, Region, Term, Value
from weft.world import init
from weft.world.local import local_world
from weft_tools.laboratory.equivalence import held_back

_COLUMNS = 3
_LARGEST = 1000
_CALLS = 3
_ORDERS = 3

Rows = Mapping[str, Tensor]


def promised(plan: Plan, inputs: Sequence[Rows]) -> list[dict[str, Tensor]]:
    """The outputs of each rank that a plan over rows promises, made of the promise alone."""
    outputs = [
        {
            name: torch.zeros(buffer.rows[rank], _COLUMNS, dtype=torch.float64, device="cpu")
            for name, buffer in plan.buffers.items()
            if buffer.role == "output"
        }
        for rank in range(plan.ranks)
    ]
    for region, value in plan.result.items():
        outputs[region.rank][region.buffer][region.start : region.stop] = _of(value, region, inputs)
    return outputs


def _of(value: Value, region: Region, inputs: Sequence[Rows]) -> Tensor:
    """The rows of a region with this value."""
    found = []
    for one in value:
        match one:
            case Term(rank, buffer, shift):
                found.append(inputs[rank][buffer][region.start + shift : region.stop + shift])
            case Applied("max" | "min" as op, sources):
                parts = torch.stack([_of(source, region, inputs) for source in sources])
                found.append(parts.amax(0) if op == "max" else parts.amin(0))
            case _:
                raise ValueError(f"a collective does not promise {one}")
    return torch.stack(found).sum(0)


def inputs(plan: Plan, seed: int) -> list[dict[str, Tensor]]:
    """Random integers for the inputs of each rank."""
    numbers = torch.Generator().manual_seed(seed)

    def drawn(rows: int) -> Tensor:
        found = torch.randint(
            -_LARGEST, _LARGEST, (rows, _COLUMNS), generator=numbers, device="cpu"
        )
        return found.double()

    return [
        {
            name: drawn(buffer.rows[rank])
            for name, buffer in plan.buffers.items()
            if buffer.role == "input"
        }
        for rank in range(plan.ranks)
    ]


def differs_in_orders(plan: Plan, seed: int = 0) -> str:
    """The order in which an ordinary plan does not give what it promises, or "". The reference
    engine executes it in adversarial orders, several calls without a pause.
    """
    given = [inputs(plan, seed + call) for call in range(_CALLS)]
    wanted = [promised(plan, each) for each in given]
    calls = [Call(plan, each) for each in given]
    for order in _orders(plan, seed):
        try:
            found = run(*calls, **order)
        except PlanError as error:
            return f"{order}: {error}"
        if not all(map(_equal, found, wanted)):
            return f"{order}: another result"
    return ""


def _orders(plan: Plan, seed: int) -> Iterator[Mapping[str, Any]]:
    """Round robin, at random, and with each of some lanes held back."""
    dice = random.Random(seed)
    yield {}
    yield from ({"order": random.Random(dice.random())} for _ in range(_ORDERS))
    every = [order for rank, lanes in enumerate(plan.lanes) for order in held_back(rank, lanes)]
    yield from dice.sample(every, min(len(every), 4 * _ORDERS))


def differs_on_threads(plan: Plan, seed: int = 0) -> str:
    """The rank on which an ordinary plan, executed by a thread for each lane, does not give what it
    promises, or "".
    """
    given = [inputs(plan, seed + call) for call in range(_CALLS)]
    wanted = [promised(plan, each) for each in given]

    def calls() -> list[Rows]:
        world = init()
        found: list[Rows] = []
        sizes = {name: buffer.rows for name, buffer in plan.buffers.items()}
        shared = {
            name: world.empty((max(sizes[name]), _COLUMNS), dtype=torch.float64)
            for name in sorted(plan.shared_buffers())
            if plan.buffers[name].given
        }
        for each in given:
            tensors = {name: rows.clone() for name, rows in each[world.rank].items()}
            for name, buffer in plan.buffers.items():
                if buffer.role == "output":
                    rows = buffer.rows[world.rank]
                    tensors[name] = torch.full(
                        (rows, _COLUMNS), torch.nan, dtype=torch.float64, device="cpu"
                    )
            for name, memory in shared.items():
                view = memory[: sizes[name][world.rank]]
                view.copy_(tensors[name])
                tensors[name] = view
            engine(world).execute(plan, tensors)
            found.append({name: rows.clone() for name, rows in tensors.items()})
        return found

    with local_world(plan.ranks, streams=True) as world:
        results = world.run(calls)
    for rank, found in enumerate(results):
        for made, expected in zip(found, wanted, strict=True):
            for name, rows in expected[rank].items():
                if not torch.equal(made[name], rows):
                    return f"rank {rank}: another {name}"
    return ""


def _equal(found: Sequence[Rows], wanted: Sequence[Rows]) -> bool:
    return all(
        torch.equal(one[name], other[name])
        for one, other in zip(found, wanted, strict=True)
        for name in other
    )
