"""Two ranks of one process that claim to be on two hosts, connected over the loopback; and one of
them, with the end of its connection in place of the other.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import weft._native as _native
from weft.bootstrap.connector import connect
from weft.bootstrap.listener import Address, Listener
from weft.bootstrap.rendezvous import RankInfo
from weft.world import World
from weft.world.backend import Backend
from weft.world.network import Network

LIMIT = 20.0  # seconds
RANKS = 2
_HERE = "127.0.0.1"


@contextlib.contextmanager
def two_worlds() -> Iterator[list[World]]:
    """The worlds of two ranks, which claim to be on two hosts."""
    listeners = [Listener(_HERE) for _ in range(RANKS)]
    made = each_rank(lambda rank: _world(rank, listeners))
    try:
        yield made
    finally:
        each_rank(lambda rank: made[rank].close())
        for listener in listeners:
            listener.close()


@contextlib.contextmanager
def one_world() -> Iterator[tuple[World, socket.socket]]:
    """The world of rank 0, and the end of rank 1's connection to it."""
    listeners = [Listener(_HERE) for _ in range(RANKS)]
    with ThreadPoolExecutor(1) as pool:
        address = listeners[0].address
        theirs = pool.submit(connect, 1, listeners[1], {0: (os.getpid(), address)}, LIMIT)
        made = _world(0, listeners)
        peer = theirs.result()[0]
    with peer:
        try:
            yield made, peer
        finally:
            peer.close()
            made.close()
            for listener in listeners:
                listener.close()


def _world(rank: int, listeners: Sequence[Listener]) -> World:
    peer = 1 - rank
    infos = [
        RankInfo(os.getpid(), f"host {each}", Address("", 0, b""), frozenset({0}), 1)
        for each in range(RANKS)
    ]
    mesh = _native.Mesh([-1 if each == rank else _native.Mesh.elsewhere for each in range(RANKS)])
    addresses = {peer: (os.getpid(), listeners[peer].address)}
    network = Network(rank, range(RANKS), mesh, listeners[rank], addresses)
    network.connect(LIMIT)
    return World(rank, infos, mesh, LIMIT, Backend(), network)


def each_rank(run: Callable[[int], Any]) -> list[Any]:
    """The results of a function of every rank, each on a thread."""
    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(run, range(RANKS), timeout=LIMIT)]
