"""Messages at doors: a caller sends requests, those who are called answer.

A message is its length and JSON. A caller begins with the key of the door, so that only processes
with a rank's handle are heard.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
import struct
from typing import Any, NamedTuple

from weft.world.door import Handle, key
from weft.world.listener import Address, Listener, user_of
from weft.world.membership import Decision
from weft.world.wire import convert, decode, encode

_LENGTH = struct.Struct("<I")
_LONGEST = 64 << 20  # bytes of a message
_PACKET = 1 << 15  # bytes sent at a time: a packet of a Unix socket is read as a whole
_STALLED = 2.0  # seconds after which a process that takes no message is given up
_GONE = (errno.ECONNREFUSED, errno.ENOENT)


class Request(NamedTuple):
    """What a process asks of a rank: to go on with it. Its rank, -1 of a joiner, its handle in the
    next world, the joiners that it expects, and those that have called it.
    """

    version: str
    rank: int
    handle: Handle
    joiners: int
    joining: list[Handle]


class Answer(NamedTuple):
    """The answer to a request: a `decision`, or the `error` that ends the attempt, by the name of
    its class and its text; without either, that the rank is alive.
    """

    decision: Any = None
    error: str = ""
    text: str = ""


class Line:
    """A connection with a process at the other end, from which messages are read as they arrive.

    `ended` once the other end is closed, or has sent what cannot be read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ended = False
        self._read = b""

    def send(self, message: object, before: bytes = b"") -> None:
        """Send a message; a process that does not take it is given up."""
        body = encode(message)
        data = memoryview(before + _LENGTH.pack(len(body)) + body)
        self.connection.settimeout(_STALLED)
        try:
            for at in range(0, len(data), _PACKET):
                self.connection.sendall(data[at : at + _PACKET])
        except OSError:
            self.ended = True
        finally:
            self.connection.setblocking(False)

    def receive(self) -> list[bytes]:
        """The messages that have arrived completely."""
        self._fill()
        return self._messages()

    def _fill(self) -> None:
        while not self.ended:
            try:
                more = self.connection.recv(2 * _PACKET)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                more = b""
            self._read += more
            self.ended = not more

    def _messages(self) -> list[bytes]:
        found = list[bytes]()
        while len(self._read) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._read)
            end = _LENGTH.size + size
            if size > _LONGEST:
                self.ended = True
                break
            if len(self._read) < end:
                break
            found.append(self._read[_LENGTH.size : end])
            self._read = self._read[end:]
        return found

    def close(self) -> None:
        self.connection.close()


class Call(Line):
    """A connection that this process opens to a rank's door: `connected` once it is open, `gone` if
    the door refuses it, `answered` once the rank has answered.
    """

    def __init__(self, address: Address) -> None:
        kind = socket.SOCK_STREAM if address.port else socket.SOCK_SEQPACKET
        super().__init__(socket.socket(address.family, kind))
        self.connection.setblocking(False)
        self.address = address
        self.connected = False
        self.gone = False
        self.answered = False
        self._asked = False

    def advance(self) -> bool:
        """Connect as far as possible without waiting; whether it is connected now and was not
        before.
        """
        if self.connected or self.ended:
            return False
        code = self.connection.connect_ex(self.address.at)
        if code in (0, errno.EISCONN):
            self.connected = True
            return True
        self.gone = code in _GONE
        # a full backlog (EAGAIN of a Unix socket) is tried again by a new call
        self.ended = code not in (errno.EINPROGRESS, errno.EALREADY)
        return False

    def request(self, request: Request) -> None:
        """Send a request; the latest counts."""
        self.send(request, b"" if self._asked else key(self.address))
        self._asked = True

    def answers(self) -> list[Answer]:
        """The answers that have arrived."""
        found = list[Answer]()
        for message in self.receive():
            try:
                answer = decode(message, Answer)
                if answer.decision is not None:
                    answer = answer._replace(decision=convert(Decision, answer.decision))
            except ValueError:
                self.ended = True
            else:
                found.append(answer)
        self.answered = self.answered or bool(found)
        return found


class Visitor(Line):
    """A connection that a door has accepted: its latest `request`, None before the first."""

    def __init__(self, connection: socket.socket, listener: Listener) -> None:
        super().__init__(connection)
        connection.setblocking(False)
        self.key = key(listener.address)
        self.request: Request | None = None

    def hear(self) -> bool:
        """Read what has arrived; whether there is a new request."""
        self._fill()
        if self.key:
            if len(self._read) < len(self.key):
                return False
            if not hmac.compare_digest(self._read[: len(self.key)], self.key):
                self.ended = True
                return False
            self._read, self.key = self._read[len(self.key) :], b""
        messages = self._messages()
        for message in messages:
            try:
                self.request = decode(message, Request)
            except ValueError:
                self.ended = True
        return bool(messages) and not self.ended


def accept(listener: Listener) -> list[Visitor]:
    """The connections that wait at a listener, of this user's processes."""
    found = list[Visitor]()
    while True:
        try:
            connection, _ = listener.socket.accept()
        except (BlockingIOError, InterruptedError):
            return found
        except ConnectionError:  # closed again
            continue
        if user_of(connection) == os.getuid():
            found.append(Visitor(connection, listener))
        else:
            connection.close()
