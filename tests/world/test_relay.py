"""What goes between hosts, over the loopback: rows come in the order of calls, whichever lane is ahead."""

import queue
import socket
import threading

import pytest

from weft.world.relay import Relay

LIMIT = 20.0  # seconds that anything here may take


class _Expected:
    """What is expected of the peer in a call: a message of each of these lanes."""

    digest = 7

    def __init__(self, call, lanes, taken):
        self.call, self.lanes, self.taken = call, list(lanes), taken

    def let_in(self, lane):
        return True

    def take(self, lane, size, read):
        room = bytearray(size)
        read(memoryview(room))
        self.lanes.remove(lane)
        self.taken.put((self.call, lane, bytes(room)))
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
    relays = [Relay(rank, {1 - rank: (control[rank], rows[rank])}, LIMIT) for rank in range(2)]
    ends = [end for relay in relays for end in relay.sockets().values()]  # which are the mesh's
    for relay in relays:
        relay.start(None, lambda error, rank: pytest.fail(f"rank {rank}: {error}"))
    yield relays
    closing = [threading.Thread(target=relay.close) for relay in relays]
    for each in closing:
        each.start()
    for each in closing:
        each.join(LIMIT)
    for end in ends:
        end.close()


def test_a_lane_that_is_ahead_lets_the_other_finish_its_call(two):
    """Else a rank that waits for the one would not read past the other's next call, which it has not come to."""
    one, other = two
    taken = queue.Queue()
    for relay in two:
        relay._say = lambda *_: None  # there is no native core to be told of calls
    for call in (1, 2):
        one.begin(call, 7, "", {}, {1: 2})
    other.begin(1, 7, "", {0: _Expected(1, (0, 1), taken)}, {})
    ahead = threading.Thread(target=lambda: [one.send(1, 0, call, 7, memoryview(b"lane 0")) for call in (1, 2)])
    ahead.start()
    assert taken.get(timeout=LIMIT) == (1, 0, b"lane 0")
    one.send(1, 1, 1, 7, memoryview(b"lane 1"))
    assert taken.get(timeout=LIMIT) == (1, 1, b"lane 1")
    other.begin(2, 7, "", {0: _Expected(2, (0, 1), taken)}, {})
    one.send(1, 1, 2, 7, memoryview(b"the last"))
    assert {taken.get(timeout=LIMIT) for _ in range(2)} == {(2, 0, b"lane 0"), (2, 1, b"the last")}
    ahead.join(LIMIT)
    assert not ahead.is_alive()


def test_closing_ends_the_wait_for_an_earlier_call(two):
    one, _ = two
    one._say = lambda *_: None
    for call in (1, 2):
        one.begin(call, 7, "", {}, {1: 1})
    waiting = threading.Thread(target=one.send, args=(1, 0, 2, 7, memoryview(b"rows")))
    waiting.start()
    one.close()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


def test_who_leaves_first_takes_what_it_is_owed(two):
    """It may be for another rank of its host."""
    one, other = two
    taken = queue.Queue()
    for relay in two:
        relay._say = lambda *_: None
    other.begin(1, 7, "", {0: _Expected(1, (0,), taken)}, {})
    leaving = threading.Thread(target=other.finish)
    leaving.start()
    leaving.join(0.2)  # as long as it would take to hang up
    one.begin(1, 7, "", {}, {1: 1})
    one.send(1, 0, 1, 7, memoryview(b"rows"))
    assert taken.get(timeout=LIMIT) == (1, 0, b"rows")
    leaving.join(LIMIT)
    assert not leaving.is_alive()
