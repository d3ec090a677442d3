"""Who goes on, in every course of a few ranks: the rule holds, and the explorer finds what is wrong with each
rule that is changed. `python -m pytest -s tests/world/test_agreement_explored.py` prints how many states there
are; `-m slow` explores the larger ones.
"""

from __future__ import annotations

import pytest
from support.changed_rules import RULES
from support.explorer import Explorer, Violation

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
