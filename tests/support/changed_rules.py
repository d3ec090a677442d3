"""Rules of the agreement on who continues, each with one change: the explorer must find what goes
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from support.explorer import Explorer, Process
from weft.membership import decision as membership
from weft.membership import view
from weft.membership.decision import Decision, Membership
from weft.membership.view import View


class Changed(NamedTuple):
    """A rule, `name` of `owner`, in whose place another one is, the courses that show it, and how."""

    what: str
    owner: object
    name: str
    rule: object
    courses: dict[str, object]
    shows: str = "two worlds continue"
    slow: bool = False


def _decision(**change: object) -> Callable[..., object]:
    right = View.decision

    def decision(self, requests, joining, patient, name):
        return right(self, requests, joining, change.get("patient", patient), name)

    return decision


def _next(change: Callable[[Membership, Decision], Decision]) -> Callable[..., Decision]:
    right = Membership.next
    return lambda self, *arguments: change(self, right(self, *arguments))


def _forgets(self, who, process, effects):
    """Agrees anew on the world before, though it has adopted a decision for it."""
    return self._start(who, process._replace(place=None, was_made=True, endpoint=0), effects)


def _told_of_unknown(self, told):
    known = {*range(len(self.membership.handles))} - {self.rank}
    return self._replace(dead=self.dead | (told.dead | told.unknown) & known)


def _without_asking(self, told):
    dead = told.dead & {*range(len(self.membership.handles))} - {self.rank}
    return self._replace(dead=self.dead | dead)


def _made_without_doubt(self, who, process, effects, right=Explorer._made):
    return right(self, who, process._replace(in_doubt=False), effects)


RULES = [
    Changed(
        "a refusal between hosts is believed",
        view,
        "is_dead",
        lambda ended, called, own: ended.refused,
        {"hosts": (0, 1), "breaks": 1},
    ),
    Changed(
        "every end of a call on this host is believed",
        view,
        "is_dead",
        lambda ended, called, own: called.info.host == own.info.host,
        {"hosts": (0, 0)},
    ),
    Changed(
        "half of the ranks are enough without rank 0",
        membership,
        "_most",
        lambda some, ranks: 2 * len(some) >= ranks,
        {"hosts": (0, 1)},
    ),
    Changed(
        "half of the ranks are too few with rank 0",
        membership,
        "_most",
        lambda some, ranks: 2 * len(some) > ranks,
        {"hosts": (0, 1), "live": True},
        "can talk and do not continue",
    ),
    Changed(
        "any that take part continue after the time limit",
        Membership,
        "may_continue",
        lambda self, ranks: True,
        {"hosts": (0, 1)},
    ),
    Changed(
        "only the decided world is counted",
        Membership,
        "may_continue",
        lambda self, ranks: membership._most(ranks, len(self.handles)),
        {"hosts": (0, 0, 0)},
        slow=True,
    ),
    Changed(
        "it is forgotten that a rank was left out in doubt",
        Membership,
        "next",
        _next(lambda place, decision: decision._replace(doubtful=False)),
        {"hosts": (0, 0)},
    ),
    Changed(
        "every rank leads",
        View,
        "lower",
        property(lambda self: frozenset()),
        {"hosts": (0, 0), "live": True},
        "do not continue at once",
    ),
    Changed(
        "a leader does not wait",
        View,
        "decision",
        _decision(patient=False),
        {"hosts": (0, 0), "live": True},
        "can talk and do not continue",
    ),
    Changed(
        "a leader waits for ever",
        View,
        "decision",
        _decision(patient=True),
        {"hosts": (0, 0), "live": True},
        "waits for ever",
    ),
    Changed(
        "a rank waits for its leader for ever",
        View,
        "impatient",
        lambda self: self,
        {"hosts": (0, 0), "live": True},
        "waits for ever",
    ),
    Changed(
        "unresponsive ranks are taken for dead",
        View,
        "missing",
        lambda self, requests: [
            rank for rank in self.others if rank not in requests and rank not in self.unresponsive
        ],
        {"hosts": (0, 0)},
    ),
    Changed(
        "a rank that others wait for in vain is taken for dead",
        View,
        "_after",
        _told_of_unknown,
        {"hosts": (0, 0, 1), "agreements": 1},
        "is not gone",
    ),
    Changed(
        "nobody asks the ranks beside one that does not answer",
        View,
        "_after",
        _without_asking,
        {"hosts": (0, 1, 1), "agreements": 1, "kills": 1, "live": True},
        "do not continue at once",
    ),
    Changed(
        "a rank adopts a second decision",
        Explorer,
        "_unmade",
        _forgets,
        {"hosts": (0, 0)},
    ),
    Changed(
        "a world is made before all have adopted the decision",
        Process,
        "missing",
        property(lambda self: set()),
        {"hosts": (0, 0)},
    ),
    Changed(
        "an endpoint is closed with the decision for which it was open",
        Process,
        "decision",
        lambda self, endpoint: None,
        {"hosts": (0, 0)},
    ),
    Changed(
        "an endpoint is closed with the second world after one in doubt",
        Explorer,
        "_made",
        _made_without_doubt,
        {"hosts": (0, 0), "agreements": 3},
    ),
]
