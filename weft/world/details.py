"""The lines below an error that blames a peer: where the ranks are in the user's program, how many
calls a lost one has made, and the likely cause.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import weft._native as _native
from weft.differences import cure
from weft.errors import MismatchError, PeerLost, PeerTimeout, WeftError
from weft.world import places

if TYPE_CHECKING:
    from weft.world.failure import Failure

PLACE = "\0at "
"""The beginning of a note with a place."""
_ANSWERS = 0.5
"""Seconds within which a peer that makes another call, and so waits too, sends its place."""


def add(failure: Failure, error: BaseException, culprit: int | None) -> None:
    """Add the lines, once, to an error that has closed a world; `culprit` is the rank that caused
    it, if that is another one.
    """
    if not isinstance(error, WeftError) or error.detailed:
        return
    error.detailed = True
    if isinstance(error, MismatchError):
        _add_places(failure, error)
        if len(error.calls) == 2 and (advice := cure(error.calls, failure.placement.ranks)):
            error.add(advice)
    elif isinstance(error, PeerLost) and culprit is not None:
        _add_calls(failure, error, culprit)
    elif isinstance(error, PeerTimeout) and (place := places.here()):
        error.add(f"rank {failure.placement.rank} is at {place}")


def _add_calls(failure: Failure, error: PeerLost, lost: int) -> None:
    of = failure.placement
    others = (rank for rank in range(of.ranks) if rank != lost)
    error.reporter = of.global_ranks[next(others)]
    place = places.here()
    where = [f"rank {of.rank} is at {place}"] if place else []
    error.add("; ".join([*where, f"rank {lost} {_latest(failure, lost)}"]))
    if error.how == "closed its world":
        error.add(
            f"likely cause: rank {lost} makes fewer calls, as with fewer batches, or by a return, "
            "break or sys.exit that other ranks do not reach"
        )


def _latest(failure: Failure, rank: int) -> str:
    """How far a rank has come."""
    made = failure.executor.made_calls(rank) if failure.executor else []
    if not made:
        return "had made no call" + " with this host" * (not failure.placement.hosts.here(rank))
    number, _, ended, _ = made[-1]
    # whether a call of a rank on another host has ended is unknown
    state = "ended" if ended else "begun"
    return f"had {state} call {number}"


def _add_places(failure: Failure, error: MismatchError) -> None:
    """Add to the calls of both ranks where they are made, if these ranks report it in time."""
    of = failure.placement
    error.reporter = of.global_ranks[min(error.calls, default=of.rank)]
    if of.rank not in error.calls:
        return
    here = failure.places[of.rank] = places.here()
    local = [peer for peer in of.others if of.hosts.here(peer)]
    for peer in local:  # to all, since others may show this rank's call beside theirs
        with contextlib.suppress(OSError):
            failure.mesh.send(peer, f"{PLACE}{here}", None)
    error.locate(
        {rank: _place_of(failure, rank) for rank in error.calls if rank in (of.rank, *local)}
    )


def _place_of(failure: Failure, peer: int) -> str:
    """The place of a rank, "" if it does not send it in time."""
    deadline = time.monotonic() + _ANSWERS
    while peer not in failure.places and time.monotonic() < deadline:
        status, (note, _) = failure.mesh.receive(peer, 0.0)
        if status == _native.WaitStatus.none:
            failure.keep_place(peer, note)
        else:  # none yet, and the world has failed
            time.sleep(0.005)
    return failure.places.get(peer, "")
