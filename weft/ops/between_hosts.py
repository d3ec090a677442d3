"""One-sided calls to a rank on another host, which takes no part in them: requests to its relay.

A call returns once the peer's relay has answered all its requests, so it is complete there, and all
guarantees of docs/memory-model.md hold between hosts as well. It has at most `_WINDOW` requests
under way, each of a piece of the data, so no more is in memory than these pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import weft._native as _native
from weft.engines.ranges import in_range
from weft.errors import PeerTimeout
from weft.world.memory import find
from weft.world.peers import Peers
from weft.world.remote import PIECE, Answers, Array, StridedLayout

if TYPE_CHECKING:
    from weft.world.signals import Signals

_WINDOW = 16  # requests of a call under way
_LOOK = 0.05  # seconds after which a waiting call looks for failures, and Python handles signals
_NOTICED = 0.5  # seconds until the world has noticed why a peer hung up


class RemoteCopy:
    """A checked copy between `local` and the counterpart that `peer`, on another host, has of
    `remote`.
    """

    def __init__(self, put: bool, remote: Tensor, local: Tensor, peer: int) -> None:
        self._put, self._remote, self._local, self._peer = put, remote, local, peer

    def run(self, world: Peers, doing: str, after: RemoteChange | None = None) -> None:
        """Make the copy, and then the change, if there is one."""
        with in_range("put" if self._put else "get"), _Call(world, self._peer, doing) as call:
            for layout, elements in self._pieces(world.rank):
                (call.put if self._put else call.get)(layout, elements)
            if after is not None:
                call.change(after)

    def _pieces(self, rank: int) -> Iterator[tuple[StridedLayout, Array]]:
        if not self._local.numel():
            return
        segment = find(self._remote)
        assert segment is not None
        base = segment.base(rank)
        for remote, local in _cut(_elements(self._remote), _elements(self._local)):
            place = remote.__array_interface__["data"][0] - base
            yield (
                StridedLayout(segment.number, place, remote.itemsize, remote.shape, remote.strides),
                local,
            )


class RemoteChange:
    """A checked change of a peer's counters: an addition, or that they are set."""

    def __init__(
        self, signals: Signals, op: str, peer: int, selection: tuple[int, int, int], value: int
    ) -> None:
        self.signals, self.op, self.peer = signals, op, peer
        self.selection, self.value = selection, value

    def __call__(self) -> bool:
        """Make the change; True, since a failure is raised."""
        doing = f"to notify rank {self.peer}"
        with in_range("notify"), _Call(self.signals.world, self.peer, doing) as call:
            call.change(self)
        return True


class _Call:
    """The requests of one call, and the wait for their answers at its end. The phrase `doing` is
    what the call waits for, in errors.
    """

    def __init__(self, world: Peers, peer: int, doing: str) -> None:
        assert world.relay is not None
        self._world, self._peer, self._doing = world, peer, doing
        self._relay, self._remote = world.relay, world.relay.remote
        self._answers = Answers()
        self._requests: list[int] = []
        self._answered = 0

    def __enter__(self) -> _Call:
        self._check()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            while kind is None and self._answered < len(self._requests):
                self._answer()
        finally:
            self._remote.forget(self._requests)

    def put(self, target: StridedLayout, source: Array) -> None:
        self._admit()
        self._requests.append(self._remote.put(self._peer, target, source, self._answers))

    def get(self, source: StridedLayout, place: Array) -> None:
        self._admit()
        self._requests.append(self._remote.get(self._peer, source, place, self._answers))

    def change(self, change: RemoteChange) -> None:
        self._admit()
        self._requests.append(
            self._remote.change(
                self._peer,
                change.signals.memory,
                change.op,
                change.selection,
                change.value,
                self._answers,
            )
        )

    def _admit(self) -> None:
        """Wait until the call may make another request."""
        while len(self._requests) - self._answered >= _WINDOW:
            self._answer()

    def _answer(self) -> None:
        """Wait for the next answer."""
        deadline = _native.Deadline(self._world.timeout)
        while True:
            try:
                self._answers.get(timeout=_LOOK)
                break
            except Empty:
                self._check()
            if deadline.passed:
                raise self._world.fail(
                    PeerTimeout(
                        f"rank {self._world.rank} waited {self._world.timeout:g} s {self._doing}: "
                        f"the host of {self._world.name_of(self._peer)} does not answer; is that "
                        "process suspended, or the network down?"
                    )
                )
        self._answered += 1

    def _check(self) -> None:
        """Raise the error for a world that has failed or is closed, or a peer that is gone."""
        world, peer = self._world, self._peer
        hung_up = self._relay.gone(peer)
        deadline = time.monotonic() + _NOTICED
        while hung_up and not (_failed(world) or world.mesh.left(peer)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if _failed(world):
            raise world.failure(self._doing)
        world.check()
        if hung_up:
            raise world.lost(peer, "closed its world", self._doing)


def _failed(world: Peers) -> bool:
    return bool(world.mesh.failure()[0])


def _elements(tensor: Tensor) -> Array:
    """The elements of a tensor, as bytes of their size; it keeps the memory."""
    storage = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    item = tensor.itemsize
    return np.ndarray(
        tuple(tensor.shape),
        f"V{item}",
        storage.numpy(),
        int(tensor.storage_offset()) * item,
        [stride * item for stride in tensor.stride()],
    )


def _cut(remote: Array, local: Array) -> Iterator[tuple[Array, Array]]:
    """Parts of both of at most `PIECE` bytes, in the order of the remote elements."""
    order = sorted(range(remote.ndim), key=lambda axis: -remote.strides[axis])
    yield from _parts(remote.transpose(order), local.transpose(order))


def _parts(remote: Array, local: Array) -> Iterator[tuple[Array, Array]]:
    if remote.flags.c_contiguous and local.flags.c_contiguous:
        remote, local = remote.reshape(-1), local.reshape(-1)
    if remote.nbytes <= PIECE:
        yield remote, local
        return
    rows = PIECE // (remote.nbytes // len(remote))
    if not rows:  # not even one
        for at in range(len(remote)):
            yield from _parts(remote[at], local[at])
        return
    for at in range(0, len(remote), rows):
        yield remote[at : at + rows], local[at : at + rows]
