"""Two ranks of one process that claim to be on two hosts: control over the loopback, rows over
queues.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import weft._native as _native
from weft.world import World
from weft.world.backend import Backend
from weft.world.listener import Address
from weft.world.relay import Relay
from weft.world.rendezvous import RankInfo
from weft.world.transport import Tag

LIMIT = 20.0  # seconds
RANKS = 2


class MemoryTransport:
    """A transport between threads of one process; `wires[sender, receiver]` is a queue of messages,
    with None for the end.
    """

    def __init__(self, rank, wires):
        self.rank, self.wires = rank, wires
        self.aborted = threading.Event()
        self.sent = 0
        self.incoming = {}

    def begin(self, rank, tag, messages):
        if self.aborted.is_set():
            raise ConnectionAbortedError
        for rows in messages:
            self.sent += len(rows)
            self.wires[self.rank, rank].put((tag, bytes(rows)))
        return []

    def finish(self, rank, rest):
        assert not rest, "nothing blocks here"

    def poll(self, rank):
        message = self.wires[rank, self.rank].get()
        if message is None or self.aborted.is_set():
            return None
        tag, rows = message
        self.incoming[rank] = memoryview(rows)
        return Tag(*tag), len(rows)

    def receive(self, rank, rows):
        rows[:], self.incoming[rank] = (
            self.incoming[rank][: len(rows)],
            self.incoming[rank][len(rows) :],
        )

    def end(self, rank):
        self.wires[self.rank, rank].put(None)

    def abort(self):
        self.aborted.set()
        for (sender, receiver), wire in self.wires.items():
            if self.rank in (sender, receiver):
                wire.put(None)

    def close(self):
        pass


@contextlib.contextmanager
def two_worlds() -> Iterator[list[World]]:
    """The worlds of two ranks, which claim to be on two hosts."""
    control = dict(enumerate(connected()))
    wires = {(0, 1): queue.SimpleQueue(), (1, 0): queue.SimpleQueue()}
    infos = [
        RankInfo(os.getpid(), f"host {rank}", Address("", 0, b""), frozenset({0}), 1)
        for rank in range(RANKS)
    ]

    def world(rank):
        peer = 1 - rank
        relay = Relay(rank, {peer: control[rank]}, MemoryTransport(rank, wires), LIMIT)
        ends = {rank: -1, peer: relay.sockets()[peer].detach()}
        mesh = _native.Mesh([ends[each] for each in range(RANKS)])
        return World(rank, infos, mesh, LIMIT, Backend(), relay)

    made = each_rank(world)
    try:
        yield made
    finally:
        each_rank(lambda rank: made[rank].close())


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def each_rank(run: Callable[[int], Any]) -> list[Any]:
    """The results of a function of every rank, each on a thread."""
    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(run, range(RANKS), timeout=LIMIT)]
