"""One-sided calls to a rank on another host, which takes no part in them: requests to its network
(`native/hosts/regions.hpp`).

A put or get returns once the peer has answered all its requests, so it is complete there. A notify
may still be in flight when it returns, ordered after all puts of this rank to that peer; a notify
of another rank, or a barrier, first waits until it has arrived. So all guarantees of
docs/memory-model.md hold between hosts as well.
"""

from __future__ import annotations

import time

from torch import Tensor

import weft._native as _native
from weft.engines.ranges import in_range
from weft.errors import PeerTimeout, WeftError
from weft.world import World
from weft.world.signals import LARGEST, Signals

_NOTICED = 0.5  # seconds until the world has noticed why a peer hung up

notified: set[int] = set()
"""The numbers of the worlds in which notifies of this process to other hosts may still be in
flight.
"""


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
            status, culprit = _regions(world).change(peer, self.native, world.timeout)
        notified.add(world.number)
        if status != _native.WaitStatus.none:
            raise _error(world, culprit, status, f"to notify rank {peer}")
        return True


def put(
    world: World,
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
        status, culprit = _regions(world).put(peer, copy, change, world.timeout, tensors)
    if after is not None:
        notified.add(world.number)
    if status != _native.WaitStatus.none:
        raise _error(world, culprit, status, f"to make a {description}")


def get(
    world: World, peer: int, copy: _native.RemoteCopy, tensors: object, description: object
) -> None:
    """Make a get, as `put`."""
    with in_range("get"):
        status, culprit = _regions(world).get(peer, copy, world.timeout, tensors)
    if status != _native.WaitStatus.none:
        raise _error(world, culprit, status, f"to make a {description}")


def put_notify_at_once(
    dst: Tensor, src: Tensor, signals: Signals, index: object, peer: object, op: str, value: object
) -> bool:
    """Make a `put_notify` of one counter; False, with nothing done, if the peer is on this host, or
    an argument is wrong.
    """
    if not (
        type(signals) is Signals
        and type(index) is type(peer) is type(value) is int
        and 0 <= index < len(signals)
        and 0 <= value <= LARGEST
        and op in ("add", "set")
    ):
        return False
    world = signals.world
    world.failure.check()
    if world.network is None:
        return False
    ended = _native.put_notify_at_once(
        dst, src, signals.array, index, peer, op == "set", value, _regions(world), world.timeout
    )
    if ended is None:
        return False
    notified.add(world.number)
    status, culprit = ended
    if status != _native.WaitStatus.none:
        raise _error(world, culprit, status, f"to put and notify rank {peer}")
    return True


def flush(world: World, doing: str) -> None:
    """Return once all notifies of this rank have arrived on other hosts; the phrase `doing` names
    the purpose in errors.
    """
    if world.number not in notified:
        return
    notified.discard(world.number)
    try:
        status, culprit = _regions(world).settle(world.timeout)
    except BaseException:
        notified.add(world.number)
        raise
    if status != _native.WaitStatus.none:
        raise _error(world, culprit, status, doing)


def _regions(world: World) -> _native.Regions:
    assert world.network is not None
    assert world.network.regions is not None
    return world.network.regions


def _error(world: World, peer: int, status: _native.WaitStatus, doing: str) -> WeftError:
    """The error for requests that have ended with a status other than `none`; the phrase `doing` is
    what they waited for. Closes the world.
    """
    if status == _native.WaitStatus.timeout:
        return world.failure.fail(
            PeerTimeout(
                f"rank {world.rank} waited {world.timeout:g} s {doing}: the host of "
                f"{world.placement.name_of(peer)} does not answer; is that process suspended, or "
                "the network down?"
            )
        )
    deadline = time.monotonic() + _NOTICED
    while not (_failed(world) or world.mesh.left(peer)) and time.monotonic() < deadline:
        time.sleep(0.001)
    if _failed(world):
        return world.failure.reported(doing)
    world.failure.check()
    return world.failure.lost(peer, "closed its world", doing)


def _failed(world: World) -> bool:
    return bool(world.mesh.failure()[0])
