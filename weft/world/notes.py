"""Notes and files that ranks send each other by the sockets of their world."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import weft._native as _native
from weft.errors import SymmetricMemoryError, WeftError
from weft.world.failure import Failure
from weft.world.placement import Placement


class Notes:
    """The notes and files between a rank and its peers. A failure closes the world, since peers
    continue; the phrase `doing` names the purpose in errors.
    """

    def __init__(self, placement: Placement, mesh: _native.Mesh, failure: Failure) -> None:
        self.placement = placement
        self.mesh = mesh
        self.failure = failure

    def send_to_all(self, note: str, file: _native.File | None, doing: str) -> None:
        """Send every peer a note, and those of this host a file if there is one."""
        hosts = self.placement.hosts
        for peer in filter(hosts.here, self.placement.others):
            self.send(peer, note, file, doing)
        if hosts.several:
            self.mesh.publish(note)

    def send(self, peer: int, note: str, file: _native.File | None, doing: str) -> None:
        """Send a peer of this host a note, and a file if there is one."""
        try:
            self.mesh.send(peer, note, file)
        except OSError as error:
            raise self.failure.fail(
                WeftError(f"rank {self.placement.rank} cannot send to rank {peer} {doing}: {error}")
            ) from None

    def receive(
        self,
        peer: int,
        doing: str,
        late: str,
        timeout: float,
        look: Callable[[], None] = lambda: None,
    ) -> tuple[str, _native.File | None]:
        """A peer's note, and its file if it sent one. The phrase `late` describes the wait in the
        error for one that has taken `timeout`.

        `look` is called while nothing has arrived, and may raise an error.
        """
        deadline = _native.Deadline(timeout)
        while True:
            # returns soon, so that signals are handled
            status, (note, file) = self.mesh.receive(peer, 0.05)
            if status == _native.WaitStatus.none:
                if not self.failure.keep_place(peer, note):
                    return note, file
                continue
            look()
            if status == _native.WaitStatus.failed:
                raise self.failure.reported(doing)
            if status == _native.WaitStatus.left:
                raise self.failure.lost(peer, "closed its world", doing)
            if deadline.passed:
                raise self.failure.timed_out(late, peer, "has not made the call", timeout)

    def attach(
        self, peer: int, file: _native.File | None, size: int, doing: str
    ) -> _native.Mapping:
        """A peer's part of a segment, mapped from the file that it sent."""
        try:
            if file is None:  # the kernel delivers none when this process has no free descriptor
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return _native.attach_mapping(file, size)
        except OSError as error:
            raise self.failure.fail(
                SymmetricMemoryError(
                    f"{doing}: rank {self.placement.rank} cannot map the part of rank {peer}: "
                    f"{error}"
                )
            ) from None
