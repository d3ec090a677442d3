"""A trial: the fault, its moment and place, all derived from its seed, and the allowed endings of
the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

LIMIT = 3.0  # seconds that a wait may take
PATIENT = 60.0  # seconds that a wait may take where ranks compile
RIGHT = "right"  # the ending of a rank all of whose calls gave the right results

PLACES = ("shared", "shared", "shared", "hosts", "hosts", "compile")
"""Places of the ranks, drawn at random: one host, two hosts, or one host with compiled calls."""

# the latest moment of a fault, in seconds after its phase begins
_LONGEST = {
    "init": 0.04,
    "meeting": 0.5,
    "calls": 0.15,
    "close": 0.01,
}


class Trial(NamedTuple):
    """The parameters of a trial, all derived from its seed."""

    seed: int
    kind: str
    place: str  # one of PLACES
    ranks: int
    by: str  # world, or group: a process group of torch.distributed
    victim: int
    phase: str  # init, calls or close
    call: int  # the number of the call at which the victim itself has the fault
    delay: float  # seconds from the beginning of the phase to a fault that the storm causes
    busy: bool  # whether other processes keep all cores busy

    @property
    def limit(self) -> float:
        return PATIENT if self.place == "compile" or self.seed < 0 else LIMIT

    @property
    def again(self) -> str:
        """The arguments of `make storm` that repeat this trial."""
        return f"KIND={self.kind} SEED={self.seed} PLACES={self.place} TRIALS=1"

    def __str__(self) -> str:
        where = f"{self.ranks} ({self.place}, by {self.by}{', busy' if self.busy else ''})"
        return f"{self.again}: rank {self.victim} of {where}, {1e3 * self.delay:.1f} ms into {self.phase} or at call {self.call}"


class Kind(NamedTuple):
    """A kind of fault, and the allowed endings of the ranks: RIGHT, or an exception's name, "exit
    3" or "signal 9".
    """

    play: Callable[[Any], None]  # the part that each rank plays
    others: tuple[str, ...] = (RIGHT,)  # allowed endings of ranks other than the victim
    victim: tuple[str, ...] | None = (RIGHT,)  # allowed endings of the victim; None: any
    strike: Callable[[Any], AbstractContextManager[None]] | None = (
        None  # the fault that the storm causes, until the other ranks have ended
    )
    places: tuple[str, ...] = ("shared",)
    phases: tuple[str, ...] = ("calls",)  # the phases in which the fault may occur
    by: tuple[str, ...] = ("world",)
    ranks: tuple[int, ...] = (2, 2, 3)
    hidden: bool = False  # whether the fault shows only by the time limit
    named: bool = True  # whether an error has to name the victim
    alone: bool = False  # whether ranks find each other themselves, without a group made earlier
    own_pids: bool = False  # whether each rank has a pid namespace of its own
    # the reason why such trials are impossible here, or an empty text
    why_not: Callable[[], str] = str


def trial_of(seed: int, name: str, kind: Kind, places: tuple[str, ...]) -> Trial:
    """The trial of this kind with this seed, in one of `places`."""
    place = random.Random(seed).choice([place for place in places if place in kind.places])
    # independent of `places`: a trial repeated with its own place alone stays the same
    draw = random.Random(f"{seed} {name}")
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
