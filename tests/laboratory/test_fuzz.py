"""Random plans that the proof accepts are executed as the reference interpreter executes them;
`weft plan fuzz` does the same for as many as one likes.
"""

from __future__ import annotations

import random
from unittest import mock

import pytest

from weft.engines.host import HostProgram
from weft.gpu.program import DeviceProgram
from weft.kernels.matmul import MATMUL
from weft.plan import Copy, Region
from weft.plan.proof import accepts, problems
from weft_tools.laboratory.fuzz import SETTINGS, Tally, case, fuzz
from weft_tools.laboratory.mutants import deleted
from weft_tools.laboratory.random_plans import Choices, random_plan

SEED = 11


def total(seed, numbers):
    return sum((tally for _, tally in fuzz(seed, numbers)), Tally())


def test_accepted_plans_are_executed_as_they_were_proved():
    found = total(SEED, range(10 * len(SETTINGS)))
    assert not found.faults, [*map(str, found.faults)]
    assert found.plans == 10 * len(SETTINGS)
    assert 0.2 < found.accepted / found.plans < 0.8
    assert found.changed_accepted > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_more_plans(seed):
    found = total(seed, range(100 * len(SETTINGS)))
    assert not found.faults, [*map(str, found.faults)]


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 0, 0, 0)], ids=str)
def test_random_plans_are_right(hosts):
    for seed in range(60):
        plan = random_plan(random.Random(seed), Choices(hosts, 6, kernel=MATMUL))
        assert not problems(plan), (seed, problems(plan))


def test_random_plans_need_their_signals():
    """Most signals of a plan order accesses; few are implied by others."""
    accepted = rejected = 0
    for seed in range(20):
        plan = random_plan(random.Random(seed), Choices((0, 0), 6))
        for mutant in deleted(plan):
            if "wait" in mutant.change:
                accepted, rejected = accepted + accepts(mutant.plan), rejected + 1
    assert accepted < rejected / 2


def test_a_seed_and_a_number_determine_a_case():
    one, other = case(3, 17), case(3, 17)
    assert one == other
    assert case(4, 17).plan != one.plan
    assert str(one).startswith(f"plan 17, {SETTINGS[17 % len(SETTINGS)]}")


def off_by_one(program, lane, at, instruction):
    """A mutant: of two rows or blocks that are copied, the first is copied twice."""
    if isinstance(instruction, Copy) and instruction.src.rows == 2:
        src, dst = instruction.src, instruction.dst
        instruction = Copy(Region(*src[:3], src.start + 1), Region(*dst[:3], dst.start + 1))
    return _compile(program, lane, at, instruction)


_compile = HostProgram._compile


def test_a_wrong_engine_is_found():
    numbers = [n for n in range(200) if SETTINGS[n % len(SETTINGS)].hosts == (0, 0)]
    with mock.patch.object(HostProgram, "_compile", off_by_one):
        found = total(SEED, numbers)
    assert found.faults
    assert all("the engine's result differs" in str(fault) for fault in found.faults)


def test_an_engine_that_ends_with_an_error_is_found():
    numbers = [n for n in range(60) if SETTINGS[n % len(SETTINGS)].streams]
    failing = mock.patch.object(DeviceProgram, "run_locked", side_effect=_lost)
    with failing:
        found = total(SEED, numbers)
    assert len(found.faults) == found.accepted > 0


def _lost(*_, **__):
    import weft

    raise weft.PeerLost("rank 1 died")


def test_right_plans_that_the_proof_rejects_are_found():
    numbers = range(4 * len(SETTINGS))
    with mock.patch("weft_tools.laboratory.fuzz.accepts", return_value=False):
        found = total(SEED, numbers)
    right = [n for n in numbers if not (case(SEED, n).change or case(SEED, n).setting.several)]
    assert len(found.faults) == len(right) > 0
