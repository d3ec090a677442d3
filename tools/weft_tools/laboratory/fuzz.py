"""The fuzz of plans: plans at random, right and wrong ones, are proved. An engine executes those
that the proof accepts, and its results are compared with the reference interpreter's, bit by bit.

Ranks are threads of this process, on one host, on several, or working on streams. Calls follow each
other without a pause, so each plan runs before and after others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checks import name as dtype_name
from weft.engines import engine, reference
from weft.errors import WeftError
from weft.kernels.matmul import MATMUL
from weft.plan import Copy, Plan, accesses
from weft.plan.binding import bind
from weft.plan.messages import lower_to_messages
from weft.plan.proof import accepts
from weft.world import World, init
from weft.world.local import LocalWorld, local_world
from weft_tools.laboratory.accumulation import FOLD
from weft_tools.laboratory.mutants import aimed_elsewhere, deleted, moved
from weft_tools.laboratory.random_plans import Choices, random_plan

POOL = 64 << 20
"""Bytes of symmetric memory on each rank, in which its inputs and outputs are placed."""
_ROWS = 4  # the most rows of a block
_WIDEST = 100_000  # columns
_NUMBERS = 64  # the largest number of an input
_MULTIPLIED = 48  # the most columns of rows that are multiplied, whose products remain exact
_CALLS = 2  # of each plan, with other numbers
_BATCH = 16  # plans that are executed without a pause
_TIMEOUT = 20.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)
_MUTATIONS = (deleted, moved, aimed_elsewhere)


class Setting(NamedTuple):
    """A world: the host of each of its ranks, and whether they work on streams."""

    hosts: tuple[int, ...]
    streams: bool = False

    @property
    def several(self) -> bool:
        return len({*self.hosts}) > 1

    def __str__(self) -> str:
        on = f" on hosts {''.join(map(str, self.hosts))}" if self.several else ""
        many = f"{len(self.hosts)} rank{'s' if len(self.hosts) > 1 else ''}"
        return f"{many}{on}{', streams' if self.streams else ''}"


SETTINGS = (
    *(Setting((0,) * ranks) for ranks in range(1, 5)),
    *(Setting(hosts) for hosts in ((0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 2))),
    Setting((0, 0), streams=True),
    Setting((0, 0, 0), streams=True),
)
"""The worlds in which plans are executed, in turn."""


@dataclass(frozen=True)
class Case:
    """A plan at random, and the tensors with which it is executed: rows of its shards, columns, the
    elements between rows, and whether ``a`` is symmetric where it need not be.

    `change` describes the change that may have made it wrong, if there is one.
    """

    number: int
    setting: Setting
    plan: Plan
    rows: Sequence[int]
    columns: int
    gap: int
    dtype: torch.dtype
    ordinary: bool
    change: str
    inputs: Sequence[Sequence[Mapping[str, Tensor]]] = field(repr=False, default=())
    weights: Sequence[Mapping[str, Tensor]] = field(repr=False, default=())

    @property
    def bound(self) -> Plan:
        return bind(self.plan, self.rows)

    def __str__(self) -> str:
        rows = f", rows {[*self.rows]}" if self.rows else ""
        change = f"; changed: {self.change}" if self.change else ""
        return (
            f"plan {self.number}, {self.setting}{rows}, {self.columns} columns of "
            f"{dtype_name(self.dtype)}{change}"
        )


class Fault(NamedTuple):
    """A case with a fault, and the fault in words: results of an accepted plan that differ from the
    reference, or a right plan that the proof rejects.
    """

    case: Case
    words: str

    def __str__(self) -> str:
        return f"{self.case}: {self.words}"


@dataclass
class Tally:
    """Numbers of plans, in all and of those that were changed, and the faults that were found."""

    plans: int = 0
    accepted: int = 0
    changed: int = 0
    changed_accepted: int = 0
    faults: list[Fault] = field(default_factory=list)

    def count(self, case: Case, accepted: bool) -> None:
        self.plans += 1
        self.changed += bool(case.change)
        self.accepted += accepted
        self.changed_accepted += accepted and bool(case.change)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "faults": [*map(str, self.faults)]}


def case(seed: int, number: int) -> Case:
    """The case of this number; `seed` and the number determine it."""
    dice = random.Random(f"{seed} {number}")
    setting = SETTINGS[number % len(SETTINGS)]
    dtype = dice.choice(_DTYPES)
    computes = dtype is torch.float64 and dice.random() < 0.5
    widest = math.log(_MULTIPLIED if computes else _WIDEST)
    columns = round(math.exp(dice.uniform(0, widest)))
    omitted = dice.choice((0.0, 0.0, 0.0, 0.1))
    choices = Choices(
        setting.hosts,
        dice.randint(1, 8),
        omitted,
        MATMUL if computes else None,
        FOLD if computes else None,
        averages=dtype.is_floating_point and not computes,  # whose results are not exact
    )
    plan = random_plan(dice, choices)
    changes = [f"without {omitted:.0%} of the signals"] if omitted else []
    for _ in range(dice.choice((0, 0, 1, 1, 2))):
        mutants = [*dice.choice(_MUTATIONS)(plan)]
        if mutants:
            change, plan = dice.choice(mutants)
            changes.append(change)
    # fewer rows of many columns, so that all fit into the pool
    most = max(1, min(_ROWS, (1 << 17) // columns))
    return Case(
        number,
        setting,
        plan,
        [dice.randint(0, most * pieces) for pieces in plan.pieces],
        columns,
        dice.choice((0, 0, 3)),
        dtype,
        dice.random() < 0.3,
        ", ".join(changes),
    )


def with_operands(one: Case) -> Case:
    """The case with its inputs for each call and rank, and its weights."""
    numbers = torch.Generator().manual_seed(one.number)

    def matrix(rows: int, columns: int, largest: int) -> Tensor:
        drawn = torch.randint(
            -largest, largest + 1, (rows, columns), generator=numbers, device="cpu"
        )
        return drawn.to(one.dtype)

    rows = one.bound.buffers["a"].rows
    inputs = [
        [{"a": matrix(of_rank, one.columns, _NUMBERS)} for of_rank in rows] for _ in range(_CALLS)
    ]
    multiplied = one.columns if one.columns <= _MULTIPLIED else 0
    weights = [{"weight": matrix(multiplied, multiplied, 1)} for _ in rows]
    return replace(one, inputs=inputs, weights=weights)


def fuzz(seed: int, numbers: Sequence[int]) -> Iterator[tuple[Setting, Tally]]:
    """Fuzz the cases of these numbers; yields the tally of a batch of a setting at a time."""
    for setting in SETTINGS:
        chosen = [number for number in numbers if SETTINGS[number % len(SETTINGS)] == setting]
        if not chosen:
            continue
        with _world(setting) as local:
            for start in range(0, len(chosen), _BATCH):
                yield setting, _batch(local, seed, chosen[start : start + _BATCH])


def _world(setting: Setting) -> LocalWorld:
    return local_world(
        len(setting.hosts),
        timeout=_TIMEOUT,
        streams=setting.streams,
        hosts=None if setting.streams else setting.hosts,
    )


def _batch(local: LocalWorld, seed: int, numbers: Sequence[int]) -> Tally:
    tally = Tally()
    run = list[Case]()
    for number in numbers:
        one = case(seed, number)
        accepted = accepts(one.plan, hosts=one.setting.hosts)
        tally.count(one, accepted)
        if accepted:
            run.append(with_operands(one))
        elif not (one.change or one.setting.several):
            tally.faults.append(Fault(one, "the proof rejects a right plan"))
    try:
        found = _differing(local, run)
    except WeftError:  # find the plan to which it belongs
        found = [fault for one in run for fault in _alone(local, one)]
    tally.faults += found
    return tally


def _alone(local: LocalWorld, one: Case) -> list[Fault]:
    """The faults of a case that is executed by itself."""
    try:
        return _differing(local, [one])
    except WeftError as error:
        return [Fault(one, f"{type(error).__name__}: {error}")]


def _differing(local: LocalWorld, cases: Sequence[Case]) -> list[Fault]:
    """Execute cases one after the other; the faults of those whose results differ."""
    faults = []
    for one, *found in zip(cases, *local.run(_execute, cases), strict=True):
        wanted = _reference(one)
        wrong = [
            f"rank {rank} in call {call}"
            for rank, results in enumerate(found)
            for call, result in enumerate(results)
            if not torch.equal(result, wanted[call][rank]["out"])
        ]
        if wrong:
            faults.append(Fault(one, f"the engine's result differs on {', '.join(wrong)}"))
    return faults


def _reference(one: Case) -> list[list[Any]]:
    plan = one.bound
    if one.setting.several:  # the plan that was proved: as messages it may be right, and else not
        plan = lower_to_messages(plan, one.setting.hosts)
    return reference.run(*[reference.Call(plan, inputs, one.weights) for inputs in one.inputs])


def _execute(cases: Sequence[Case]) -> list[list[Tensor]]:
    """The results of this rank in each call of each case."""
    world = init()
    pool = _pool(world)
    return [_calls(world, pool, one) for one in cases]


def _pool(world: World) -> Tensor:
    """Symmetric memory of a world, made at the first use."""
    selections = engine(world).selections
    if Case not in selections:
        selections[Case] = world.empty(POOL, dtype=torch.uint8)
    pool: Tensor = selections[Case]
    return pool


def _calls(world: World, pool: Tensor, one: Case) -> list[Tensor]:
    own = engine(world)
    rank = world.rank
    results = []
    tensors = _placed(world, pool, one)
    weights = one.weights[rank] if one.columns <= _MULTIPLIED else {}
    for inputs in one.inputs:
        tensors["a"].copy_(inputs[rank]["a"])
        tensors["out"].fill_(math.nan if one.dtype.is_floating_point else -1)
        own.program(one.plan, tensors, one.rows).run(tensors, one.rows, weights)
        results.append(tensors["out"].clone())
        # they are the caller's again: a peer that still reads or writes them shows
        tensors["a"].fill_(_NUMBERS + 1)
    return results


def _placed(world: World, pool: Tensor, one: Case) -> dict[str, Tensor]:
    """The tensors of this rank's inputs and outputs, in the pool if peers access them."""
    found = {}
    offset = 0
    bound = one.bound
    shared, read = _shared(one.plan, one.setting.hosts)
    for name in ("a", "out"):
        rows = bound.buffers[name].rows
        width = one.columns + one.gap
        size = max(rows) * width
        may_be = one.ordinary and world.reads_memory and not world.stream_ordered
        ordinary = name not in shared or (name in read and may_be)
        if ordinary:
            whole = torch.empty(size, dtype=one.dtype, device="cpu")
        else:
            whole = pool[offset : offset + size * one.dtype.itemsize].view(one.dtype)
            offset += -(-size * one.dtype.itemsize // 64) * 64
        found[name] = whole.view(max(rows), width)[: rows[world.rank], : one.columns]
    return found


def _shared(plan: Plan, hosts: Sequence[int]) -> tuple[set[str], set[str]]:
    """The buffers that ranks access on others of their host, and those of them that they only copy
    from there, which need not be symmetric.
    """
    shared, written = set(), set()
    for rank, instruction in plan.instructions():
        for region in accesses(instruction):
            if region.rank != rank and hosts[region.rank] == hosts[rank]:
                shared.add(region.buffer)
                if not (isinstance(instruction, Copy) and region == instruction.src):
                    written.add(region.buffer)
    return shared, ({"a"} - written) & shared
