"""One-sided calls between hosts: what is refused, what a lost or silent peer does, and what no
message may do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

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
from weft.world.registry import default_here

HEADER = struct.Struct("<BB6xQQQ")  # of a message: kind, operation, request, memory and bytes
REQUEST = struct.Struct(
    "<9Q"
)  # offset, run and axes; memory of counters, whether to set, selection
ROWS, REGION, VALID = 1, 6, b"\1"
PUT, GET, CHANGE, VALUE, DONE = range(1, 6)
NO_ANSWER = 0x80  # of a put or change that needs none
PIECE = 1 << 20  # bytes of a request, at most


@pytest.fixture
def worlds():
    with two_worlds() as made:
        yield made


@pytest.fixture
def unconnected():
    """The worlds of four ranks, of which the first two have no connection."""
    with weft.local_world(4, hosts=(0, 1, 0, 1), timeout=LIMIT) as local:
        yield local.worlds


def each(worlds, make):
    """A symmetric object of each rank."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        return [*pool.map(make, worlds, timeout=LIMIT)]


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
    memory = each(worlds, lambda w: w.empty(1500, 1500, dtype=torch.float64))
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


@contextlib.contextmanager
def in_place_of_peer(world):
    """The end of a connection to rank 0 or 1, in place of the other of these."""
    ours, theirs = socket.socketpair()
    world.network.native.connect(1 - world.rank, ours.detach())
    with theirs:
        yield theirs


def next_of(connection):
    """The operation and the number of the next one-sided call, or of the bytes that follow it, and
    its contents.
    """
    while True:
        kind, operation, number, _, size = HEADER.unpack(received(connection, HEADER.size))
        contents = received(connection, size)
        if kind == REGION:
            assert received(connection, 1) == VALID
            return operation, number, contents


def received(connection, size):
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found)) or pytest.fail("the connection has ended")
    return found


def answer(operation, request, data=b""):
    return HEADER.pack(REGION, operation, request, 0, len(data)) + data + VALID


def request(operation, memory, layout=(0, 0), axes=(), change=(0,) * 6, data=b""):
    body = REQUEST.pack(*layout, len(axes), *change)
    body += b"".join(struct.pack("<2Q", *axis) for axis in axes) + data
    return HEADER.pack(REGION, operation, 1, memory, len(body)) + body + VALID


WITHOUT_ANSWER = "put_notify", "notify"


@pytest.mark.parametrize("name", [name for name in CALLS if name not in WITHOUT_ANSWER])
def test_a_peer_that_dies_during_a_call_is_named(unconnected, name):
    """Its requests have arrived, and no answer leaves before its connections end."""
    memory, flags = (
        each(unconnected, lambda w: w.empty(1 << 20)),
        each(unconnected, lambda w: w.signals(4)),
    )
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        call = pool.submit(CALLS[name], memory[0], flags[0])
        if name != "wait":
            next_of(peer)
        peer.close()
        with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died while rank 0 waited"):
            call.result(LIMIT)
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        CALLS["put"](memory[0], flags[0])


def connect(pool, peer, memory):
    """Return when rank 0 has taken the connection to rank 1, at whose other end this is."""
    call = pool.submit(weft.put, memory, torch.ones(4), 1)
    operation, number, _ = next_of(peer)
    assert operation == PUT
    peer.sendall(answer(DONE, number))
    call.result(LIMIT)


AFTERWARDS = {
    "notify of this host": lambda memory, flags: weft.notify(flags, 1, 2),
    "notify of itself": lambda memory, flags: weft.notify(flags, 1, 0),
    "notify of another host": lambda memory, flags: weft.notify(flags, 1, 3),
    "put_notify": lambda memory, flags: weft.put_notify(memory, torch.ones(4), flags, 1, 3),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_others_hear_only_of_what_has_arrived(unconnected, name):
    """A notify leaves without an answer; this rank asks for it before it notifies others."""
    memory, flags = (
        each(unconnected, lambda w: w.empty(4)),
        each(unconnected, lambda w: w.signals(4)),
    )
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        peer.settimeout(LIMIT)
        connect(pool, peer, memory[0])
        weft.notify(flags[0], 0, 1)
        assert next_of(peer)[0] == CHANGE | NO_ANSWER
        weft.put_notify(memory[0], torch.full((4,), 2.0), flags[0], slice(0, 2), 1)
        weft.put_notify(memory[0], torch.full((4,), 3.0), flags[0], 0, 1)
        for value in (2.0, 3.0):
            operation, _, contents = next_of(peer)
            assert operation == PUT | NO_ANSWER
            assert contents[REQUEST.size :] == torch.full((4,), value).numpy().tobytes()

        call = pool.submit(AFTERWARDS[name], memory[0], flags[0])
        found, number, contents = next_of(peer)
        assert found == CHANGE
        assert not any(contents)
        assert not call.done()
        assert [each[1] for each in flags] == [0] * 4
        peer.sendall(answer(DONE, number))
        call.result(LIMIT)
        while sum(each[1] for each in flags) == 0:
            threading.Event().wait(0.001)
        weft.notify(flags[0], 0, 1)  # leaves at once again
        assert next_of(peer)[0] == CHANGE | NO_ANSWER


def test_a_barrier_begins_when_notifies_have_arrived(unconnected):
    memory, flags = (
        each(unconnected, lambda w: w.empty(4)),
        each(unconnected, lambda w: w.signals(1)),
    )
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        peer.settimeout(LIMIT)
        connect(pool, peer, memory[0])
        weft.notify(flags[0], 0, 1)
        assert next_of(peer)[0] == CHANGE | NO_ANSWER
        call = pool.submit(weft.barrier, unconnected[0])
        kind, operation, number, _, _ = HEADER.unpack(received(peer, HEADER.size))
        assert (kind, operation) == (REGION, CHANGE)
        received(peer, REQUEST.size + len(VALID))
        peer.sendall(answer(DONE, number))
        while kind != ROWS:
            kind, _, _, _, size = HEADER.unpack(received(peer, HEADER.size))
            received(peer, size + (len(VALID) if kind == ROWS else 0))
        peer.close()
        with pytest.raises(weft.PeerLost):
            call.result(LIMIT)


@pytest.mark.parametrize("name", WITHOUT_ANSWER)
def test_a_peer_that_dies_after_a_call_without_answer_is_named_by_the_next(unconnected, name):
    memory, flags = (
        each(unconnected, lambda w: w.empty(4)),
        each(unconnected, lambda w: w.signals(4)),
    )
    calls = {
        "put_notify": lambda: weft.put_notify(memory[0], torch.ones(4), flags[0], 0, 1),
        "notify": lambda: weft.notify(flags[0], 0, 1),
    }
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        connect(pool, peer, memory[0])
        calls[name]()
        next_of(peer)
        peer.close()
        with pytest.raises(weft.PeerLost, match=r"rank 1 \(pid \d+\) died while rank 0 waited"):
            weft.wait(flags[0], 3, ">=", 1)
    with pytest.raises(weft.WeftError, match="closed: PeerLost"):
        calls[name]()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "wait"])
def test_a_peer_that_has_closed_its_world_is_named(worlds, name):
    memory, flags = each(worlds, lambda w: w.empty(1 << 20)), each(worlds, lambda w: w.signals(4))
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(worlds[1].close)
        while not worlds[0].mesh.left(1):
            threading.Event().wait(0.001)
        with pytest.raises(weft.PeerLost, match=r"rank 1 .* closed its world while rank 0 waited"):
            CALLS[name](memory[0], flags[0])
        leaving.result(LIMIT)


def test_a_peer_that_does_not_answer_has_a_time_limit(unconnected):
    memory = each(unconnected, lambda w: w.empty(1 << 20))
    unconnected[0].timeout = 0.2
    with (
        in_place_of_peer(unconnected[0]),
        pytest.raises(
            weft.PeerTimeout,
            match=r"rank 0 waited 0.2 s to make a get of 4,194,304 bytes from rank 1: the host of "
            r"rank 1 .*does not answer",
        ),
    ):
        weft.get(torch.empty(1 << 20), memory[0], 1)
    assert "PeerTimeout" in unconnected[0].closed


def test_each_answer_renews_the_time_limit(unconnected):
    """A silent peer is not a slow one."""
    memory = each(unconnected, lambda w: w.empty(PIECE // 4 * 5))
    unconnected[0].timeout = 1.0
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        call = pool.submit(weft.put, memory[0], torch.ones(PIECE // 4 * 5), 1)
        for number in range(1, 6):
            assert not call.done()
            assert [next_of(peer)[1] for _ in range(2)] == [number] * 2  # and its bytes
            threading.Event().wait(0.4)
            peer.sendall(answer(DONE, number))
        call.result(LIMIT)


def test_a_transfer_has_a_time_limit_of_its_own(unconnected):
    memory = each(unconnected, lambda w: w.empty(8))
    with in_place_of_peer(unconnected[0]) as peer:
        transfer = weft.put_async(memory[0], torch.ones(8), 1)
        with pytest.raises(weft.PeerTimeout, match=r"0.05 s for its put of 32 bytes to rank 1"):
            transfer.wait(0.05)
        assert "under way" in repr(transfer)
        operation, number, contents = next_of(peer)
        assert operation == PUT
        assert contents[REQUEST.size :] == torch.ones(8).numpy().tobytes()
        peer.sendall(answer(DONE, number))
        transfer.wait()
        assert transfer.done()


def test_closing_completes_transfers(worlds):
    memory = each(worlds, lambda w: w.empty(1 << 20))
    handles = [weft.put_async(memory[0], torch.full((1 << 20,), float(n)), 1) for n in range(1, 9)]
    each_rank(lambda rank: worlds[rank].close() if rank == 0 else None)
    assert all(handle.done() for handle in handles)
    assert bool((memory[1] == 8).all())


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises `KeyboardInterrupt`, whatever a library has made of it in this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_the_world_open_and_keeps_the_memory(unconnected):
    """The peer answers late: what it sends arrives in memory that is still there."""
    memory = each(unconnected, lambda w: w.empty(8))
    got = torch.zeros(8)
    kept = weakref.ref(got)
    with in_place_of_peer(unconnected[0]) as peer, ThreadPoolExecutor(1) as pool:

        def interrupt():
            number = next_of(peer)[1]
            os.kill(os.getpid(), signal.SIGINT)
            return number

        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt) as raised:
            weft.get(got, memory[0], 1)
        first = interrupted.result(LIMIT)
        del raised, got
        gc.collect()
        assert kept() is not None
        other = torch.zeros(8)
        call = pool.submit(weft.get, other, memory[0], 1)
        second = next_of(peer)[1]
        for number, value in ((first, 3.0), (second, 5.0)):
            peer.sendall(answer(VALUE, number, torch.full((8,), value).numpy().tobytes()))
        call.result(LIMIT)
        assert other.tolist() == [5] * 8
        call = pool.submit(weft.get, other, memory[0], 1)
        third = next_of(peer)[1]
        peer.sendall(answer(VALUE, third, bytes(32)))
        call.result(LIMIT)
        assert kept() is None


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:weft")


def test_memory_lives_until_no_rank_of_any_host_has_a_tensor_in_it(worlds):
    before = mapped()
    memory, flags = each(worlds, lambda w: w.empty(8)), each(worlds, lambda w: w.signals(4))
    memory[1] = flags[1] = None
    weft.put_notify(memory[0], torch.ones(8), flags[0], 0, 1)
    weft.put_async(memory[0][:4], torch.zeros(4), 1).wait()
    got = torch.zeros(8)
    weft.get(got, memory[0], 1)
    assert got.tolist() == [0] * 4 + [1] * 4
    assert mapped() == before + 4
    memory[0] = flags[0] = None
    while mapped() > before:
        threading.Event().wait(0.001)


def test_memory_is_kept_until_peers_have_what_was_put_there(unconnected):
    """That it is dropped is told by another connection than what was put."""
    before = mapped()
    memory, flags = (
        each(unconnected, lambda w: w.empty(4)),
        each(unconnected, lambda w: w.signals(4)),
    )
    with ThreadPoolExecutor(1) as pool, in_place_of_peer(unconnected[0]) as peer:
        peer.settimeout(LIMIT)
        connect(pool, peer, memory[0])
        weft.put_notify(memory[0], torch.ones(4), flags[0], 0, 1)
        assert next_of(peer)[0] == PUT | NO_ANSWER
        memory.clear()
        flags.clear()
        found, number, _ = next_of(peer)
        assert found == CHANGE
        assert mapped() > before
        peer.sendall(answer(DONE, number))
        while mapped() > before:
            threading.Event().wait(0.001)


BYTES = 4096
INVALID = {
    "behind the end": ((BYTES - 3, 4), ()),
    "strides behind the end": ((0, 4), ((3, 4), (2, BYTES - 8))),
    "an offset that wraps": ((2**64 - 4, 4), ((2, 4),)),
    "a stride that wraps": ((64, 4), ((2, 2**64 - 64),)),
    "no element": ((0, 4), ((0, 4),)),
    "runs of no byte": ((0, 0), ((4, 1),)),
    "a run that wraps": ((8, 2**64 - 4), ()),
    "more than a piece": ((0, 4), ((PIECE // 4 + 1, 0),)),
    "a size that wraps": ((0, 4), ((2**63, 0), (2, 0))),
}


@pytest.mark.parametrize("operation", [PUT, GET])
@pytest.mark.parametrize("name", INVALID)
def test_no_message_reads_or_writes_outside_symmetric_memory(unconnected, operation, name):
    both_parts = each(unconnected, lambda w: w.empty(BYTES, dtype=torch.uint8))
    for part in both_parts:
        part.fill_(9)
    layout, axes = INVALID[name]
    with in_place_of_peer(unconnected[1]) as peer:
        peer.sendall(request(operation, unconnected[1].executor.calls, layout, axes))
        reason = closed(unconnected[1])
    assert reason.startswith("PeerLost: rank 0 sent an invalid message to rank 1"), reason
    assert "a one-sided call for " in reason
    assert all(bool((part == 9).all()) for part in both_parts)


WRONG = {
    "of no operation": request(9, 1, (0, 8)),
    "a change with a layout": request(CHANGE, 1, (0, 8)),
    "a get without an answer": request(GET | NO_ANSWER, 1, (0, 8)),
    "for other memory": request(PUT, 77, (0, 8), data=bytes(8)),
    "too few bytes": request(PUT, 1, (0, 8), data=bytes(7)),
    "many axes": request(GET, 1, (0, 8), ((1, 8),) * 9),
    "too short": HEADER.pack(REGION, PUT, 1, 1, 71) + bytes(71),
    "endless": HEADER.pack(REGION, PUT, 1, 1, 1 << 40),
    "axes that are missing": HEADER.pack(REGION, GET, 1, 1, 72)
    + REQUEST.pack(0, 8, 3, *[0] * 6)
    + VALID,
    "an answer to nothing": answer(DONE, 1),
    "a value for nothing": answer(VALUE, 1, bytes(8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_one_sided_call_names_its_sender(unconnected, name):
    part = each(unconnected, lambda w: w.empty(8, dtype=torch.uint8))[1].fill_(9)
    assert unconnected[1].executor.calls == 1
    with in_place_of_peer(unconnected[1]) as peer:
        for at in range(0, len(WRONG[name]), 5):  # messages arrive in any pieces
            peer.sendall(WRONG[name][at : at + 5])
        reason = closed(unconnected[1])
    assert reason.startswith("PeerLost: rank 0 sent an invalid message to rank 1"), reason
    assert part.tolist() == [9] * 8


@pytest.mark.parametrize(
    "selection",
    [(64, 1, 1), (0, 2, 64), (0, 65, 1), (1, 2, 2**64 - 1), (0, 2, 0), (2**64 - 1, 2, 1)],
)
@pytest.mark.parametrize("sets", [0, 1])
def test_no_message_changes_other_counters(unconnected, selection, sets):
    flags = each(unconnected, lambda w: w.signals(64))
    with in_place_of_peer(unconnected[1]) as peer:
        peer.sendall(request(CHANGE, 0, change=(flags[1].memory, sets, *selection, 1)))
        assert f"a change of {selection[1]} counters" in closed(unconnected[1])
    assert flags[1][:] == [0] * 64


@pytest.mark.parametrize("size", [0, 12, 17])
def test_answers_of_another_size_than_asked_for(unconnected, size):
    memory = each(unconnected, lambda w: w.empty(4))
    got = torch.zeros(4)
    with in_place_of_peer(unconnected[0]) as peer, ThreadPoolExecutor(1) as pool:
        call = pool.submit(weft.get, got, memory[0], 1)
        peer.sendall(answer(VALUE, next_of(peer)[1], bytes(size)))
        with pytest.raises(weft.PeerLost, match="an answer that no one-sided call waits for"):
            call.result(LIMIT)
    assert got.tolist() == [0] * 4


def test_one_sided_calls_pass_rows_for_a_call_that_the_peer_has_yet_to_make(worlds):
    """More of them than a connection holds: a rank may need what follows to make its call."""
    memory, flags = each(worlds, lambda w: w.empty(8)), each(worlds, lambda w: w.signals(1))
    many = torch.ones(1, 24 << 20)
    handle = weft.all_gather_async(many, world=worlds[0])
    weft.put_notify(memory[0], torch.full((8,), 7.0), flags[0], 0, 1)
    weft.wait(flags[1], 0, ">=", 1)
    assert memory[1].tolist() == [7] * 8
    gathered = weft.all_gather(many, world=worlds[1])
    handle.wait()
    assert torch.equal(gathered, torch.ones(2, 24 << 20))
