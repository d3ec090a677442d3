"""A connection that is being opened."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterable

from weft.bootstrap.handshake import Caller, Peer
from weft.bootstrap.listener import Address, nonblocking

_IN_PROGRESS = (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN)


class Opening:
    """A connection that this process opens to an `address`, without waiting: `started` unless the
    listener's backlog is full, `proved` once both ends have proved that they have `key`, to which
    this one adds a text `about` itself. On this host the listener must be `user`'s, by default this
    process's.
    """

    def __init__(
        self, address: Address, key: bytes, about: bytes = b"", user: int | None = None
    ) -> None:
        self.address = address
        self.socket = nonblocking(address.family)
        self.started = False
        self.proved = False
        self._key, self._about, self._user = key, about, user
        self._proof: Caller | None = None
        self._process: Peer | None = None

    def advance(self) -> bool:
        """Proceed without blocking; `proved`. Raises `OtherUser`, `NotProved`, or another
        `OSError`.
        """
        if self.ended:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the process has ended")
        if self._proof is None:
            code = self.socket.connect_ex(self.address.at)
            self.started = code != errno.EAGAIN
            if code in _IN_PROGRESS:
                return False
            if code not in (0, errno.EISCONN):
                raise OSError(code, os.strerror(code))
            self._process = Peer(self.socket, self._user)
            self._proof = Caller(self.socket, self._key, self._about)
        self.proved = self._proof.advance()
        return self.proved

    @property
    def reached(self) -> bool:
        """Whether somebody listens at the address."""
        return self._proof is not None

    @property
    def ended(self) -> bool:
        """Whether the process that listens has ended, for certain."""
        return self._process is not None and self._process.ended

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll: writable, or readable once it is connected; and the
        end of the process that listens.
        """
        if not self.started:
            return []
        event = select.POLLOUT if self._proof is None else select.POLLIN
        process = self._process.polled() if self._process is not None else []
        return [(self.socket.fileno(), event), *process]

    def detach(self) -> socket.socket:
        """The connection, without what is needed while it is opened."""
        if self._process is not None:
            self._process.close()
            self._process = None
        return self.socket

    def close(self) -> None:
        self.detach().close()


def poll(events: Iterable[tuple[int, int]], seconds: float) -> set[int]:
    """The descriptors that are ready within `seconds`."""
    poll = select.poll()
    for descriptor, event in events:
        poll.register(descriptor, event)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}
