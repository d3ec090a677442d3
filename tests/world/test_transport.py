"""Ranks on two hosts exchange rows over another medium: a `Transport` is all that it needs."""

import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import weft
import weft._native as _native
from weft.errors import PeerLost
from weft.world import World
from weft.world.listener import Address
from weft.world.peers import Backend
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


@pytest.fixture
def worlds():
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
        return World(rank, infos, mesh, LIMIT, Backend(torch.device("cpu")), relay)

    made = each_rank(world)
    yield made
    each_rank(lambda rank: made[rank].close())


def connected():
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def each_rank(run):
    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(run, range(RANKS), timeout=LIMIT)]


def test_rows_go_by_the_transport(worlds):
    torch.manual_seed(0)
    inputs = [torch.randn(5, 7) for _ in range(RANKS)]

    def exchange(rank):
        own, world = inputs[rank], worlds[rank]
        gathered = [weft.all_gather(own, world=world) for _ in range(3)]
        return *gathered, weft.all_reduce(own, world=world)

    for *gathered, total in each_rank(exchange):
        for rows in gathered:
            torch.testing.assert_close(rows, torch.cat(inputs), rtol=0, atol=0)
        torch.testing.assert_close(total, inputs[0] + inputs[1], rtol=0, atol=0)
    for world in worlds:
        assert world.relay.transport.sent >= 4 * inputs[0].nbytes


def test_a_failure_reaches_a_peer_over_any_transport(worlds):
    worlds[1].fail(RuntimeError("broken"))
    with pytest.raises(PeerLost, match=r"rank 1 .* failed with RuntimeError: broken"):
        weft.all_gather(torch.ones(2, 2), world=worlds[0])
