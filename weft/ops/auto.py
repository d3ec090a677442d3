"""What ``algorithm="auto"`` does, and what `weft.explain` tells of it.

An operator has a default by its own rules. In shared memory, with or without an emulated link, the
variant that was fastest when the workload was tuned, or tried, comes before it. So does one that is
predicted (`weft.predict`) to be clearly faster, where ``weft calibrate`` measured this machine and,
for ranks on several hosts, the link between them; figures of another machine decide nothing. Rank 0
decides for all. What was not measured before, the first calls of its class measure
(`weft.ops.trials`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

import weft.predict as predict
from weft.engines import engine
from weft.ops.call import Call, CallKey, Decision
from weft.ops.trials import MOST, Trial, likely
from weft.plan import Plan
from weft.predict import machine, tuned
from weft.schedules import all_gather
from weft.schedules.broadcast import eager, push
from weft.schedules.levels import Levels
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import ORDERS, Variant, Workload

_CLEARLY = 0.05  # by how much of its time a prediction has to beat the default
# ranks from which on they are taken to be equal, and variants in which they are not are not
# considered
_MANY = 4
_calibrated = cache(machine.calibrated)
_ALGORITHMS = sorted({name for operator in OPERATORS.values() for name in operator.algorithms})

Rule = Callable[[str], Decision]
"""An operator's default for ``auto``, or what it does for one algorithm. Raises `ValueError` for
one that is not possible.
"""


def decide(call: Call) -> Decision:
    """How all ranks carry out a call: what rank 0 decides where that is left to ``auto``;
    collective where the key is new.

    Ranks may differ in what is local (N of a gather, K of a sum) and would then decide differently.
    Since they make the same calls in the same order, a key is new on all of them in the same call.
    Sizes of a class have one key, so that keys are few.
    """
    key, world = _open(call), call.world
    if key is None:
        return call.usual(call.options.algorithm)
    found: Decision | Trial | None = world.choices.get((key, world.emulated_link))
    choices: list[Decision] = []
    if found is None:
        call.check_algorithm("auto")
        choices = _of_rank_0(call, key)
        found = world.choices[key, world.emulated_link] = (
            Trial(choices) if len(choices) > 1 else choices[0]
        )
    if isinstance(found, Decision):
        return found
    report = partial(_measured, call, found) if found.includes(call) else None
    return found.of(call)._replace(settled=False, report=report, others=choices)


def _measured(call: Call, trial: Trial, begun: int, ended: int) -> None:
    """Take note of how long a call took that was part of a trial; collective where a round is over."""
    if trial.took(call, begun, ended):
        world, said = call.world, torch.tensor([trial.said()])
        every, plan = (
            said.new_empty(world.ranks, said.shape[1]),
            _asking(call.operator.name, world.levels, world.topology),
        )
        _beside(
            call,
            f"{call.words}\n{call.key} took {said.shape[1]}",
            plan,
            {"a": said, "gathered": every},
            (1,) * world.ranks,
        )
        choice = trial.heard(call, every)
        if choice is not None:
            world.choices[call.key, world.emulated_link] = choice
            remembered = (
                call.options.chunk_rows is None and not world.multi_host
            )  # a network is not this machine's
            if world.rank == 0 and remembered:
                tuned.learn(call.workload, world.emulated_link, choice.variant)


def expected(call: Call) -> Decision:
    """What `decide` returns, or would return if this rank decided; not collective."""
    default, key = call.usual(call.options.algorithm), _open(call)
    if key is None:
        return default
    own, choice = _own(call), call.world.choices.get((key, call.world.emulated_link))
    decided = choice.of(call) if isinstance(choice, Trial) else choice
    return (
        own
        if decided is None or (decided.variant == own.variant and not decided.measured)
        else decided
    )


def _open(call: Call) -> CallKey | None:
    """What a decision goes by, where there is one to be made: machine profiles say something about
    engines of CPUs only.
    """
    return call.key if call.world.ranks > 1 and not call.world.stream_ordered else None


def _own(call: Call) -> Decision:
    """What this rank would decide."""
    workload, world = call.workload, call.world
    if workload.dtype.startswith("float8"):  # taken as what profiles know
        workload = workload._replace(dtype="bfloat16")
    return fastest(
        workload, call.usual, world.emulated_link, call.options.chunk_rows, world.topology
    )


def fastest(
    workload: Workload,
    rule: Rule,
    link: tuple[float, float] | None,
    chunk_rows: int | None = None,
    hosts: tuple[int, ...] | None = None,
) -> Decision:
    """The variant that is known or predicted to be fastest for a workload, perhaps over an emulated
    `link`, as this rank sees it.

    `hosts`: the host of each rank, where they are on several.
    """
    default, profile = rule("auto"), _calibrated()
    possible = _variants(
        workload, default, rule, (link or hosts) is not None and chunk_rows is None
    )
    known = chunk_rows is None and hosts is None  # winners were measured in shared memory
    if (
        known
        and (variant := tuned.find(workload, link))
        and variant.algorithm in {other.algorithm for other in possible}
    ):
        return Decision(variant, "it was measured to be the fastest", sure=True)
    on = machine.from_dict(profile) if profile else None
    if (
        on is None
        or not on.multiplies(workload.dtype)
        or (hosts is not None and on.network is None)
    ):
        return default
    on = on.emulating(*link) if link else on
    if hosts is not None:
        on = on.over(hosts)
    elif workload.ranks > _MANY:
        workload = workload._replace(rows=(max(workload.rows),) * workload.ranks)
    times = {variant: 1e3 * predict.time(workload, variant, on) for variant in possible}
    found = tuple(
        sorted(times.items(), key=lambda one: (one[1], one[0].algorithm != default.algorithm))
    )
    (first, ms), before = found[0], times[default.variant]
    if first == default.variant or ms > before * (1 - _CLEARLY):
        why = f"{default.why}; no other is predicted to be clearly faster on this machine"
        return Decision(default.variant, why, found)
    why = f"predicted to be clearly faster on this machine than {default.variant}"
    return Decision(first, why, found)


def _variants(workload: Workload, default: Decision, rule: Rule, sizes: bool) -> list[Variant]:
    """The default, and that of each algorithm; with other `sizes` of pieces, which matter where
    they pass a link.
    """
    found, operator = [default.variant], OPERATORS[workload.operator]
    for name in operator.predicted:
        if workload.ranks > _MANY and name in operator.asymmetric:
            continue
        try:
            variant = rule(name).variant
        except ValueError:  # not possible in this world
            continue
        found.append(variant)
        if sizes and name != "sequential":
            found += [
                variant._replace(pieces=cut)
                for cut in (max(1, variant.pieces // 2), 2 * variant.pieces)
            ]
    if workload.ranks > 2:
        found += [
            variant._replace(order=ORDERS[1]) for variant in found if variant.algorithm == "push"
        ]
    return [*dict.fromkeys(found)]


def _of_rank_0(call: Call, key: CallKey) -> list[Decision]:
    """What rank 0 decides and tells to all, in a call described by `key`, so that ranks that make
    different calls notice.

    Several choices if they are to be measured, the usual one first.
    """
    world = call.world
    own = likely(call, _own(call)) if world.rank == 0 else []
    said = torch.zeros(3 * MOST, 1, dtype=torch.int64)
    numbers = [
        number
        for one in own
        for algorithm, pieces, order in [one.variant]
        for number in (_ALGORITHMS.index(algorithm), pieces, ORDERS.index(order))
    ]
    said[: len(numbers), 0] = torch.tensor(numbers, dtype=torch.int64)
    tensors = {"a": said, "out": said[:0]} if own else {"a": said[:0], "out": said}
    _beside(
        call, f"{call.words}\n{key}", _telling(world.levels, world.topology), tensors, (len(said),)
    )
    told = [numbers for numbers in said.view(-1, 3).tolist() if numbers[1]]
    return own or [
        Decision(Variant(_ALGORITHMS[name], cut, ORDERS[order]), "as rank 0 decided")
        for name, cut, order in told
    ]


@cache
def _telling(levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    """How rank 0 tells all ranks something."""
    return replace(push(0, hosts) if hosts else eager(0, levels), operator="auto")


@cache
def _asking(operator: str, levels: Levels, hosts: tuple[int, ...] | None) -> Plan:
    """How all ranks tell each other something in a call of an operator."""
    plan = (
        all_gather.all_gather(len(levels[-1]), 1, "push", hosts=hosts)
        if hosts
        else all_gather.eager(levels)
    )
    return replace(plan, operator=operator)


def _beside(
    call: Call, words: str, plan: Plan, tensors: dict[str, Tensor], rows: tuple[int, ...]
) -> None:
    """Say something to all ranks beside a call: traces show the operator, not this."""
    world = call.world
    recorder, world.recorder = world.recorder, None
    try:
        engine(world).execute_as(words, plan, tensors, rows, call.options.timeout)
    finally:
        world.recorder = recorder
