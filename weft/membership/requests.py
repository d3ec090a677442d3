"""Requests to ranks while they agree on the next world, and the answers: a client sends requests to
an endpoint, whose rank answers.

Both ends first prove that they have the key of the endpoint (`weft.bootstrap.handshake`). A message
is its length and JSON.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from weft.bootstrap.endpoint import key
from weft.bootstrap.handshake import OtherUser, Peer
from weft.bootstrap.listener import UNPROVED, Address, Listener, Unproved
from weft.bootstrap.opening import Opening
from weft.bootstrap.wire import LONGEST, convert, decode, encode
from weft.errors import WeftError
from weft.membership.decision import Decision
from weft.membership.view import Answer, Request

_LENGTH = struct.Struct("<I")
_PACKET = 1 << 15  # bytes sent at a time: a packet of a Unix socket is read as a whole
_STALLED = 2.0  # seconds after which a process that accepts no message is given up
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT)
_AGAIN = 0.005  # seconds until a rank whose connection has ended is called again
_AGAIN_REFUSED = 0.1  # … if it was refused


class Connection:
    """A connection from which messages are read as they arrive. `ended` once the other end has
    closed it or sent an unreadable message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ended = False
        self._read = bytearray()

    def send(self, message: object) -> None:
        """Send a message; a process that does not accept it is given up."""
        body = encode(message)
        data = memoryview(_LENGTH.pack(len(body)) + body)
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
        while not self.ended and len(self._read) <= LONGEST:
            try:
                more = self.connection.recv(2 * _PACKET)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                more = b""
            self._read += more
            self.ended = not more
        found = list[bytes]()
        at = 0
        while len(self._read) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._read, at)
            end = at + _LENGTH.size + size
            if size > LONGEST:
                self.ended = True
                break
            if len(self._read) < end:
                break
            found.append(bytes(self._read[at + _LENGTH.size : end]))
            at = end
        del self._read[:at]
        return found

    def close(self) -> None:
        self.connection.close()


class Client(Connection):
    """A connection that this process opens to a rank's endpoint, which on this host `user` has
    opened: `connected` once both are proved, `refused` if nothing listens there, or the process has
    ended.
    """

    def __init__(self, address: Address, user: int | None = None) -> None:
        self._opening = Opening(address, key(address), user=user)
        super().__init__(self._opening.socket)
        self.connected = False
        self.refused = False
        self.again = 0.0  # the time at which a call that has ended may be made again

    def advance(self) -> bool:
        """Proceed without blocking; whether it is connected now and was not before."""
        if self.connected or self.ended:
            return False
        try:
            self.connected = self._opening.advance()
        except OtherUser:  # who has taken the name: it was free
            self._end(refused=True)
        except OSError as error:
            refused = error.errno in _REFUSED
            self._end(refused, _AGAIN_REFUSED if refused else _AGAIN)
        return self.connected

    def _end(self, refused: bool = False, again: float = _AGAIN) -> None:
        self.ended = True
        self.refused = self.refused or refused
        self.again = time.monotonic() + again

    def answers(self) -> list[Answer]:
        """The answers that have arrived."""
        found = list[Answer]()
        for message in self.receive() if self.connected else ():
            try:
                answer = decode(message, Answer)
                if answer.decision is not None:
                    answer = answer._replace(decision=convert(Decision, answer.decision))
            except ValueError:
                self.ended = True
            else:
                found.append(answer)
        if self._opening.ended:
            self._end(refused=True)
        return found

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        return [] if self.ended else self._opening.polled()

    def close(self) -> None:
        self._opening.close()


class Requester(Connection):
    """A connection of a process that has the key of an endpoint, which it has proved: its latest
    `request`, None before the first.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.request: Request | None = None
        self._process = Peer(connection)

    def update(self) -> bool:
        """Read what has arrived; whether there is a new request."""
        messages = self.receive()
        for message in messages:
            try:
                self.request = decode(message, Request)
            except ValueError:
                self.ended = True
        self.ended = self.ended or self._process.ended
        return bool(messages) and not self.ended

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        return [(self.connection.fileno(), select.POLLIN), *self._process.polled()]

    def close(self) -> None:
        super().close()
        self._process.close()


class Requesters:
    """The processes of this user that are connected to an endpoint's `listeners`: `all` of them."""

    def __init__(self, listeners: Sequence[Listener], ranks: int = 0) -> None:
        self.all = list[Requester]()
        self._unproved = [Unproved(each, _key_of(each), 0) for each in listeners]
        for each in self._unproved:
            each.most = UNPROVED + ranks

    def requested(self) -> list[Requester]:
        """Accept waiting connections and drop closed ones; those with a new request. Raises
        `WeftError` if this process lacks file descriptors.
        """
        for unproved in self._unproved:
            try:
                proved = unproved.proved()
            except OSError as error:
                raise WeftError(f"this process can accept no connection: {error}") from error
            for accepted in proved:
                try:
                    self.all.append(Requester(accepted.connection))
                except OtherUser:
                    accepted.connection.close()
        found = [each for each in self.all if each.update()]
        for each in [each for each in self.all if each.ended]:
            self.all.remove(each)
            each.close()
        return found

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        unproved = [each for one in self._unproved for each in one.polled()]
        return [*unproved, *(each for requester in self.all for each in requester.polled())]

    def close(self) -> None:
        for each in self._unproved:
            each.drop()
        for requester in self.all:
            requester.close()
        self.all.clear()


def _key_of(listener: Listener) -> Callable[[], bytes]:
    return lambda: key(listener.address)
