"""Relays over the loopback: rows arrive in the order of calls, whichever lane is ahead, and
malformed messages name their sender.
"""

import queue
import socket
import threading
from functools import partial

import pytest

from weft.engines import network
from weft.errors import PeerLost
from weft.world.control import LONGEST
from weft.world.relay import CALL, Relay
from weft.world.tcp import HEADER, TcpTransport
from weft.world.transport import Tag

LIMIT = 20.0  # the longest wait in seconds


class _Expected:
    """The rows that a call expects from the peer: one message for each of `lanes`."""

    digest = 7

    def __init__(self, call, lanes, taken):
        self.call, self.lanes, self.taken = call, list(lanes), taken

    def open_gate(self, lane):
        return True

    def receive(self, lane, size, read):
        received = bytearray(size)
        read(memoryview(received))
        self.lanes.remove(lane)
        self.taken.put((self.call, lane, bytes(received)))
        return bool(self.lanes)


def connected():
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.fixture
def two():
    """The relays of two ranks."""
    control, rows = connected(), connected()
    relays = [
        Relay(rank, {1 - rank: control[rank]}, TcpTransport({1 - rank: rows[rank]}), LIMIT)
        for rank in range(2)
    ]
    ends = [end for relay in relays for end in relay.sockets().values()]  # the mesh's ends
    for relay in relays:
        relay.start(None, None, lambda error, rank: pytest.fail(f"rank {rank}: {error}"))
    yield relays
    closing = [threading.Thread(target=relay.close) for relay in relays]
    for each in closing:
        each.start()
    for each in closing:
        each.join(LIMIT)
    for end in ends:
        end.close()


def test_a_lane_that_is_ahead_lets_the_other_finish_its_call(two):
    """Otherwise a rank that waits for the first lane would be stuck behind the other lane's rows of
    the next call, which it has not made.
    """
    one, other = two
    taken = queue.Queue()
    for relay in two:
        relay._send_control = lambda *_: None  # no native core receives the calls here
    for call in (1, 2):
        one.begin(call, 7, "", {}, {1: 2})
    other.begin(1, 7, "", {0: _Expected(1, (0, 1), taken)}, {})
    ahead = threading.Thread(
        target=lambda: [one.send(1, Tag(0, call, 7), [memoryview(b"lane 0")]) for call in (1, 2)]
    )
    ahead.start()
    assert taken.get(timeout=LIMIT) == (1, 0, b"lane 0")
    one.send(1, Tag(1, 1, 7), [memoryview(b"lane 1")])
    assert taken.get(timeout=LIMIT) == (1, 1, b"lane 1")
    other.begin(2, 7, "", {0: _Expected(2, (0, 1), taken)}, {})
    one.send(1, Tag(1, 2, 7), [memoryview(b"the last")])
    assert {taken.get(timeout=LIMIT) for _ in range(2)} == {(2, 0, b"lane 0"), (2, 1, b"the last")}
    ahead.join(LIMIT)
    assert not ahead.is_alive()


def test_messages_that_a_connection_does_not_take_at_once_stay_in_order(two):
    one, other = two
    taken, sent = queue.Queue(), queue.Queue()
    for relay in two:
        relay._send_control = lambda *_: None
    messages = [b"rows %d " % n * (1 << 14) for n in range(96)]  # more than buffers hold
    batches = [messages[n : n + 2] for n in range(0, len(messages), 2)]
    one.begin(1, 7, "", {}, {1: len(messages)})
    for number, batch in enumerate(batches):
        views = [memoryview(rows) for rows in batch]
        one.post("compute", 1, Tag(0, 1, 7), views, partial(sent.put, number))
    assert sent.qsize() < len(batches), "this thread does not wait for the peer"
    other.begin(1, 7, "", {0: _Expected(1, [0] * len(messages), taken)}, {})
    for rows in messages:
        assert taken.get(timeout=LIMIT) == (1, 0, rows)
    assert [sent.get(timeout=LIMIT) for _ in batches] == [*range(len(batches))]


def test_closing_ends_the_wait_for_an_earlier_call(two):
    one, _ = two
    one._send_control = lambda *_: None
    for call in (1, 2):
        one.begin(call, 7, "", {}, {1: 1})
    waiting = threading.Thread(target=one.send, args=(1, Tag(0, 2, 7), [memoryview(b"rows")]))
    waiting.start()
    one.close()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


def test_a_leaving_rank_receives_the_messages_on_their_way(two):
    """They may be for another rank of its host."""
    one, other = two
    taken = queue.Queue()
    for relay in two:
        relay._send_control = lambda *_: None
    other.begin(1, 7, "", {0: _Expected(1, (0,), taken)}, {})
    leaving = threading.Thread(target=other.finish)
    leaving.start()
    leaving.join(0.2)  # long enough for the connection to be closed
    one.begin(1, 7, "", {}, {1: 1})
    one.send(1, Tag(0, 1, 7), [memoryview(b"rows")])
    assert taken.get(timeout=LIMIT) == (1, 0, b"rows")
    leaving.join(LIMIT)
    assert not leaving.is_alive()


class _NativeCalls:
    """The calls of peers that a relay reports to the native core."""

    def __init__(self):
        self.noted = queue.Queue()

    def note_call(self, *call):
        self.noted.put(call)


@pytest.fixture
def one():
    """A relay, the two ends of its peer, the world's end of its socket, the reported calls, and the
    errors.
    """
    (control, theirs), (rows, their_rows), failed, native = (
        connected(),
        connected(),
        queue.Queue(),
        _NativeCalls(),
    )
    relay = Relay(0, {1: control}, TcpTransport({1: rows}), LIMIT)
    mesh_end = relay.sockets()[1]
    relay.start(native, None, lambda error, rank: failed.put((error, rank)))
    yield relay, theirs, their_rows, mesh_end, native.noted, failed
    for end in (theirs, their_rows, mesh_end):
        end.close()
    relay.close()


def framed(message):
    return len(message).to_bytes(4, "little") + message


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes"),
        ((LONGEST + 1).to_bytes(4, "little"), f"a message of {LONGEST + 1} bytes"),
        (framed(b""), "a message of 0 bytes"),
        (framed(b"h short"), "unknown message b'h short'"),
        (framed(b"?"), "unknown message b'?'"),
        (framed(b"aKeyError\nrank 1\nbad news"), "unknown message b'aKeyError\\nrank 1\\nbad"),
    ],
    ids=["endless", "long", "empty", "short call", "unknown", "error without a rank"],
)
def test_a_malformed_message_names_its_sender(one, frame, problem):
    _, theirs, _, mesh_end, noted, failed = one
    call = CALL.pack(b"h", 3, 7) + b"all_reduce"
    both = framed(call) + framed(b"nnote") + frame
    for byte in range(0, len(both), 5):  # messages arrive in any pieces
        theirs.sendall(both[byte : byte + 5])
    assert noted.get(timeout=LIMIT) == (1, 3, 7, "all_reduce")
    mesh_end.settimeout(LIMIT)
    assert mesh_end.recv(100) == b"nnote"
    error, rank = failed.get(timeout=LIMIT)
    assert (type(error), rank) == (PeerLost, 1)
    assert str(error).startswith(f"rank 1 sent an invalid message to rank 0 ({problem}"), error
    assert mesh_end.recv(100) == b"", "the world receives nothing more of that rank"


def test_unexpected_rows_name_their_sender(one):
    relay, _, their_rows, _, _, failed = one
    relay._send_control = lambda *_: None
    arrivals = network._Arrivals(None, 1, 7)
    relay.begin(1, 7, "", {1: arrivals}, {})
    their_rows.sendall(HEADER.pack(9, 1, 7, 100))
    error, rank = failed.get(timeout=LIMIT)
    assert (type(error), rank) == (PeerLost, 1)
    assert (
        "rank 1 sent an invalid message to rank 0 (rows for lane 9, which receives no more rows in "
        "call 1)" in str(error)
    )


def test_many_messages_at_once(one):
    _, theirs, *_, noted, _ = one
    call = framed(CALL.pack(b"h", 1, 7))
    sending = threading.Thread(target=theirs.sendall, args=(call * 20_000,))
    sending.start()
    for _ in range(20_000):
        noted.get(timeout=LIMIT)
    sending.join(LIMIT)
