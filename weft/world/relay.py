"""What a rank has with ranks on other hosts: two connections to each, and what goes over them.

To the rest of weft a peer on another host has a Unix socket as any peer has: its other end is held
here, and what is written to it is carried to the peer's relay, which writes it to a socket there.
So notes, bad news, farewells and deaths have one way on one host and on many. Rows have a
connection of their own, so that nothing of this waits behind them; those of a call are sent before
those of the next, and stay where they are until the peer has come to their call.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Protocol

import weft._native as _native
from weft.errors import MismatchError, PeerLost, WeftError

_LONGEST = 16385  # of a message on the Unix sockets
_OF_WORLDS = re.compile(
    rb"n|f$|a[^\n]*\n\d{1,9}\n", re.DOTALL
)  # how these begin: a note, a farewell, bad news with whose fault it is
_LENGTH = struct.Struct("<I")  # before each that is carried
_CALL = struct.Struct("<cQQ")  # what a rank calls: its number, its digest, then its text
_TEXT = 512  # bytes of that
_ROWS = struct.Struct(
    "<BQQQ"
)  # before rows: the lane that sends them, the call, its digest, their bytes
_AHEAD = 4096  # bytes that are read before it is known what they are
_NOTICED = 0.5  # seconds within which all threads have seen that a peer has hung up, or is
_LINGER = 0.5  # seconds in which peers take what is on its way to them, and hang up as well


Jobs = SimpleQueue[Callable[[], None] | None]


class Arrivals(Protocol):
    """What a call expects of a peer."""

    digest: int

    def let_in(self, lane: int) -> bool:
        """Wait until rows of a lane may come; False if they never may."""

    def take(self, lane: int, size: int, read: Callable[[memoryview], object]) -> bool:
        """Let `read` fill the place of what a lane sends next, as many bytes; whether more will
        come.
        """


class Relay:
    """What this rank has with its `peers`, the ranks on other hosts: a connection for control to
    each, and one for rows.

    `timeout` is the seconds that a peer may take to accept a message that is not of rows, and to
    send what it owes one that leaves.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, tuple[socket.socket, socket.socket]], timeout: float
    ) -> None:
        self.rank, self.peers, self.timeout = rank, list(peers), timeout
        self.control = {peer: control for peer, (control, _) in peers.items()}
        self.rows = {peer: rows for peer, (_, rows) in peers.items()}
        for control, rows in peers.values():
            control.settimeout(timeout)
            for connection in (control, rows):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ends: dict[int, socket.socket] = {}
        self.speaking = {peer: threading.Lock() for peer in peers}  # by `control`
        self.sending = {peer: threading.Condition() for peer in peers}  # by `rows`
        self.unsent: dict[int, deque[list[int]]] = {
            peer: deque() for peer in peers
        }  # calls, with how many messages each still has
        self.heard = {peer: bytearray() for peer in peers}  # the beginning of a message
        self.over = {peer: threading.Event() for peer in peers}  # the peer has hung up
        self.through: set[int] = set()  # peers that have sent all their rows
        self.expected: dict[int, dict[int, Arrivals]] = {
            peer: {} for peer in peers
        }  # by the number of the call
        self.call = 0  # the last that has begun here
        self.begun = threading.Condition()
        self.senders: dict[str, tuple[threading.Thread, Jobs]] = {}  # by lane
        self.receivers: list[threading.Thread] = []
        self.carriers: list[threading.Thread] = []
        self.closing = threading.Lock()
        self.closed = False

    def sockets(self) -> dict[int, socket.socket]:
        """A socket for each peer, for the world's mesh to own."""
        near = {}
        for peer in self.peers:
            near[peer], self.ends[peer] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return near

    def start(self, native: _native.Executor, fail: Callable[[BaseException, int], object]) -> None:
        """Begin to carry messages, and to tell the native core what peers say they call; `fail`
        closes the world for an error and the rank whose fault it is.
        """
        self.executor, self.fail = (
            native,
            fail,
        )  # which live until the world is closed, at the latest when the interpreter ends
        self.receivers = [_started(self._receive, peer) for peer in self.peers]
        self.carriers = [_started(self._carry)]

    def begin(
        self,
        call: int,
        digest: int,
        text: str,
        arrivals: Mapping[int, Arrivals],
        departures: Mapping[int, int],
    ) -> None:
        """Take what peers send in a call from now on, and tell them what this rank calls, so that
        one that calls something else can show both. `departures`: how many messages this rank has
        for each peer.
        """
        for peer, messages in departures.items():
            self.unsent[peer].append([call, messages])
        with self.begun:
            for peer, coming in arrivals.items():
                self.expected[peer][call] = coming
            self.call = call
            self.begun.notify_all()
        message = _CALL.pack(b"h", call, digest) + text.encode()[:_TEXT]
        for peer in self.peers:
            with self.speaking[peer]:
                self._say(peer, message)

    def send(self, peer: int, lane: int, call: int, digest: int, rows: memoryview) -> None:
        """Send rows of a call once all of earlier calls are sent; when this returns they may be
        written over. A peer that has hung up wants none.

        Lanes run ahead of each other, but a peer that waits for what one sends in this call would
        not read the other's next call.
        """
        head, connection, first = (
            _ROWS.pack(lane, call, digest, len(rows)),
            self.rows[peer],
            self.unsent[peer],
        )
        with self._hung_up(peer), self.sending[peer]:
            self.sending[peer].wait_for(lambda: self.closed or first[0][0] == call)
            try:
                sent = connection.sendmsg([head, rows])
                if sent < len(head) + len(rows):
                    connection.sendall(head[sent:])
                    connection.sendall(rows[max(0, sent - len(head)) :])
            finally:
                if not self.closed:
                    first[0][1] -= 1
                    if not first[0][1]:
                        first.popleft()
                        self.sending[peer].notify_all()

    def work(self, lane: str, job: Callable[[], None]) -> None:
        """Do a job on the thread of this lane, after its earlier ones."""
        if lane not in self.senders:
            jobs: Jobs = SimpleQueue()
            self.senders[lane] = _started(self._work, jobs), jobs
        self.senders[lane][1].put(job)
        if self.closed:
            self.senders[lane][1].put(None)

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        for connection in (*self.ends.values(), *self.control.values(), *self.rows.values()):
            connection.close()

    def finish(self) -> None:
        """Return when this rank has all that its calls expect of peers, and they have what it sent,
        or it takes long.

        What comes may be for another rank of this host, which would miss it. A farewell is told to
        all ranks of a host, and would else overtake rows that one of them receives for another.
        """
        with self.begun:
            self.begun.wait_for(
                lambda: self.closed or not any(map(self._owes, self.peers)), self.timeout
            )
        deadline = time.monotonic() + _LINGER
        self._end_senders(deadline)
        for connection in self.rows.values():
            _shut(connection, socket.SHUT_WR)
        _join(self.receivers, deadline)

    def close(self) -> None:
        """Hang up, once peers have the farewell or the bad news that the world has sent, or it has
        waited long.
        """
        with self.closing:
            first, self.closed = not self.closed, True
            for connection in self.rows.values():
                _shut(connection, socket.SHUT_RDWR)
        for waiting in (self.begun, *self.sending.values()):
            with waiting:
                waiting.notify_all()
        deadline = time.monotonic() + _LINGER
        _join(self.receivers, deadline)  # no row may arrive in memory that is the caller's again
        if not first:
            return
        for peer, connection in self.control.items():
            with contextlib.suppress(OSError):
                while self._forward(peer):
                    pass
            _shut(connection, socket.SHUT_WR)
        for over in self.over.values():
            over.wait(max(0.0, deadline - time.monotonic()))
        for connection in self.control.values():
            _shut(connection, socket.SHUT_RDWR)
        self._end_senders(deadline + _LINGER)
        _join(self.carriers, deadline + _LINGER)
        for connection in (*self.ends.values(), *self.control.values(), *self.rows.values()):
            connection.close()

    def _owes(self, peer: int) -> bool:
        """Whether more will come from a peer in calls that have begun here."""
        return (
            bool(self.expected[peer]) and peer not in self.through and not self.over[peer].is_set()
        )

    def _notice(self) -> None:
        """Let those look again who wait for what peers do."""
        with self.begun:
            self.begun.notify_all()

    def _end_senders(self, deadline: float) -> None:
        """Let the threads of lanes end after what they have to do."""
        senders = [*self.senders.values()]
        for _, jobs in senders:
            jobs.put(None)
        _join((thread for thread, _ in senders), deadline)

    def _work(self, jobs: Jobs) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self.fail(error, self.rank)

    @contextlib.contextmanager
    def _hung_up(self, peer: int) -> Iterator[None]:
        """Take no notice that a peer has hung up, of which the mesh tells who misses it. Any other
        error closes the world.
        """
        try:
            yield
        except OSError as error:
            if not (self.closed or peer in self.through or self.over[peer].wait(_NOTICED)):
                how = f"cannot be reached any more ({error.strerror or error})"
                self.fail(PeerLost(f"rank {peer} {how}", how), peer)
        except WeftError as error:
            self._misunderstood(peer, error)
        except BaseException as error:
            self.fail(error, self.rank)

    def _receive(self, peer: int) -> None:
        """Take the rows that a peer sends."""
        stream, head = _Stream(self.rows[peer]), memoryview(bytearray(_ROWS.size))
        with self._hung_up(peer):
            while stream.more():
                stream.read(head)
                lane, call, digest, size = _ROWS.unpack(head)
                if (coming := self._arrivals(peer, call, digest)) is None or not coming.let_in(
                    lane
                ):
                    return
                if not coming.take(lane, size, stream.read):
                    del self.expected[peer][call]
                    self._notice()
            self.through.add(peer)
            self._notice()
            _shut(self.rows[peer], socket.SHUT_WR)  # which says that all has come

    def _arrivals(self, peer: int, call: int, digest: int) -> Arrivals | None:
        """What is expected of a peer in a call, once this rank makes it; None if it never will."""
        if self.call < call:
            with self.begun:
                self.begun.wait_for(lambda: self.call >= call or self.closed)
        if self.closed:
            return None
        coming = self.expected[peer].get(call)
        if coming is None or coming.digest != digest:
            deadline = time.monotonic() + _NOTICED
            while (
                not (theirs := self.executor.peer_call(peer, call)) and time.monotonic() < deadline
            ):
                time.sleep(0.001)
            self.fail(
                MismatchError.between(
                    call, self.rank, self.executor.peer_call(self.rank, call), peer, theirs
                ),
                peer,
            )
            return None
        return coming

    def _carry(self) -> None:
        """Carry what the world writes for peers, and what they write for it, until all have hung
        up.
        """
        peers = {end.fileno(): peer for peer, end in self.ends.items()}
        far = {connection.fileno(): peer for peer, connection in self.control.items()}
        poll = select.poll()
        for fd in (*peers, *far):
            poll.register(fd, select.POLLIN)
        while far:
            for fd, _ in poll.poll():
                if fd in far:
                    if not self._hear(far[fd]):
                        poll.unregister(fd)
                        self._end(far.pop(fd))
                elif not self._spoken(peers[fd]):
                    poll.unregister(fd)

    def _spoken(self, peer: int) -> bool:
        """Carry a message of the world's, if there is one; whether there may be more."""
        try:
            if self._forward(peer):
                return True
        except OSError as error:
            return isinstance(error, BlockingIOError)  # another thread was faster
        if not (
            self.closed or self.over[peer].is_set()
        ):  # not the peer: the world is gone, without a word
            for over in self.over.values():
                over.set()
            self.close()
        return False

    def _forward(self, peer: int) -> bool:
        """Carry the next message of the world's to a peer, without the files that come with notes,
        which stay on this host.
        """
        with self.speaking[peer]:
            message = self.ends[peer].recv(_LONGEST, socket.MSG_DONTWAIT)
            if message:
                self._say(peer, message)
        return bool(message)

    def _say(self, peer: int, message: bytes) -> None:
        try:
            self.control[peer].sendall(_LENGTH.pack(len(message)) + message)
        except (
            OSError
        ):  # noticed by who listens; what is left of the message can not be followed by another
            _shut(self.control[peer], socket.SHUT_RDWR)

    def _hear(self, peer: int) -> bool:
        """Take what a peer has written; whether there may be more."""
        try:
            got = self.control[peer].recv(65536)
        except OSError:
            return False
        heard, begin = self.heard[peer], 0
        heard += got
        try:
            while len(heard) - begin >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(heard, begin)
                if not 0 < size <= _LONGEST:
                    raise WeftError(f"a message of {size} bytes")
                end = begin + _LENGTH.size + size
                if len(heard) < end:
                    break
                self._take(peer, bytes(heard[begin + _LENGTH.size : end]))
                begin = end
        except WeftError as error:
            self._misunderstood(peer, error)
            return False
        del heard[:begin]
        return bool(got)

    def _take(self, peer: int, message: bytes) -> None:
        """Note what a peer says it calls, or give the world what it has written to it. Raises
        `WeftError` for anything else.
        """
        if message[:1] == b"h" and len(message) >= _CALL.size:
            _, call, digest = _CALL.unpack_from(message)
            self.executor.note_call(
                peer, call, digest, message[_CALL.size :].decode(errors="replace")
            )
        elif _OF_WORLDS.match(message):
            with contextlib.suppress(OSError):  # the world is closed
                self.ends[peer].send(message)
        else:
            raise WeftError(f"a message {message[:20]!r}")

    def _misunderstood(self, peer: int, what: WeftError) -> None:
        how = f"sent what rank {self.rank} does not understand ({what})"
        self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _end(self, peer: int) -> None:
        """A peer has hung up: let the world know, and the peer that it was heard."""
        self.over[peer].set()
        self._notice()
        _shut(self.ends[peer], socket.SHUT_RDWR)
        _shut(self.control[peer], socket.SHUT_WR)


class _Stream:
    """What comes over a connection, a little of it read ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.room, self.ahead = (
            connection,
            memoryview(bytearray(_AHEAD)),
            memoryview(b""),
        )

    def more(self) -> bool:
        """Wait until there is something to read; False at the end."""
        if not self.ahead:
            self.ahead = self.room[: self.connection.recv_into(self.room)]
        return bool(self.ahead)

    def read(self, into: memoryview) -> None:
        """Fill this place with what comes next."""
        got = min(len(into), len(self.ahead))
        into[:got], self.ahead = self.ahead[:got], self.ahead[got:]
        while got < len(into):
            more = self.connection.recv_into(into[got:], 0, socket.MSG_WAITALL)
            if not more:
                raise ConnectionResetError("it hung up in the middle of a message")
            got += more


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread:
    """A thread that does not interrupt others that compute: where all cores are busy it waits some
    milliseconds for its turn.
    """

    def run() -> None:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # whoever chose another policy knows better
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        target(*arguments)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # it is already
        connection.shutdown(how)
