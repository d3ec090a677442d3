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
    from weft.world.peers import Peers

PLACE = "\0at "
"""The beginning of a note with a place."""
_ANSWERS = 0.5
"""Seconds within which a peer that makes another call, and so waits too, sends its place."""


def add(world: Peers, error: BaseException, culprit: int | None) -> None:
    """Add the lines, once, to an error that has closed a world; `culprit` is the rank that caused
    it, if that is another one.
    """
    if not isinstance(error, WeftError) or error.detailed:
        return
    error.detailed = True
    if isinstance(error, MismatchError):
        _add_places(world, error)
        if len(error.calls) == 2 and (advice := cure(error.calls, world.ranks)):
            error.add(advice)
    elif isinstance(error, PeerLost) and culprit is not None:
        _add_calls(world, error, culprit)
    elif isinstance(error, PeerTimeout) and (place := places.here()):
        error.add(f"rank {world.rank} is at {place}")


def _add_calls(world: Peers, error: PeerLost, lost: int) -> None:
    others = (rank for rank in range(world.ranks) if rank != lost)
    error.reporter = world.global_ranks[next(others)]
    place = places.here()
    where = [f"rank {world.rank} is at {place}"] if place else []
    error.add("; ".join([*where, f"rank {lost} {_latest(world, lost)}"]))
    if error.how == "closed its world":
        error.add(
            f"likely cause: rank {lost} makes fewer calls, as with fewer batches, or by a return, "
            "break or sys.exit that other ranks do not reach"
        )


def _latest(world: Peers, rank: int) -> str:
    """How far a rank has come."""
    executor = getattr(world, "executor", None)
    made = executor.made_calls(rank) if executor else []
    if not made:
        return "had made no call" + " with this host" * (not world.hosts.here(rank))
    number, _, ended, _ = made[-1]
    # whether a call of a rank on another host has ended is unknown
    state = "ended" if ended else "begun"
    return f"had {state} call {number}"


def _add_places(world: Peers, error: MismatchError) -> None:
    """Add to the calls of both ranks where they are made, as far as these ranks tell in time."""
    error.reporter = world.global_ranks[min(error.calls, default=world.rank)]
    if world.rank not in error.calls:
        return
    world.places[world.rank] = places.here()
    local = [peer for peer in world.others if world.hosts.here(peer)]
    for peer in local:  # to all, since others may show this rank's call beside theirs
        with contextlib.suppress(OSError):
            world.mesh.send(peer, f"{PLACE}{world.places[world.rank]}", None)
    error.locate(
        {rank: _place_of(world, rank) for rank in error.calls if rank in (world.rank, *local)}
    )


def _place_of(world: Peers, peer: int) -> str:
    """The place of a rank, "" if it does not send it in time."""
    deadline = time.monotonic() + _ANSWERS
    while peer not in world.places and time.monotonic() < deadline:
        status, (note, _) = world.mesh.receive(peer, 0.0)
        if status == _native.WaitStatus.none:
            world.keep_place(peer, note)
        else:  # none yet, and the world has failed
            time.sleep(0.005)
    return world.places.get(peer, "")
