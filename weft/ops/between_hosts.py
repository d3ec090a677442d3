"""One-sided calls to a rank on another host, which takes no part in them: requests to its network
(`native/hosts/regions.hpp`).

A call returns once the peer has answered all its requests, so it is complete there, and all
guarantees of docs/memory-model.md hold between hosts as well.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import weft._native as _native
from weft.engines.ranges import in_range
from weft.errors import PeerTimeout, WeftError
from weft.world.peers import Peers

if TYPE_CHECKING:
    from weft.world.signals import Signals

_NOTICED = 0.5  # seconds until the world has noticed why a peer hung up


class RemoteChange:
    """A checked change of a peer's counters: an addition, or that they are set."""

    __slots__ = ("_world", "native", "peer")

    def __init__(
        self, signals: Signals, op: str, peer: int, selection: tuple[int, int, int], value: int
    ) -> None:
        self._world, self.peer = signals.world, peer
        self.native = _native.RemoteChange(signals.memory, op == "set", *selection, value)

    def __call__(self) -> bool:
        """Make the change; True, since a failure is raised."""
        world, peer = self._world, self.peer
        with in_range("notify"):
            status = _regions(world).change(peer, self.native, world.timeout)
        if status != _native.WaitStatus.none:
            raise _error(world, peer, status, f"to notify rank {peer}")
        return True


def put(
    world: Peers,
    peer: int,
    copy: _native.RemoteCopy,
    tensors: object,
    description: object,
    after: RemoteChange | None = None,
) -> None:
    """Make a put of these tensors, and then the change, if there is one. `description` is printed
    in errors.
    """
    change = None if after is None else after.native
    with in_range("put"):
        status = _regions(world).put(peer, copy, change, world.timeout, tensors)
    if status != _native.WaitStatus.none:
        raise _error(world, peer, status, f"to make a {description}")


def get(
    world: Peers, peer: int, copy: _native.RemoteCopy, tensors: object, description: object
) -> None:
    """Make a get, as `put`."""
    with in_range("get"):
        status = _regions(world).get(peer, copy, world.timeout, tensors)
    if status != _native.WaitStatus.none:
        raise _error(world, peer, status, f"to make a {description}")


def _regions(world: Peers) -> _native.Regions:
    assert world.network is not None
    assert world.network.regions is not None
    return world.network.regions


def _error(world: Peers, peer: int, status: _native.WaitStatus, doing: str) -> WeftError:
    """The error for requests that have ended with a status other than `none`; the phrase `doing` is
    what they waited for. Closes the world.
    """
    if status == _native.WaitStatus.timeout:
        return world.fail(
            PeerTimeout(
                f"rank {world.rank} waited {world.timeout:g} s {doing}: the host of "
                f"{world.name_of(peer)} does not answer; is that process suspended, or the network "
                "down?"
            )
        )
    deadline = time.monotonic() + _NOTICED
    while not (_failed(world) or world.mesh.left(peer)) and time.monotonic() < deadline:
        time.sleep(0.001)
    if _failed(world):
        return world.failure(doing)
    world.check()
    return world.lost(peer, "closed its world", doing)


def _failed(world: Peers) -> bool:
    return bool(world.mesh.failure()[0])
