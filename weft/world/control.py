"""A connection for control to a rank on another host: short messages, and the bytes that follow
some of them.

Nothing here waits. A message is sent by the caller's thread as far as the connection takes it at
once, and the rest by the relay's thread, which also receives: so a rank receives whatever it does
itself, and two ranks that send to each other cannot block each other. Urgent messages
(notes, failures, farewells) overtake others that have not begun.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from weft.errors import WeftError

Buffer = bytes | memoryview
LONGEST = 16392  # bytes of a message, without those that follow it: a letter with its two ranks
_LENGTH = struct.Struct("<I")  # of a message, in front of it
_AT_ONCE = 1 << 14  # bytes received, and copied, before it is known where they belong: a message


def shutdown(connection: socket.socket, how: int) -> None:
    """End a direction of a connection, or both, unless they have ended."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)


class Landing:
    """The place of the bytes that follow a message: `rest` is what is still to be filled; `done` is
    called once it is.
    """

    def __init__(self, place: memoryview, done: Callable[[], object]) -> None:
        self.rest = place
        self._done = done
        self._lock = threading.Lock()

    def fill(self, read: Callable[[memoryview], int]) -> int:
        """Let `read` fill the beginning of the rest; the number of its bytes, 0 at the end."""
        with self._lock:
            got = read(self.rest)
            self.rest = self.rest[got:]
            if not self.rest:
                self._done()
        return got

    def abandon(self) -> None:
        """From now on drop the bytes: nothing is written to the place any more."""
        with self._lock:
            self.rest = memoryview(bytearray(len(self.rest)))
            self._done = lambda: None


class Control:
    """Both directions of a connection, which it makes non-blocking; any thread may send, one
    receives. `process` gets every message, and returns the place of the bytes that follow it, if
    there are any. `received` is what has arrived of the next message, `ended` is set once the peer
    has hung up.
    """

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._lock = threading.Lock()
        self._urgent: deque[list[Buffer]] = deque()
        self._messages: deque[list[Buffer]] = deque()
        self._begun: list[Buffer] = []  # the rest of the message that is being sent
        self._received = bytearray(received)
        self.ended = threading.Event()
        self._landing: Landing | None = None

    def send(self, *messages: bytes, payload: memoryview | None = None, urgent: bool) -> bool:
        """Send messages, the last followed by the bytes of a payload, which must not change until
        they have arrived; False if some of it has to be sent later, by `advance`.
        """
        parts: list[Buffer] = [
            b"".join(_LENGTH.pack(len(message)) + message for message in messages)
        ]
        if payload is not None:
            parts.append(payload)
        with self._lock:
            (self._urgent if urgent else self._messages).append(parts)
            return self._advance()

    def advance(self) -> bool:
        """Send as much as the connection takes; whether that is all."""
        with self._lock:
            return self._advance()

    @property
    def received(self) -> bytes:
        return bytes(self._received)

    @property
    def unsent(self) -> bool:
        """Whether there is something to send."""
        return bool(self._begun or self._urgent or self._messages)

    def flush(self, deadline: float) -> None:
        """Send the message that has begun and urgent ones, until a deadline; drop the others."""
        with self._lock:
            self._messages.clear()
        while not self.advance() and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.connection, select.POLLOUT)
            poll.poll(1000 * left)

    def _advance(self) -> bool:
        try:
            while self._begun or self._urgent or self._messages:
                self._begun = self._begun or (self._urgent or self._messages).popleft()
                sent = self.connection.sendmsg(self._begun)
                while self._begun and sent >= len(self._begun[0]):
                    sent -= len(self._begun.pop(0))
                if sent:
                    self._begun[0] = memoryview(self._begun[0])[sent:]
        except BlockingIOError:
            return False
        except BaseException as error:
            # No message can follow the rest of this one. The receiving thread notices the end.
            shutdown(self.connection, socket.SHUT_RDWR)
            for waiting in (self._begun, self._urgent, self._messages):
                waiting.clear()
            if not isinstance(error, OSError):
                raise
        return True

    def receive(self, process: Callable[[bytes], Landing | None]) -> bool:
        """Process what has arrived; whether there may be more. Raises `WeftError` for a message
        that is too long.
        """
        try:
            if self._landing is not None:
                return self._fill(self.connection.recv_into) > 0
            got = self.connection.recv(_AT_ONCE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += got
        begin = 0
        while len(self._received) - begin >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received, begin)
            if not 0 < size <= LONGEST:
                raise WeftError(f"a message of {size} bytes")
            end = begin + _LENGTH.size + size
            if len(self._received) < end:
                break
            self._landing = process(bytes(self._received[begin + _LENGTH.size : end]))
            begin = end
            if self._landing is not None:
                begin += self._fill(_from(memoryview(bytes(self._received))[begin:]))
        del self._received[:begin]
        return bool(got)

    def _fill(self, read: Callable[[memoryview], int]) -> int:
        assert self._landing is not None
        got = self._landing.fill(read)
        if not self._landing.rest:
            self._landing = None
        return got


def _from(data: memoryview) -> Callable[[memoryview], Any]:
    """A function that fills the beginning of a place with these bytes."""

    def read(place: memoryview) -> int:
        got = min(len(place), len(data))
        place[:got] = data[:got]
        return got

    return read
