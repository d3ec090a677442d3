"""Control between this rank and ranks on other hosts: calls, failures, and the order of rows.

To the rest of weft a peer on another host has a Unix socket, as a peer on this host has. The relay
holds the other end of that socket, and forwards its messages over a TCP connection to the peer's
relay, which writes them to a socket of its own. So notes, failures, farewells and deaths use the
same code on one host and on several.

Rows go by a `Transport`, so that no control message waits behind them. Rows of a call are sent
before rows of the next, and stay in the transport until the receiver has begun their call. So
one-sided calls, which need no call of the receiver, go by control (`weft.world.remote`).
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import weft._native as _native
from weft.errors import MismatchError, PeerLost, WeftError
from weft.world.control import LONGEST, Control, Landing
from weft.world.lanes import Lanes, join, started
from weft.world.remote import KINDS, Remote
from weft.world.tcp import shutdown
from weft.world.transport import Buffer, Tag, Transport

# Messages of the mesh: a note, a farewell, or a failure with the rank that caused it.
_OF_MESH = re.compile(rb"n|f$|a[^\n]*\n\d{1,9}\n", re.DOTALL)
# of a call: its number and its digest, or how often it was refused; its text, or the error, follows
CALL = struct.Struct("<cQQ")
_TEXT = 512  # bytes of that text
_AT_ONCE = 1 << 18
"""Bytes up to which the caller's thread sends rows as far as it need not wait.

Measured on two hosts of 2 cores: all-to-all of 8 bytes takes 54 us, with the call cache, and 110 to
170 before both (`weft bench all-to-all --sizes 8:256K:8`).
"""
_TOGETHER = 1e-3
"""Seconds in which calls are begun that peers are told of by one message.

Measured on two hosts of 2 cores: all-to-all of 8 bytes takes 43 us instead of 54.
"""
_NOTICED = 0.5  # seconds until all threads have noticed that a peer hung up
_LINGER = 0.5  # seconds that peers have to receive messages under way and to hang up


class Arrivals(Protocol):
    """The rows that a call expects from a peer."""

    digest: int

    def open_gate(self, lane: int) -> bool:
        """Wait until rows of a lane may be received; False if the world fails first."""

    def receive(self, lane: int, size: int, read: Callable[[memoryview], object]) -> bool:
        """Let `read` fill the place of the next message of a lane, `size` bytes; whether more
        messages follow.
        """


class _Outbox:
    """The messages to send to one peer, call after call, one thread at a time.

    `calls` has the calls with unsent messages, and their number; `queued` counts the messages that
    wait for a thread of a lane.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.calls: deque[list[int]] = deque()
        self.sending = False
        self.queued = 0

    def is_turn(self, call: int) -> bool:
        """Whether a message of a call may be sent now."""
        return not self.sending and self.calls[0][0] == call

    def sent(self, messages: int) -> None:
        """Let another thread send, after this number of messages."""
        with self.changed:
            self.sending = False
            self.calls[0][1] -= messages
            if not self.calls[0][1]:
                self.calls.popleft()
            self.changed.notify_all()


class Relay:
    """Connections of this rank to its `peers`, the ranks on other hosts.

    `control` has a TCP connection to each of them, rows go by `transport`, and one-sided calls by
    `remote`. `timeout` is the seconds in which a peer must send the rest of its rows to a rank that
    leaves.
    """

    def __init__(
        self,
        rank: int,
        control: Mapping[int, socket.socket],
        transport: Transport,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.peers = list(control)
        self.timeout = timeout
        self.control = {peer: Control(connection) for peer, connection in control.items()}
        self.transport = transport
        self.remote = Remote(rank, control, self._send_request, self._wake)
        self.unsent: set[int] = set()  # peers to whom messages wait for the connection
        self.wake, self.woken = socket.socketpair()  # to the thread that forwards, when there are
        self.wake.setblocking(False)
        self.local_ends: dict[int, socket.socket] = {}
        self.announcing = threading.Lock()
        self.forwarding = {peer: threading.Lock() for peer in control}
        self.outboxes = {peer: _Outbox() for peer in control}
        self.hung_up = {peer: threading.Event() for peer in control}
        self.rows_ended: set[int] = set()  # peers that have sent all their rows
        # by peer and the number of the call
        self.expected: dict[int, dict[int, Arrivals]] = {peer: {} for peer in control}
        self.call = 0  # the latest that has begun here
        self.unannounced: deque[bytes] = deque()  # calls that peers have not been told of
        self.begun = threading.Event()  # whether there are any
        self.changed = threading.Condition()
        self.lanes = Lanes(lambda error: self.fail(error, rank))
        self.receivers: list[threading.Thread] = []
        self.forwarders: list[threading.Thread] = []
        self.closing = threading.Lock()
        self.closed = False

    def sockets(self) -> dict[int, socket.socket]:
        """A socket for each peer, for the world's mesh to own."""
        of_mesh = {}
        for peer in self.peers:
            of_mesh[peer], self.local_ends[peer] = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
        return of_mesh

    def start(
        self,
        executor: _native.Executor,
        mesh: _native.Mesh,
        fail: Callable[[BaseException, int], object],
    ) -> None:
        """Begin to forward messages. `executor` notes the calls of peers; `fail` closes the world
        for an error and the rank that caused it.
        """
        # All live until the world is closed, at the latest when the interpreter ends.
        self.executor = executor
        self.fail = fail
        self.remote.serve(mesh)

        def failed(error: BaseException) -> None:
            fail(error, self.rank)

        self.receivers = [started(failed, self._receive_rows, peer) for peer in self.peers]
        self.forwarders = [
            started(failed, each) for each in (self._forward_control, self._announce_calls)
        ]

    def begin(
        self,
        call: int,
        digest: int,
        text: str,
        arrivals: Mapping[int, Arrivals],
        departures: Mapping[int, int],
    ) -> None:
        """Receive the rows of a call from now on, and soon send peers the call's digest and text,
        so that a mismatch shows both. `departures` is the number of messages for each peer.
        """
        for peer, messages in departures.items():
            self.outboxes[peer].calls.append([call, messages])
        with self.changed:
            for peer, coming in arrivals.items():
                self.expected[peer][call] = coming
            self.call = call
            self.changed.notify_all()
        self._announce_soon(b"h", call, digest, text)

    def announce_refusal(self, call: int, times: int, why: str) -> None:
        """Soon tell peers that this rank has refused a call so many times, and why."""
        self._announce_soon(b"r", call, times, why)

    def _announce_soon(self, kind: bytes, call: int, number: int, text: str) -> None:
        self.unannounced.append(CALL.pack(kind, call, number) + text.encode()[:_TEXT])
        self.begun.set()

    def send(self, peer: int, tag: Tag, messages: Sequence[memoryview]) -> None:
        """Send messages once all those of earlier calls are sent; afterwards their rows may be
        overwritten. Rows for a peer that has hung up are dropped.

        One lane may be a call ahead of another. Its rows wait here: a peer that still needs the
        other lane's rows would not read past them.
        """
        outbox = self.outboxes[peer]
        with outbox.changed:
            outbox.changed.wait_for(lambda: self.closed or outbox.is_turn(tag.call))
            outbox.sending = True
        self._send(peer, messages, lambda: self.transport.begin(peer, tag, messages))

    def post(
        self,
        lane: str,
        peer: int,
        tag: Tag,
        messages: Sequence[memoryview],
        done: Callable[[], None],
    ) -> None:
        """Send messages as `send` does and call `done`, on this thread if that need not wait, or
        else on that of `lane`.
        """
        outbox = self.outboxes[peer]
        few = sum(map(len, messages)) <= _AT_ONCE
        with outbox.changed:
            begins = few and not outbox.queued and outbox.is_turn(tag.call)
            outbox.sending = outbox.sending or begins
            outbox.queued += 1
        rest: Sequence[Buffer] = ()
        if begins:
            with self._tolerates_hang_up(peer):
                rest = self.transport.begin(peer, tag, messages)

        def finish() -> None:
            if begins:
                self._send(peer, messages, lambda: rest)
            else:
                self.send(peer, tag, messages)
            with outbox.changed:
                outbox.queued -= 1
            done()

        if begins and not rest:
            finish()
        else:
            self.lanes.submit(lane, finish)

    def _send(
        self, peer: int, messages: Sequence[memoryview], begin: Callable[[], Sequence[Buffer]]
    ) -> None:
        """Send what `begin` leaves of messages, while it is this thread's turn."""
        try:
            with self._tolerates_hang_up(peer):
                self.transport.finish(peer, begin())
        finally:
            if not self.closed:
                self.outboxes[peer].sent(len(messages))

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        for end in (*self.local_ends.values(), self.wake, self.woken):
            end.close()
        for control in self.control.values():
            control.connection.close()
        self.transport.close()

    def finish(self) -> None:
        """Return when this rank has received all rows that its calls expect and peers have received
        all that it sent, or after the time limits.

        Rows may be for another rank of this host, which would miss them. The farewell goes to all
        ranks of a host, and must not overtake rows that one of them receives for another.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or not any(map(self._is_incomplete, self.peers)), self.timeout
            )
        deadline = time.monotonic() + _LINGER
        self.lanes.end(deadline)
        for peer in self.peers:
            self.transport.end(peer)
        join(self.receivers, deadline)

    def close(self) -> None:
        """Hang up, once peers have the farewell or the failure that the world has sent, or after
        the time limit.
        """
        with self.closing:
            first = not self.closed
            self.closed = True
            self.transport.abort()
        self.remote.abandon()
        self.begun.set()
        for waiting in (self.changed, *(outbox.changed for outbox in self.outboxes.values())):
            with waiting:
                waiting.notify_all()
        deadline = time.monotonic() + _LINGER
        join(self.receivers, deadline)  # no row may arrive in memory that is the caller's again
        if not first:
            return
        for peer, control in self.control.items():
            with contextlib.suppress(OSError):
                while self._forward(peer):
                    pass
            control.flush(deadline)
            shutdown(control.connection, socket.SHUT_WR)
        if self.forwarders:  # else nothing has begun, and nobody would notice
            for hung_up in self.hung_up.values():
                hung_up.wait(max(0.0, deadline - time.monotonic()))
        for control in self.control.values():
            shutdown(control.connection, socket.SHUT_RDWR)
        self.lanes.end(deadline + _LINGER)
        join(self.forwarders, deadline + _LINGER)
        self.remote.close()
        self.disown()

    def _is_incomplete(self, peer: int) -> bool:
        """Whether a peer will send more rows of calls that have begun here."""
        ended = peer in self.rows_ended or self.hung_up[peer].is_set()
        return bool(self.expected[peer]) and not ended

    def _notify_changed(self) -> None:
        """Wake the threads that wait for a call or for a peer."""
        with self.changed:
            self.changed.notify_all()

    @contextlib.contextmanager
    def _tolerates_hang_up(self, peer: int) -> Iterator[None]:
        """Ignore that a peer has hung up: the mesh reports it to the calls that need the peer. Any
        other error closes the world.
        """
        try:
            yield
        except OSError as error:
            ended = peer in self.rows_ended
            if not (self.closed or ended or self.hung_up[peer].wait(_NOTICED)):
                how = f"cannot be reached any more ({error.strerror or error})"
                self.fail(PeerLost(f"rank {peer} {how}", how), peer)
        except WeftError as error:
            self._fail_garbled(peer, error)
        except BaseException as error:
            self.fail(error, self.rank)

    def _receive_rows(self, peer: int) -> None:
        """Receive the rows of a peer until it ends."""

        def read(rows: memoryview) -> None:
            self.transport.receive(peer, rows)

        with self._tolerates_hang_up(peer):
            while message := self.transport.poll(peer):
                tag, size = message
                coming = self._arrivals(peer, tag.call, tag.digest)
                if coming is None or not coming.open_gate(tag.lane):
                    return
                if not coming.receive(tag.lane, size, read):
                    del self.expected[peer][tag.call]
                    self._notify_changed()
            self.rows_ended.add(peer)
            self._notify_changed()
            self.transport.end(peer)  # acknowledges all rows

    def _arrivals(self, peer: int, call: int, digest: int) -> Arrivals | None:
        """The rows that a call expects from a peer, once this rank has begun the call; None if it
        makes another call or closes the world.
        """
        if self.call < call:
            with self.changed:
                self.changed.wait_for(lambda: self.call >= call or self.closed)
        if self.closed:
            return None
        coming = self.expected[peer].get(call)
        if coming is None or coming.digest != digest:
            deadline = time.monotonic() + _NOTICED
            while (
                not (theirs := self.executor.peer_call(peer, call)) and time.monotonic() < deadline
            ):
                time.sleep(0.001)
            own = self.executor.peer_call(self.rank, call)
            self.fail(MismatchError.between(call, self.rank, own, peer, theirs), peer)
            return None
        return coming

    def _forward_control(self) -> None:
        """Forward control messages between the mesh and peers until all peers have hung up."""
        of_mesh = {end.fileno(): peer for peer, end in self.local_ends.items()}
        of_peers = {control.connection.fileno(): peer for peer, control in self.control.items()}
        at = {peer: fd for fd, peer in of_peers.items()}
        poll = select.poll()
        for fd in (*of_mesh, *of_peers, self.woken.fileno()):
            poll.register(fd, select.POLLIN)
        while of_peers:
            for fd, event in poll.poll():
                if fd in of_peers:
                    peer = of_peers[fd]
                    if event & select.POLLOUT and self.control[peer].advance():
                        poll.modify(fd, select.POLLIN)
                    if event & ~select.POLLOUT and not self._receive_control(peer):
                        poll.unregister(fd)
                        self._end(of_peers.pop(fd))
                elif fd in of_mesh:
                    if not self._forward_of_mesh(of_mesh[fd]):
                        poll.unregister(fd)
                else:
                    self.woken.recv(4096)
            self.remote.report_dropped()
            while self.unsent:
                fd = at[self.unsent.pop()]
                if fd in of_peers:
                    poll.modify(fd, select.POLLIN | select.POLLOUT)

    def _announce_calls(self) -> None:
        """Send peers the calls that have begun here, those of a moment together: each message wakes
        a thread of the peer, which takes as long as a call of few rows.
        """
        while True:
            self.begun.wait()
            self.begun.clear()  # before the look at `closed`, which is set first
            if self.closed:
                return
            time.sleep(_TOGETHER)
            self._announce()

    def _announce(self) -> None:
        with self.announcing:
            calls = [self.unannounced.popleft() for _ in range(len(self.unannounced))]
            for peer in self.peers if calls else ():
                self._send_control(peer, *calls)

    def _forward_of_mesh(self, peer: int) -> bool:
        """Forward a message of the mesh if there is one; whether there may be more."""
        try:
            if self._forward(peer):
                return True
        except OSError as error:
            return isinstance(error, BlockingIOError)  # another thread was faster
        if not (self.closed or self.hung_up[peer].is_set()):
            # The world was destroyed without a farewell.
            for hung_up in self.hung_up.values():
                hung_up.set()
            self.close()
        return False

    def _forward(self, peer: int) -> bool:
        """Forward the next message of the mesh to a peer, without the files of notes, which cannot
        leave this host; False at the end.
        """
        self._announce()
        with self.forwarding[peer]:
            message = self.local_ends[peer].recv(LONGEST, socket.MSG_DONTWAIT)
            if message:
                self._send_control(peer, message)
        return bool(message)

    def _send_control(self, peer: int, *messages: bytes) -> None:
        if not self.control[peer].send(*messages, urgent=True):
            self._send_later(peer)

    def _send_request(self, peer: int, message: bytes, payload: memoryview | None) -> None:
        if not self.control[peer].send(message, payload=payload, urgent=False):
            self._send_later(peer)

    def _send_later(self, peer: int) -> None:
        """Let the thread that forwards send the rest."""
        self.unsent.add(peer)
        self._wake()

    def _wake(self) -> None:
        """Let the thread that forwards look at what there is to do."""
        with contextlib.suppress(OSError):  # it is awake, or the world is closed
            self.wake.send(b"!")

    def _receive_control(self, peer: int) -> bool:
        """Process what has arrived from a peer; whether there may be more."""
        try:
            return self.control[peer].receive(partial(self._process, peer))
        except WeftError as error:
            self._fail_garbled(peer, error)
        except BaseException as error:
            self.fail(error, self.rank)
        return False

    def _process(self, peer: int, message: bytes) -> Landing | None:
        """Note a call or refusal of a peer, forward its message to the mesh, or carry out its
        one-sided call; the place of the bytes that follow it. Raises `WeftError` for any other
        message.
        """
        if message[:1] in (b"h", b"r") and len(message) >= CALL.size:
            kind, call, number = CALL.unpack_from(message)
            note = self.executor.note_call if kind == b"h" else self.executor.note_refusal
            note(peer, call, number, message[CALL.size :].decode(errors="replace"))
        elif _OF_MESH.match(message):
            with contextlib.suppress(OSError):  # the world is closed
                self.local_ends[peer].send(message)
        elif message[:1] in KINDS:
            return self.remote.process(peer, message)
        else:
            raise WeftError(f"unknown message {message[:20]!r}")
        return None

    def _fail_garbled(self, peer: int, error: WeftError) -> None:
        how = f"sent an invalid message to rank {self.rank} ({error})"
        self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _end(self, peer: int) -> None:
        """Report to the world that a peer has closed its connection, and close this end."""
        self.hung_up[peer].set()
        self.remote.forget_peer(peer)
        self._notify_changed()
        shutdown(self.local_ends[peer], socket.SHUT_RDWR)
        shutdown(self.control[peer].connection, socket.SHUT_WR)
