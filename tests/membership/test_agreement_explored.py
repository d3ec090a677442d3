"""Who continues, in every course of a few ranks: the rule holds, and the explorer finds what is wrong with each
rule that is changed. `python -m pytest -s tests/world/test_agreement_explored.py` prints how many states there
are; `-m slow` explores the larger ones.
"""

from __future__ import annotations

import pytest
from support.changed_rules import RULES
from support.explorer import Explorer, Violation

from weft.membership.view import View

COURSES = [
    {"hosts": (0, 0), "kills": 1, "live": True},
    {"hosts": (0, 1), "live": True},
    {"hosts": (0, 1), "breaks": 1},
    {"hosts": (0,), "joiners": 1, "kills": 1},
]
LARGE = [
    {"hosts": (0, 0), "kills": 1, "agreements": 3, "live": True},
    {"hosts": (0, 1), "kills": 1, "breaks": 1, "agreements": 3, "live": True},
    {"hosts": (0, 1), "kills": 1, "breaks": 2, "agreements": 3},
    {"hosts": (0, 0), "joiners": 1, "agreements": 1},
    {"hosts": (0, 0, 0), "agreements": 1},
    {"hosts": (0, 0, 0), "kills": 1, "agreements": 1},
]
"""The hosts of ranks, and what happens to them."""


def explored(hosts, live=False, **courses):
    return Explorer(hosts, **courses).explore(live)


def named(courses):
    return " ".join(f"{name}={value}" for name, value in courses.items())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "courses",
    [
        *(pytest.param(each, id=named(each)) for each in COURSES),
        *(pytest.param(each, id=named(each), marks=pytest.mark.slow) for each in LARGE),
    ],
)
def test_one_world_at_most_goes_on_in_every_course(courses):
    states = explored(**courses).states
    print(f"\n{named(courses)}: {states:,} states")
    assert states > 500  # else hardly anything happens


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(each, id=each.what, marks=[pytest.mark.slow] if each.slow else [])
        for each in RULES
    ],
)
def test_what_a_changed_rule_breaks_is_found(changed, monkeypatch):
    monkeypatch.setattr(changed.owner, changed.name, changed.rule)
    with pytest.raises(Violation, match=changed.shows) as found:
        explored(**changed.courses)
    print(f"\n{changed.what}:\n{found.value}")


TWO_DECISIONS = """
    start 0, start 1, start 2, called 2 0, asked 0 2, passed 0, passed 2, called 2 1, asked 1 2,
    answered 2 0, answered 2 0, passed 1, made 0, unmade 1, unmade 2, called 1 2, asked 2 1, passed 2
"""
"""Ranks 0 and 1 have decided each on a world with rank 2, which has adopted that of rank 0 and not come to
make it, while rank 0 has made it; and rank 1 asks rank 2, at the endpoint that both decisions have.
"""
BOTH_GO_ON = ", answered 1 2, answered 1 2, made 2, made 1, start 0, passed 0, made 0"


def followed(course):
    explorer = Explorer((0, 0, 0))
    state = explorer.begin
    for step in course.split(","):
        event, *who = step.split()
        state = next(
            after
            for (name, *whom), after in explorer.next(state)
            if name == event and [str(each) for each in whom[: len(who)]] == who
        )
    return explorer, state


def test_two_go_on_where_ranks_hear_those_of_another_decision(monkeypatch):
    explorer, state = followed(TWO_DECISIONS)
    assert explorer.values[state.processes[2]].said == "PeerTimeout"
    monkeypatch.setattr(View, "accepts", lambda self, request: request.rank != self.rank)
    explorer, state = followed(TWO_DECISIONS + BOTH_GO_ON)
    assert "two worlds continue" in explorer.wrong(state)
