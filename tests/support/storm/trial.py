"""A trial: what goes wrong, when and where, all of which follows from its seed; and what ranks are
owed then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

LIMIT = 3.0  # seconds that a wait may take
PATIENT = 60.0  # the same where ranks compile
RIGHT = "right"  # how a rank ends all of whose calls gave what they should

PLACES = ("shared", "shared", "shared", "hosts", "hosts", "compile")
"""Where ranks are, drawn by chance: on one host, on two, or on one where they compile."""

_LONGEST = {
    "init": 0.04,
    "meeting": 0.5,
    "calls": 0.15,
    "close": 0.01,
}  # seconds into a phase after which it goes wrong


class Trial(NamedTuple):
    """What happens, all of which follows from the seed."""

    seed: int
    kind: str
    place: str  # one of PLACES
    ranks: int
    by: str  # world, or group: a process group of torch.distributed
    victim: int
    phase: str  # init, calls or close
    call: int  # at which the victim itself does it
    delay: float  # seconds from the beginning of the phase until it is done to the victim
    busy: bool  # whether other processes keep all cores busy

    @property
    def limit(self) -> float:
        return PATIENT if self.place == "compile" or self.seed < 0 else LIMIT

    @property
    def again(self) -> str:
        """What `make storm` is told to make this trial once more."""
        return f"KIND={self.kind} SEED={self.seed} PLACES={self.place} TRIALS=1"

    def __str__(self) -> str:
        where = f"{self.ranks} ({self.place}, by {self.by}{', busy' if self.busy else ''})"
        return f"{self.again}: rank {self.victim} of {where}, {1e3 * self.delay:.1f} ms into {self.phase} or at call {self.call}"


class Kind(NamedTuple):
    """Something that goes wrong, and how ranks may end then: RIGHT, or by an exception of this
    name, "exit 3" or "signal 9".
    """

    play: Callable[[Any], None]  # what each rank does, given what it has of the trial (`Part`)
    others: tuple[str, ...] = (RIGHT,)  # endings that ranks other than the victim are owed
    victim: tuple[str, ...] | None = (RIGHT,)  # those that the victim is; None: any
    strike: Callable[[Any], AbstractContextManager[None]] | None = (
        None  # done by the storm itself until the others have ended
    )
    places: tuple[str, ...] = ("shared",)
    phases: tuple[str, ...] = ("calls",)  # in one of which it strikes
    by: tuple[str, ...] = ("world",)
    ranks: tuple[int, ...] = (2, 2, 3)
    hidden: bool = False  # whether nothing shows it before the time limit
    named: bool = True  # whether an error has to name the victim
    alone: bool = False  # whether ranks meet by themselves, not by a group that is there
    apart: bool = False  # whether each rank is in a pid namespace of its own
    why_not: Callable[[], str] = str  # why there cannot be such trials here, or nothing


def trial_of(seed: int, name: str, kind: Kind, places: tuple[str, ...]) -> Trial:
    """The trial of this kind with this seed, in one of these places."""
    place = random.Random(seed).choice([place for place in places if place in kind.places])
    draw = random.Random(
        f"{seed} {name}"
    )  # so that it is the same trial where its place is the only one to choose
    ranks = {"hosts": draw.choice((2, 4)), "compile": 2, "shared": draw.choice(kind.ranks)}[place]
    phase = draw.choice(
        ["calls" if place == "compile" and each == "init" else each for each in kind.phases]
    )
    by = draw.choice(kind.by if place == "shared" else kind.by[:1])
    delay = draw.uniform(0, _LONGEST[phase]) * (4 if place == "hosts" else 1)
    busy = draw.random() < 0.1 and place != "compile"
    return Trial(
        seed, name, place, ranks, by, draw.randrange(ranks), phase, draw.randrange(12), delay, busy
    )
