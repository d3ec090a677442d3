"""Connections to ranks on other hosts, over the loopback: rows arrive in the order of calls however
late the receiver is, and malformed messages name their sender.
"""

import socket
import struct
import threading
import time

import pytest
import torch
from support.loopback import LIMIT, each_rank, one_world, two_worlds
from support.process_resources import leaked, resources

import weft
import weft._native as _native
from weft.errors import PeerLost

HEADER = struct.Struct("<BB6xQQQ")  # of a message: kind, lane, call, digest and bytes
ROWS, CALL, CONTROL, END = 1, 2, 7, 8


def control(text, rank=1):
    """An event of a rank."""
    return HEADER.pack(CONTROL, 0, rank, 0, len(text)) + text


def error_of(world, call):
    """The error of a call, or of the one after it if another thread closes the world."""
    with pytest.raises(weft.WeftError) as found:
        while True:
            call(world)
    return found.value


def header_of_rows(rows):
    """The header of the rows that a world sends first, after what it tells of its call."""
    while True:
        found = HEADER.unpack(rows.recv(HEADER.size, socket.MSG_WAITALL))
        if found[0] == ROWS:
            return found
        rows.recv(found[-1], socket.MSG_WAITALL)


def assert_named(error, problem):
    assert isinstance(error, PeerLost)
    assert str(error).startswith("rank 1 (pid ")
    assert f"sent an invalid message to rank 0 ({problem}" in str(error)


def test_rows_of_many_calls_wait_for_a_rank_that_is_late():
    """More than the buffers of a connection hold, in pieces of memory that are not adjacent."""
    with two_worlds() as worlds:
        late = threading.Event()
        parts = [torch.arange(40_000.0).view(4, -1)[:, : 9_000 + n] for n in range(16)]

        def exchange(rank):
            if rank:
                late.wait(LIMIT)
            own = [part + 1e5 * rank for part in parts]
            handles = [weft.all_gather_async(each, world=worlds[rank]) for each in own]
            late.set()
            return [handle.wait() for handle in handles]

        for found in each_rank(exchange):
            for part, rows in zip(parts, found, strict=True):
                assert torch.equal(rows, torch.cat([part, part + 1e5]))


def test_rows_are_received_and_sent_as_they_lie_in_memory():
    """Rows of tensors with gaps, short and long ones."""
    with two_worlds() as worlds:
        for columns in (1, 3, 200, 5_000):
            wide = torch.arange(2.0 * 70 * columns).view(70, 2 * columns)

            def gather(rank, narrow=wide[:, :columns]):
                return weft.all_gather(narrow + rank, world=worlds[rank])

            for rows in each_rank(gather):
                assert torch.equal(rows, torch.cat([wide[:, :columns] + rank for rank in range(2)]))


def test_a_failure_reaches_a_peer():
    with two_worlds() as worlds:
        worlds[1].failure.fail(RuntimeError("broken"))
        with pytest.raises(PeerLost, match=r"rank 1 .* failed with RuntimeError: broken"):
            weft.all_gather(torch.ones(2, 2), world=worlds[0])


def test_a_failure_while_rows_are_sent_reaches_a_peer():
    """More than a connection takes: the peer receives none of them as rows."""
    with two_worlds() as worlds:
        many = torch.ones(1, 24 << 20)
        weft.all_gather_async(many, world=worlds[1])
        weft.all_reduce_async(torch.ones(2), world=worlds[1])
        worlds[1].failure.fail(RuntimeError("broken"))
        with pytest.raises(PeerLost, match=r"rank 1 .* failed with RuntimeError: broken"):
            weft.all_gather(many, world=worlds[0])


def test_closing_ends_the_wait_for_a_peer_that_receives_nothing():
    with one_world() as (world, _):
        handle = weft.all_gather_async(torch.ones(16 << 20), world=world)
        world.failure.fail(RuntimeError("enough"))
        with pytest.raises(weft.WeftError):
            handle.wait()


def test_no_row_arrives_after_an_error_although_another_thread_closes_the_world():
    """That thread has not reached the network yet when a call raises its error."""
    with two_worlds() as (world, _):
        abort, called = world.network.close, threading.Event()
        main = threading.current_thread()

        def close():
            if threading.current_thread() is main:
                called.set()
            else:
                assert called.wait(LIMIT)
            abort()

        world.network.close = close
        failing = threading.Thread(
            target=world.failure.fail, args=(RuntimeError("broken"), 0, True)
        )
        failing.start()
        with pytest.raises(weft.WeftError, match="broken"):
            weft.all_gather(torch.ones(2, 2), world=world)
        assert called.is_set()
        failing.join()


def test_a_world_ends_its_threads_before_the_interpreter():
    """A thread that closes the world because of a peer, and has not done so yet."""
    with one_world() as (world, _):
        threads = list[threading.Thread]()

        def slowly(error):
            threads.append(threading.current_thread())
            while world.closed is None:
                time.sleep(0.001)
            time.sleep(1)  # longer than the world waits for its peer

        world.failure.before = slowly
        world.network._note(_native.Trouble.garbled, 1, 0, "a message")
        while not threads:
            time.sleep(0.001)
        world.close()
        assert not any(thread.is_alive() for thread in (*threads, world.network.thread))


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (0, b"f"),
        (2, b"f"),
        (1 << 33, b"f"),
        (1, b""),
        (1, b"?"),
        (1, b"f?"),
        (1, b"d123"),
        (1, b"aKeyError\nrank 1\nbad news"),
        (1, b"aKeyError\n2\nbad news"),
    ],
    ids=[
        "of this rank",
        "of no rank",
        "of a large number",
        "without a text",
        "unknown",
        "unknown farewell",
        "short number",
        "error without a rank",
        "error of no rank",
    ],
)
def test_an_invalid_event_names_its_sender(rank, text):
    with one_world() as (world, peer):
        frame = control(text, rank)
        for at in range(0, len(frame), 5):  # messages arrive in any pieces
            peer.sendall(frame[at : at + 5])
        error = error_of(world, lambda world: weft.barrier(world=world))
    assert_named(error, f"an event of rank {rank}")


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (HEADER.pack(9, 0, 1, 7, 0), "a message of unknown kind 9"),
        (HEADER.pack(0, 0, 1, 7, 0), "a message of unknown kind 0"),
        (HEADER.pack(CONTROL, 0, 1, 0, 1 << 14), f"a text of {1 << 14} bytes"),
        (HEADER.pack(CALL, 0, 1, 7, 1 << 40), f"a text of {1 << 40} bytes"),
        (HEADER.pack(CALL, 0, 1, 7, 3) + b"abc", "a call without its text"),
    ],
    ids=["unknown", "none", "long event", "endless text", "short text"],
)
def test_a_malformed_message_of_the_network_names_its_sender(frame, problem):
    with one_world() as (world, rows):
        for at in range(0, len(frame), 5):
            rows.sendall(frame[at : at + 5])
        error = error_of(world, lambda world: weft.barrier(world=world))
    assert_named(error, problem)


@pytest.mark.parametrize(
    ("lane", "size", "problem"),
    [
        (9, 8, "rows for lane 9, which receives no more rows in call"),
        (0, 9, "9 bytes in place of 1 rows of 8 bytes"),
    ],
)
def test_unexpected_rows_name_their_sender(lane, size, problem):
    with one_world() as (world, rows):
        handle = weft.all_gather_async(torch.ones(1, 2), world=world)
        _, _, call, digest, _ = header_of_rows(rows)
        rows.sendall(HEADER.pack(ROWS, lane, call, digest, size))
        with pytest.raises(PeerLost) as error:
            handle.wait()
        assert_named(error.value, problem)


@pytest.mark.parametrize("how", ["farewell", "failure", "death"])
def test_a_peer_that_is_gone_in_the_middle_of_a_message(how):
    """Half of a message is sent, and another one does not arrive, or as rows that are not valid: what
    waits for the rest ends, and nothing is left.
    """
    many = torch.ones(1, 4 << 20)  # by threads of torch, which stay
    before = resources()
    with one_world() as (world, peer):
        handle = weft.all_gather_async(many, world=world)
        kind, lane, call, digest, size = header_of_rows(peer)
        if how == "farewell":
            peer.sendall(HEADER.pack(END, 0, 0, 0, 0) + control(b"f"))
        elif how == "failure":
            rows = HEADER.pack(kind, lane, call, digest, size) + bytes(size)
            peer.sendall(rows + b"\0" + control(b"aKeyError\n1\nhalfway"))
            deadline = time.monotonic() + LIMIT
            while not world.mesh.failure()[0] and time.monotonic() < deadline:
                time.sleep(0.001)  # a rank hangs up once its failure has arrived
        else:
            peer.sendall(HEADER.pack(kind, lane, call, digest, size) + bytes(size // 2))
        peer.close()
        with pytest.raises(PeerLost) as error:
            handle.wait()
        words = {"farewell": "closed its world", "failure": "failed with KeyError", "death": "died"}
        assert words[how] in str(error.value)
    del world, handle, error
    assert leaked(before) == []


def test_many_announcements_at_once():
    """A peer that is far ahead: its calls are noted, the latest one last."""
    with one_world() as (world, rows):
        text = b"identity" + b"all_reduce"
        calls = b"".join(
            HEADER.pack(CALL, 0, call, 7, len(text)) + text for call in range(1, 20_001)
        )
        sending = threading.Thread(target=rows.sendall, args=(calls,))
        sending.start()
        deadline = time.monotonic() + LIMIT
        while world.executor.peer_call(1, 20_000) != "all_reduce":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        sending.join(LIMIT)
