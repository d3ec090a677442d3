"""Two ranks of one process that claim to be on two hosts, connected over the loopback; and one of
them, with the ends of its connections in place of the other.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import weft._native as _native
from weft.world import World
from weft.world.backend import Backend
from weft.world.listener import Address
from weft.world.relay import Relay
from weft.world.rendezvous import RankInfo

LIMIT = 20.0  # seconds
RANKS = 2


@contextlib.contextmanager
def two_worlds() -> Iterator[list[World]]:
    """The worlds of two ranks, which claim to be on two hosts."""
    control = connected()
    made = each_rank(lambda rank: _world(rank, control[rank]))
    try:
        yield made
    finally:
        each_rank(lambda rank: made[rank].close())


@contextlib.contextmanager
def one_world() -> Iterator[tuple[World, socket.socket, socket.socket]]:
    """The world of rank 0, and the ends of rank 1's connections to it, for control and rows."""
    (control, theirs), (rows, their_rows) = connected(), connected()
    made = _world(0, control)
    made.relay.network.connect(1, rows.detach())
    with theirs, their_rows:
        try:
            yield made, theirs, their_rows
        finally:
            theirs.close()
            made.close()


def _world(rank: int, control: socket.socket) -> World:
    peer = 1 - rank
    infos = [
        RankInfo(os.getpid(), f"host {each}", Address("", 0, b""), frozenset({0}), 1)
        for each in range(RANKS)
    ]
    mesh = _native.Mesh([-1 if each == rank else _native.Mesh.elsewhere for each in range(RANKS)])
    relay = Relay(rank, range(RANKS), mesh, {peer: control}, ["127.0.0.1"] * RANKS, LIMIT)
    return World(rank, infos, mesh, LIMIT, Backend(), relay)


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def each_rank(run: Callable[[int], Any]) -> list[Any]:
    """The results of a function of every rank, each on a thread."""
    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(run, range(RANKS), timeout=LIMIT)]
