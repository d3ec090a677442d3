"""Rows between hosts over TCP, with one connection to each rank."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping, Sequence

from weft.world.transport import Buffer, Tag

HEADER = struct.Struct("<BQQQ")  # of a message: its tag and its size
_BUFFERS = 512  # buffers that one system call may send
_READ_AHEAD = 4096  # bytes read, and copied, before it is known where they belong: a page


class TcpTransport:
    """A `Transport` of connected sockets, by rank."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self.connections = dict(connections)
        self._streams = {rank: _Stream(connection) for rank, connection in connections.items()}
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, rank: int, tag: Tag, messages: Sequence[memoryview]) -> Sequence[Buffer]:
        parts: list[Buffer] = []
        for rows in messages:
            parts += [HEADER.pack(*tag, len(rows)), rows]
        try:
            sent = self.connections[rank].sendmsg(parts[:_BUFFERS], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        for at, part in enumerate(parts):
            if sent < len(part):
                return [memoryview(part)[sent:], *parts[at + 1 :]]
            sent -= len(part)
        return []

    def finish(self, rank: int, rest: Sequence[Buffer]) -> None:
        for part in rest:
            self.connections[rank].sendall(part)

    def poll(self, rank: int) -> tuple[Tag, int] | None:
        stream = self._streams[rank]
        if not stream.more():
            return None
        stream.read(stream.header)
        *tag, size = HEADER.unpack(stream.header)
        return Tag(*tag), size

    def receive(self, rank: int, rows: memoryview) -> None:
        self._streams[rank].read(rows)

    def end(self, rank: int) -> None:
        shutdown(self.connections[rank], socket.SHUT_WR)

    def abort(self) -> None:
        for connection in self.connections.values():
            shutdown(connection, socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


class _Stream:
    """The incoming bytes of a connection. Short messages are read ahead into a buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = memoryview(bytearray(_READ_AHEAD))
        self.ahead = memoryview(b"")
        self.header = memoryview(bytearray(HEADER.size))

    def more(self) -> bool:
        """Wait until there is something to read; False at the end."""
        if not self.ahead:
            self.ahead = self.buffer[: self.connection.recv_into(self.buffer)]
        return bool(self.ahead)

    def read(self, into: memoryview) -> None:
        """Fill `into` with the next bytes."""
        got = min(len(into), len(self.ahead))
        into[:got] = self.ahead[:got]
        self.ahead = self.ahead[got:]
        while got < len(into):
            more = self.connection.recv_into(into[got:], 0, socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError("it closed the connection in the middle of a message")
            got += more


def shutdown(connection: socket.socket, how: int) -> None:
    """End a direction of a connection, or both, unless they have ended."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)
