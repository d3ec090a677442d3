"""One world at most continues: many courses of deaths, suspensions and firewalls, in which processes run the
agreement as it is; and the page says what the code says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.agreements import Course
from support.explorer import Endpoint, Explorer

import weft.membership
from weft.membership import view
from weft.membership.decision import Membership

LAYOUTS = [
    ([0, 0, 0], 0),
    ([0, 1], 0),
    ([0, 1], 2),
    ([0, 1, 2], 0),
    ([0, 0, 1], 1),
    ([0, 1, 1], 0),
    ([0, 0, 1, 1], 0),
    ([0, 1, 1, 0], 1),
    ([0, 1, 0, 2, 1], 0),
]
"""The hosts of ranks, and how many processes join them."""


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(12), id="12"),
        pytest.param(range(12, 300), id="288", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("hosts", "joiners"), LAYOUTS)
def test_one_world_at_most_goes_on(hosts, joiners, seeds):
    made = 0
    for seed in seeds:
        course = Course(hosts, seed, joiners).run()
        assert not course.beside, (seed, course.beside)
        made += bool(course.worlds)
    assert made >= len(seeds) / 6  # not all courses are failures


def test_two_go_on_where_a_refusal_is_taken_for_the_end_of_a_rank(monkeypatch):
    monkeypatch.setattr(view, "is_dead", lambda ended, called, own: ended.refused)
    assert any(Course([0, 1], seed).run().beside for seed in range(60))


def words(text):
    return " ".join(re.sub(r"[*`>]|^- ", "", text, flags=re.MULTILINE).split())


def test_the_page_has_the_rule_of_the_code():
    page = words((Path(__file__).parents[2] / "docs" / "elastic.md").read_text())
    paragraphs = [words(each) for each in weft.membership.__doc__.split("\n\n")]
    begin = next(at for at, each in enumerate(paragraphs) if each.startswith("For a rank,"))
    end = next(at for at, each in enumerate(paragraphs) if each.startswith("If a rank of the next"))
    for sentence in (each for rule in paragraphs[begin:end] for each in rule.split(". ")):
        assert sentence.rstrip(".") in page


def places():
    """The places of process 1 in two decisions that have its endpoint."""
    endpoints = [Explorer((0, 0, 0)).handle(each, 1) for each in range(3)]
    own = Endpoint(endpoints[1])
    with_0, with_2 = endpoints[:2], endpoints[1:]
    return [
        Membership.of_made("", each.index(endpoints[1]), each, own) for each in (with_0, with_2)
    ]


def test_a_rank_of_another_decision_is_not_heard():
    with_0, with_2 = places()
    own = Explorer((0, 0, 0)).handle(1, 2)
    asked = view.View(with_0, own, 0, 1.0)
    known = view.Request("", 0, with_0.endpoints, own)
    assert asked.accepts(known)
    assert not asked.accepts(known._replace(world=with_2.endpoints))
    assert not asked.accepts(known._replace(rank=1))
    assert not asked.accepts(known._replace(rank=2))
    assert asked.accepts(known._replace(rank=-1, world=b""))


def test_the_request_of_a_rank_that_is_dead_since_does_not_count():
    with_0, _ = places()
    own = Explorer((0, 0, 0)).handle(1, 2)
    asked = view.View(with_0, own, 0, 1.0, dead=frozenset({0}))
    assert asked.taking_part([view.Request("", 0, with_0.endpoints, own)]) == {}
