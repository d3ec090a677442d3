"""The mutual proof at the beginning of every connection between processes that share a key.

The caller sends the name of the key and a number that it has drawn; the listener answers with its
own number and a keyed hash of both; the caller answers with its hash, and the text `about` it that
the hash covers. Neither end sends or reads anything else before the other one has proved itself. A
key itself never travels, and what was overheard of one connection proves nothing in another.

This is mutual authentication in three passes by a keyed hash, ISO/IEC 9798-4, with HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct

_NAME = 8  # bytes of the name of a key
_NUMBER = 16
_HASH = 32
_FIRST = _NAME + _NUMBER
_SECOND = _NUMBER + _HASH


class NotProved(ConnectionError):
    """The other end has hung up, or does not have the key."""


class OtherUser(NotProved):
    """The other end belongs to a process of another `user` of this host."""

    def __init__(self, user: int) -> None:
        super().__init__(f"a process of user {user}")
        self.user = user


class Peer:
    """The process at the other end of a Unix socket, which the kernel vouches for: the one that
    connected, or that listens. Of a process on another host, or in another pid namespace, nothing
    is known.

    Raises `OtherUser` if it is not `user`'s, by default this process's.
    """

    def __init__(self, connection: socket.socket, user: int | None = None) -> None:
        self._process = -1
        self._ended = False
        if connection.family != socket.AF_UNIX:
            return
        option = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, found, _ = struct.unpack("3i", option)
        if found != (os.getuid() if user is None else user):
            raise OtherUser(found)
        if pid > 0 and pid != os.getpid():
            try:
                self._process = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended = True
            except OSError:  # a kernel before 5.3, or no free descriptor
                pass

    @property
    def ended(self) -> bool:
        """Whether the process has ended, for certain; a forked child may have its sockets still."""
        if self._process >= 0 and not self._ended:
            poll = select.poll()
            poll.register(self._process, select.POLLIN)
            self._ended = bool(poll.poll(0))
        return self._ended

    def polled(self) -> list[tuple[int, int]]:
        """The descriptor and the event that signal its end."""
        return [(self._process, select.POLLIN)] if self._process >= 0 else []

    def close(self) -> None:
        if self._process >= 0:
            os.close(self._process)
            self._process = -1


class _End:
    """One end of a non-blocking `connection` that is being proved: `proved` once both ends are."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.proved = False
        self._received = b""

    def _receive(self, size: int) -> bool:
        """Whether the next message, of `size` bytes, has arrived; no byte beyond it is read."""
        try:
            more = self.connection.recv(size - len(self._received))
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            more = b""
        if not more:
            raise NotProved("the other end has hung up")
        self._received += more
        return len(self._received) == size

    def _send(self, message: bytes) -> None:
        try:
            sent = self.connection.send(message)
        except (BlockingIOError, ConnectionError):
            sent = 0
        if sent != len(message):  # no socket is too full for the first bytes that it is given
            raise NotProved("the other end has hung up")


class Caller(_End):
    """The end of a connection, made already, whose process has opened it."""

    def __init__(self, connection: socket.socket, key: bytes, about: bytes = b"") -> None:
        super().__init__(connection)
        self._key, self._about = key, about
        self._first = name_of(key) + secrets.token_bytes(_NUMBER)
        self._send(self._first)

    def advance(self) -> bool:
        """Proceed without blocking; `proved`. Raises `NotProved`, or another `OSError`."""
        if not self.proved and self._receive(_SECOND):
            number, theirs = self._received[:_NUMBER], self._received[_NUMBER:]
            if not hmac.compare_digest(theirs, _hash(self._key, b"listener", self._first, number)):
                raise NotProved("the other end does not have the key")
            own = _hash(self._key, b"caller", self._first, number, self._about)
            self._send(own + self._about)
            self.proved = True
        return self.proved


class Accepted(_End):
    """The end of a connection whose process has accepted it; `about` is of that many bytes."""

    def __init__(self, connection: socket.socket, about: int = 0) -> None:
        super().__init__(connection)
        self._size = about
        self._first = self._number = b""
        self.about = b""

    @property
    def key_name(self) -> bytes:
        """The name of the caller's key, empty before it has arrived."""
        return self._first[:_NAME]

    def named(self) -> bool:
        """Whether the caller has named its key. Raises as `advance`."""
        if not self._first and self._receive(_FIRST):
            self._first, self._received = self._received, b""
        return bool(self._first)

    def advance(self, key: bytes) -> bool:
        """As `Caller.advance`, by a key that must be the one which the caller has named."""
        if not self.named():
            return False
        if not self._number:
            if self.key_name != name_of(key):
                raise NotProved("the other end has another key")
            self._number = secrets.token_bytes(_NUMBER)
            self._send(self._number + _hash(key, b"listener", self._first, self._number))
        if not self.proved and self._receive(_HASH + self._size):
            theirs, self.about = self._received[:_HASH], self._received[_HASH:]
            own = _hash(key, b"caller", self._first, self._number, self.about)
            if not hmac.compare_digest(theirs, own):
                raise NotProved("the other end does not have the key")
            self.proved = True
        return self.proved


def name_of(key: bytes) -> bytes:
    """A name that does not reveal the key."""
    return hashlib.sha256(b"name" + key).digest()[:_NAME]


def _hash(key: bytes, end: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, end + b"".join(parts), "sha256")
