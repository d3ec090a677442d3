"""One-sided calls between hosts: what is refused, what a lost or silent peer does, and what no
message may do.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest
import torch
from support.checks.onesided import (
    DTYPES,
    EXAMPLES,
    SOURCE,
    every_view_to_every_peer,
    examples,
    unaligned,
)
from support.loopback import LIMIT, each_rank, two_worlds

import weft
from weft.ops import between_hosts
from weft.world.control import Control, Landing, shutdown
from weft.world.registry import default_here
from weft.world.remote import PIECE, Answers, StridedLayout


@pytest.fixture
def worlds():
    with two_worlds() as made:
        yield made


def both(worlds, make):
    """A symmetric object of each rank."""
    return each_rank(lambda rank: make(worlds[rank]))


def closed(world):
    """The reason why a world was closed by another thread."""
    while world.closed is None:
        threading.Event().wait(0.001)
    return world.closed


@pytest.mark.parametrize(
    "check",
    [
        unaligned,
        partial(examples, source=SOURCE, names=EXAMPLES),
        *(partial(every_view_to_every_peer, dtype=d) for d in DTYPES),
    ],
)
def test_calls_reach_a_peer_on_another_host(worlds, check):
    def run(rank):
        default_here(worlds[rank])
        check(worlds[rank])

    each_rank(run)


def test_more_than_is_under_way_at_once(worlds):
    """Contiguous at both ends, at one, and at none, in both directions at the same time."""
    memory = both(worlds, lambda w: w.empty(1500, 1500, dtype=torch.float64))
    numbers = torch.arange(1500.0 * 1500, dtype=torch.float64).view(1500, 1500)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, 1:], lambda t: t.view(-1, 2)[:, 0]):
        for part in memory:
            part.zero_()

        def run(rank, view=view):
            weft.put_async(view(memory[rank]), view(numbers + rank), 1 - rank).wait()
            got = torch.zeros_like(numbers)
            weft.get(view(got), view(memory[rank]), 1 - rank)
            assert torch.equal(view(got), view(numbers + rank))

        each_rank(run)
        for rank, part in enumerate(memory):
            expected = torch.zeros_like(numbers)
            view(expected).copy_(view(numbers + 1 - rank))
            assert torch.equal(part, expected)


FLAGS = slice(0, 4)
CALLS = {
    "put": lambda memory, flags: weft.put(memory, torch.ones(1 << 20), 1),
    "get": lambda memory, flags: weft.get(torch.empty(1 << 20), memory, 1),
    "put_async": lambda memory, flags: weft.put_async(memory, torch.ones(1 << 20), 1).wait(),
    "get_async": lambda memory, flags: weft.get_async(torch.empty(1 << 20), memory, 1).wait(),
    "put_notify": lambda memory, flags: weft.put_notify(memory, torch.ones(1 << 20), flags, 0, 1),
    "notify": lambda memory, flags: weft.notify(flags, FLAGS, 1),
    "wait": lambda memory, flags: weft.wait(flags, 0, ">=", 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_peer_that_dies_during_a_call_is_named(worlds, name):
    """Its requests have arrived, and no answer leaves before its connections end."""
    asked, over = threading.Event(), threading.Event()

    def process(*message):
        asked.set()
        over.wait(LIMIT)

    worlds[1].relay.remote.process = process
    memory, flags = both(worlds, lambda w: w.empty(1 << 20)), both(worlds, lambda w: w.signals(4))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(CALLS[name], memory[0], flags[0])
        assert name == "wait" or asked.wait(LIMIT)
        relay = worlds[1].relay
        for each in (*relay.lines.connections.values(), *relay.control.values()):
            shutdown(each.connection, socket.SHUT_RDWR)
        with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died while rank 0 waited"):
            call.result(LIMIT)
    over.set()
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        CALLS["put"](memory[0], flags[0])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "wait"])
def test_a_peer_that_has_closed_its_world_is_named(worlds, name):
    memory, flags = both(worlds, lambda w: w.empty(1 << 20)), both(worlds, lambda w: w.signals(4))
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(worlds[1].close)
        while not worlds[0].relay.gone(1):
            threading.Event().wait(0.001)
        with pytest.raises(weft.PeerLost, match=r"rank 1 .* closed its world while rank 0 waited"):
            CALLS[name](memory[0], flags[0])
        leaving.result(LIMIT)


def test_a_peer_that_does_not_answer_has_a_time_limit(worlds):
    """A silent peer is not a slow one: each answer renews the limit."""
    memory = both(worlds, lambda w: w.empty(1 << 20))
    worlds[1].relay.remote.process = lambda *_: None
    worlds[0].timeout = 0.2
    with pytest.raises(
        weft.PeerTimeout,
        match=r"rank 0 waited 0.2 s to make a get of 4,194,304 bytes from rank 1: the host of rank 1 "
        r".*does not answer",
    ):
        weft.get(torch.empty(1 << 20), memory[0], 1)
    assert "PeerTimeout" in worlds[0].closed


def test_a_transfer_has_a_time_limit_of_its_own(worlds):
    memory, process = both(worlds, lambda w: w.empty(8)), worlds[1].relay.remote.process
    gate = threading.Event()
    worlds[1].relay.remote.process = lambda *message: gate.wait(LIMIT) and process(*message)
    transfer = weft.put_async(memory[0], torch.ones(8), 1)
    with pytest.raises(weft.PeerTimeout, match=r"waited 0.05 s for its put of 32 bytes to rank 1"):
        transfer.wait(0.05)
    assert "under way" in repr(transfer)
    gate.set()
    transfer.wait()
    assert transfer.done()
    assert memory[1].tolist() == [1] * 8


def test_closing_completes_transfers(worlds):
    memory = both(worlds, lambda w: w.empty(1 << 20))
    handles = [weft.put_async(memory[0], torch.full((1 << 20,), float(n)), 1) for n in range(1, 9)]
    each_rank(lambda rank: worlds[rank].close() if rank == 0 else None)
    assert all(handle.done() for handle in handles)
    assert bool((memory[1] == 8).all())


class Interrupted(SimpleQueue):
    """Answers of a call whose thread is interrupted while it waits for the first."""

    def get(self, *limit, **limits):
        raise KeyboardInterrupt


def test_ctrl_c_leaves_the_world_open_and_the_target_alone(worlds, monkeypatch):
    memory, process = both(worlds, lambda w: w.empty(8)), worlds[1].relay.remote.process
    memory[1].fill_(5)
    gate, got = threading.Event(), torch.zeros(8)
    worlds[1].relay.remote.process = lambda *message: [gate.wait(LIMIT), process(*message)][1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(between_hosts, "Answers", Interrupted)
        weft.get(got, memory[0], 1)
    gate.set()
    other = torch.zeros(8)
    weft.get(other, memory[0], 1)  # the earlier answer has arrived before this one
    assert (got.tolist(), other.tolist()) == ([0] * 8, [5] * 8)


def test_memory_lives_until_no_rank_of_any_host_has_a_tensor_in_it(worlds):
    memory, flags = both(worlds, lambda w: w.empty(8)), both(worlds, lambda w: w.signals(4))
    memory[1] = flags[1] = None
    weft.put_notify(memory[0], torch.ones(8), flags[0], 0, 1)
    weft.put_async(memory[0][:4], torch.zeros(4), 1).wait()
    got = torch.zeros(8)
    weft.get(got, memory[0], 1)
    assert got.tolist() == [0] * 4 + [1] * 4
    held = [world.relay.remote._held for world in worlds]
    assert [len(each) for each in held] == [0, 2]
    memory[0] = flags[0] = None
    while held[1]:
        threading.Event().wait(0.001)


BYTES = 4096
INVALID = {
    "behind the end": (0, BYTES - 3, 4, (1,), (4,)),
    "strides behind the end": (0, 0, 4, (3, 2), (4, BYTES - 8)),
    "an offset that wraps": (0, 2**64 - 4, 4, (2,), (4,)),
    "a stride that wraps": (0, 64, 4, (2,), (2**64 - 64,)),
    "no element": (0, 0, 4, (0,), (4,)),
    "elements of no byte": (0, 0, 0, (4,), (4,)),
    "elements of 17 bytes": (0, 0, 17, (4,), (17,)),
    "more than a piece": (0, 0, 4, (PIECE // 4 + 1,), (0,)),
    "a size that wraps": (0, 0, 4, (2**63, 2), (0, 0)),
}


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("name", INVALID)
def test_no_message_reads_or_writes_outside_symmetric_memory(worlds, kind, name):
    both_parts = both(worlds, lambda w: w.empty(BYTES, dtype=torch.uint8))
    for part in both_parts:
        part.fill_(9)
    [number] = worlds[0].relay.remote._held
    layout, data = StridedLayout(*INVALID[name])._replace(memory=number), torch.ones(4).numpy()
    getattr(worlds[0].relay.remote, kind)(1, layout, data, Answers())
    reason = closed(worlds[1])
    assert reason.startswith("PeerLost: rank 0 sent an invalid message to rank 1"), reason
    assert "a one-sided call that is not valid" in reason
    assert all(bool((part == 9).all()) for part in both_parts)


@pytest.mark.parametrize(
    "selection", [(64, 1, 1), (0, 2, 64), (0, 65, 1), (1, 2, 2**64 - 1), (0, 2, 0)]
)
@pytest.mark.parametrize("op", ["add", "set"])
def test_no_message_changes_other_counters(worlds, selection, op):
    flags = both(worlds, lambda w: w.signals(64))
    worlds[0].relay.remote.change(1, flags[0].memory, op, selection, 1, Answers())
    assert "a one-sided call that is not valid" in closed(worlds[1])
    assert flags[1][:] == [0] * 64


@pytest.mark.parametrize("size", [0, 12, 2**40])
def test_answers_of_another_size_than_asked_for(worlds, size):
    memory = both(worlds, lambda w: w.empty(4))
    worlds[1].relay.remote.process = lambda peer, message: worlds[1].relay._send_request(
        peer, b"V" + message[1:9] + size.to_bytes(8, "little"), memoryview(bytes(16))
    )
    got = torch.zeros(4)
    with pytest.raises(weft.PeerLost, match=rf"not valid: {size} bytes for request"):
        weft.get(got, memory[0], 1)
    assert got.tolist() == [0] * 4


def test_a_message_of_any_length_that_is_cut_off(worlds):
    for size in range(1, 60):
        with pytest.raises(weft.WeftError, match="not valid"):
            worlds[1].relay.remote.process(0, b"P" + bytes(size))


def test_urgent_messages_overtake_others_and_nothing_waits_for_the_peer():
    """A connection that takes no more: what has begun is completed, then urgent messages are sent."""
    one, other = socket.socketpair()
    control = Control.__new__(Control)
    with one, other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "setsockopt", lambda *_: None)  # it is a Unix socket
        control.__init__(one)
        while control.send(b"piece", payload=memoryview(bytes(PIECE)), urgent=False):
            pass
        for _ in range(3):
            assert not control.send(b"later", urgent=False)
        assert not control.send(b"failure", b"farewell", urgent=True)
        found, received = [], Control(other)
        receiving = True
        while receiving:
            control.advance()
            received.receive(lambda message: found.append(message) or _landing_after(message))
            receiving = found.count(b"later") < 3
    first = found.index(b"failure")
    assert found[first : first + 2] == [b"failure", b"farewell"]
    assert b"later" not in found[:first]


def _landing_after(message):
    return Landing(memoryview(bytearray(PIECE)), lambda: None) if message == b"piece" else None
