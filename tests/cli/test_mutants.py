"""``weft plan mutants``: its numbers, and what it says if the proof misses a mutant."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.schedules.operators import COLLECTIVES, OPERATORS
from weft_tools.laboratory import mutation


def score(*arguments, code=0):
    """The scores that the command writes as JSON, and what it prints."""
    outcome = CliRunner().invoke(app, ["plan", "mutants", *arguments, "--json", "-"])
    assert outcome.exit_code == code, outcome.output
    return json.loads(outcome.stdout), outcome.stderr


def test_the_proof_misses_no_mutant_of_a_broadcast():
    found, printed = score("--operator", "broadcast", "--ranks", "2")
    scores = found["operators"].pop("broadcast")
    assert found == {"ranks": [2], "seed": 0, "plans": 5, "false_alarms": [], "operators": {}}
    assert [*scores] == ["deleted", "repeated", "moved", "aimed elsewhere"]
    for each in scores.values():
        assert each["mutants"] == each["rejected"] + each["equivalent"] > 0
        assert not each["missed"]
    assert scores["deleted"]["equivalent"] == 0
    assert "0 missed; 5 of 5 plans accepted without a change" in printed


def test_mutants_that_a_blind_proof_accepts_are_missed(monkeypatch):
    monkeypatch.setattr(mutation, "accepts", lambda plan: True)
    found, printed = score("--operator", "barrier", "--ranks", "2", code=1)
    deleted = found["operators"]["barrier"]["deleted"]
    assert deleted["mutants"] == len(deleted["missed"]) == 4
    assert "missed: barrier/levels, (0, 'compute', 0): without notify barrier<0 on 1" in printed


def test_a_false_alarm_is_reported(monkeypatch):
    wrong = next(mutation.deleted(mutation.plans("barrier", 2)[0])).plan
    monkeypatch.setattr(mutation, "plans", lambda operator, ranks: [wrong])
    found, printed = score("--operator", "barrier", "--ranks", "2", code=1)
    assert len(found["false_alarms"]) == 1
    assert "false alarm: barrier/levels on 2 ranks: 1 problem(s)" in printed
    assert "0 of 1 plans accepted without a change" in printed


@pytest.mark.parametrize("ranks", ["1", "2,", "two"])
def test_numbers_of_ranks_are_checked(ranks):
    outcome = CliRunner().invoke(app, ["plan", "mutants", "--ranks", ranks])
    assert outcome.exit_code == 2
    assert "expected numbers of 2 or more ranks" in outcome.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_proof_misses_no_mutant_on_two_ranks():
    """On 3 ranks, as the command does without options, it takes some minutes more."""
    found, _ = score("--ranks", "2")
    assert {*found["operators"]} == {*OPERATORS, *COLLECTIVES, *mutation.MADE}
    for scores in found["operators"].values():
        assert not any(each["missed"] for each in scores.values())
        assert scores["deleted"]["rejected"] == scores["deleted"]["mutants"]
