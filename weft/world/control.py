"""A connection of short messages between hosts.

Nothing here waits. A message is sent by the caller's thread as far as the connection takes it at
once, and the rest by the relay's thread, which also receives: so a rank receives whatever it does
itself, and two ranks that send to each other cannot block each other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from weft.errors import WeftError

LONGEST = 16392  # bytes of a message: a letter with its two ranks
_LENGTH = struct.Struct("<I")  # of a message, in front of it
_AT_ONCE = 1 << 14  # bytes received at a time


def shutdown(connection: socket.socket, how: int) -> None:
    """End a direction of a connection, or both, unless they have ended."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)


class Control:
    """Both directions of a connection, which it makes non-blocking; any thread may send, one
    receives. `process` gets every message. `received` is what has arrived of the next message,
    `ended` is set once the peer has hung up.
    """

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._received = bytearray(received)
        self.ended = threading.Event()

    def send(self, message: bytes) -> bool:
        """Send a message; False if some of it has to be sent later, by `advance`."""
        with self._lock:
            self._unsent += _LENGTH.pack(len(message)) + message
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
        return bool(self._unsent)

    def flush(self, deadline: float) -> None:
        """Send all messages, until a deadline."""
        while not self.advance() and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self.connection, select.POLLOUT)
            poll.poll(1000 * left)

    def _advance(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return False
        except BaseException as error:
            # No message can follow the rest of this one. The receiving thread notices the end.
            shutdown(self.connection, socket.SHUT_RDWR)
            self._unsent.clear()
            if not isinstance(error, OSError):
                raise
        return True

    def receive(self, process: Callable[[bytes], None]) -> bool:
        """Process what has arrived; whether there may be more. Raises `WeftError` for a message
        that is too long.
        """
        try:
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
            process(bytes(self._received[begin + _LENGTH.size : end]))
            begin = end
        del self._received[:begin]
        return bool(got)
