"""``weft plan fuzz``: its numbers, and what it says of an engine that is wrong."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.engines.host import HostProgram
from weft.plan import Reduce
from weft_tools.laboratory.fuzz import SETTINGS


def fuzzed(*arguments, code=0):
    """The numbers that the command writes as JSON, and what it prints."""
    outcome = CliRunner().invoke(app, ["plan", "fuzz", *arguments, "--json", "-"])
    assert outcome.exit_code == code, outcome.output
    return json.loads(outcome.stdout), outcome.stderr


def test_some_plans():
    found, printed = fuzzed("--plans", "22", "--first", "11")
    assert (found["seed"], found["first"]) == (0, 11)
    assert [*found["worlds"]] == [*map(str, SETTINGS)]
    assert all(each["plans"] == 2 and not each["faults"] for each in found["worlds"].values())
    accepted = sum(each["accepted"] for each in found["worlds"].values())
    assert f"22 plans: {accepted} accepted and executed, 0 faults" in printed


def smallest(program, lane, at, instruction):
    """A mutant: every reduction is a minimum."""
    if isinstance(instruction, Reduce):
        instruction = Reduce(instruction.srcs, instruction.dst, "min")
    return _compile(program, lane, at, instruction)


_compile = HostProgram._compile


@pytest.mark.slow
def test_a_fault_is_shown_with_the_command_that_repeats_it():
    with mock.patch.object(HostProgram, "_compile", smallest):
        found, printed = fuzzed("--plans", "44", code=1)
    faults = [fault for each in found["worlds"].values() for fault in each["faults"]]
    assert faults
    number = faults[0].split(",")[0].removeprefix("plan ")
    assert f"{faults[0]}; repeat it by weft plan fuzz --seed 0 --first {number}" in printed
    assert "reduce sum" in printed or "reduce max" in printed
