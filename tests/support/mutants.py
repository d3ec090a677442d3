"""Changed plans besides those of `weft_tools.laboratory.mutants`: waits for less, and random changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from weft.kernels.matmul import matmul
from weft.plan import Compute, Copy, Instruction, Notify, Plan, Region, Signal, Wait
from weft_tools.laboratory.mutants import Mutant, edited, places


def lowered(plan: Plan) -> Iterator[Mutant]:
    """The plan with one wait for a count less by one, for each wait."""
    for place, instruction in places(plan):
        match instruction:
            case Wait(signal, count) if count:
                yield Mutant(
                    f"{place}: one less than {instruction}",
                    edited(plan, place, Wait(signal, count - 1)),
                )


def mutant(plan: Plan, dice: random.Random) -> Plan:
    """The plan with one random change of any kind."""
    (rank, name, i), instruction = dice.choice([*places(plan)])
    lane = plan.lanes[rank][name]
    to = dice.randrange(len(lane))
    match dice.randrange(6):
        case 0:
            return edited(plan, (rank, name, i))
        case 1:
            return edited(plan, (rank, name, to), instruction, span=0)
        case 2:
            return edited(edited(plan, (rank, name, i)), (rank, name, to), instruction, span=0)
        case 3:
            other = dice.choice(["compute", "comm", "third"])
            return edited(
                edited(plan, (rank, name, i)),
                (dice.randrange(plan.ranks), other, 0),
                instruction,
                span=0,
            )
        case 4:
            return edited(plan, (rank, name, to), _signalling(plan, rank, dice), span=0)
        case _:
            return edited(plan, (rank, name, i), _changed(plan, instruction, dice))


def _signalling(plan: Plan, rank: int, dice: random.Random) -> Instruction:
    name, peer = dice.choice(["free", "ready", "arrived", "other"]), dice.randrange(plan.ranks)
    return dice.choice(
        [Notify(peer, Signal(name, rank)), Wait(Signal(name, peer), dice.randrange(2))]
    )


def _changed(plan: Plan, instruction: Instruction, dice: random.Random) -> Instruction:
    match instruction:
        case Wait(signal, count):
            return dice.choice(
                [
                    Wait(signal, count - 1),
                    Wait(signal, count + 1),
                    Wait(signal._replace(source=dice.randrange(plan.ranks)), count),
                ]
            )
        case Notify(_, signal):
            return Notify(dice.randrange(plan.ranks), signal)
        case Copy(src, dst) | Compute(_, (src,), dst):
            return dice.choice(
                [
                    _with(instruction, "src", _elsewhere(plan, src, dice)),
                    _with(instruction, "dst", _elsewhere(plan, dst, dice)),
                    Copy(src, dst),
                    matmul(src, dst),
                ]
            )
        case _:
            return instruction


def _with(instruction: Instruction, field: str, region: Region) -> Instruction:
    """The instruction with another region for its ``src``, of which it has one, or its ``dst``."""
    if field == "src" and isinstance(instruction, Compute):
        return replace(instruction, srcs=(region,))
    return replace(instruction, **{field: region})


def _elsewhere(plan: Plan, region: Region, dice: random.Random) -> Region:
    by = dice.choice([-1, 1])
    return dice.choice(
        [
            region._replace(rank=dice.randrange(plan.ranks)),
            region._replace(buffer=dice.choice([*plan.buffers])),
            region._replace(start=region.start + by, stop=region.stop + by),
            region._replace(stop=region.stop + by),
        ]
    )
