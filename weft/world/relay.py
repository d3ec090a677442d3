"""Control between this rank and ranks on other hosts: notes, failures, farewells, and connections.

The relay sends what the world's mesh has for other hosts as letters, by the lines between hosts
(`weft.world.lines`), and hands what arrives there to the mesh. So notes, failures, farewells and
deaths use the same code on one host and on several.

All else, rows, messages, one-sided calls, and what ranks are told of each other's calls, goes by
the connections of the native network (`native/hosts/network.hpp`), of which the relay makes each
when a call first needs it (`weft.world.links`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import weft._native as _native
from weft.errors import MismatchError, PeerLost, WeftError
from weft.outside import printable_lines
from weft.world.control import shutdown
from weft.world.lanes import Lanes, join, started
from weft.world.lines import Lines
from weft.world.links import Links, Ready
from weft.world.transports import TCP, UCX

_NOTICED = 0.5  # seconds until all threads have noticed that a peer hung up
_LINGER = 0.5  # seconds that peers have to receive messages under way and to hang up
_CLOSING = 5.0  # seconds; a close, all of whose waits have limits, takes less
_FAREWELL = b"f"  # a letter
_DROPPED = struct.Struct("<cQ")  # a letter: `M`, and the number of memory without tensors
_Handler = Callable[[int], object]  # takes the events of a descriptor


class Relay:
    """Connections of this rank to its `peers`, the ranks on other hosts, of ranks on these `hosts`.

    `lines` has the connections of lines between hosts that this rank carries at first, by the host;
    `links` makes those of the network, whose rows go by `transport`: TCP, or UCX, whose ranks
    introduce themselves to each other by those connections. `mesh` is that of the world. `at` has
    the address of each rank.
    `surplus` connections are closed once their peers have done so: a peer that has not accepted all
    yet would take this rank for lost.
    `timeout` is the seconds in which a peer must send the rest of its rows to a rank that leaves,
    `addresses` has those of the peers.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        mesh: _native.Mesh,
        lines: Mapping[int, socket.socket],
        at: Sequence[str],
        timeout: float,
        surplus: Sequence[socket.socket] = (),
        transport: str = TCP,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.mesh = mesh
        self.peers = [peer for peer, host in enumerate(hosts) if host != hosts[rank]]
        self.timeout = timeout
        self.addresses = {peer: at[peer] for peer in self.peers}
        self.lines = Lines(rank, hosts, mesh, lines, self._look_again)
        self.surplus = [*surplus]
        self.network: _native.Network | None = None  # from `start` on
        self.regions: _native.Regions | None = None
        self.dropped = deque[int]()  # memory in which this rank has no tensor any more
        self.links = Links(rank, at[rank], self.tell, self._connected, self._not_connected)
        self.wake, self.woken = socket.socketpair()  # to the thread that forwards, when there are
        self.wake.setblocking(False)
        self.forwarding = threading.Lock()  # of lines, and letters of the mesh, in their order
        self.lanes = Lanes(lambda error: self.fail(error, rank))
        self.forwarder: threading.Thread | None = None
        self.resolving = list[threading.Thread]()  # what is wrong with peers
        self.stopping = False  # the thread
        self.changed = True  # what it polls
        self.closing = threading.RLock()  # a signal handler may interrupt a close, and close too
        self.closed = False

    def start(
        self,
        executor: _native.Executor,
        fail: Callable[[BaseException, int], object],
        spins: int,
    ) -> None:
        """Begin to forward messages. `executor` notes the calls of peers; `fail` closes the world
        for an error and the rank that caused it; `spins` is how often waits test before they yield.
        """
        # All live until the world is closed, at the latest when the interpreter ends.
        self.executor = executor
        self.fail = fail
        self.links.pids = executor.pids
        self.network = executor.connect(len(executor.pids), ucx=self.transport == UCX)
        self.regions = _native.Regions(self.peers, self.mesh, self.network, spins)
        self.forwarder = started(lambda error: fail(error, self.rank), self._forward_control)

    def announce_refusal(self, call: int, times: int, why: str) -> None:
        """Soon tell peers that this rank has refused a call so many times, and why."""
        assert self.network is not None
        self.network.announce_refusal(call, times, why)

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        self.wake.close()
        self.woken.close()
        self.lines.close()
        for connection in self.surplus:
            connection.close()
        if self.network is not None:
            self.network.disown()
        self.links.close()

    def hold(self, segment: _native.Segment, part: _native.Mapping) -> None:
        """Let peers use this rank's part of a segment, until they have no tensor in it."""
        assert self.regions is not None
        self.regions.hold(segment.number, part)
        weakref.finalize(segment, _drop, weakref.ref(self), segment.number).atexit = False

    def drop(self, number: int) -> None:
        """Note that this rank has no tensor in memory any more, on any thread at any place."""
        self.dropped.append(number)
        self._wake()

    def _report_dropped(self) -> None:
        """Tell peers in which memory this rank has no tensor any more, each after what this rank
        has requested of it.
        """
        assert self.regions is not None
        while self.dropped:
            number = self.dropped.popleft()
            for peer in self.peers:
                if not self.regions.drop(peer, number):
                    self.tell(peer, _DROPPED.pack(b"M", number))

    def finish(self) -> None:
        """Return when this rank has received all rows that its calls expect and peers have received
        all that it sent, or after the time limits.

        Rows may be for another rank of this host, which would miss them. The farewell goes to all
        ranks of a host, and must not overtake rows that one of them receives for another.
        """
        assert self.network is not None
        self.lanes.end(time.monotonic() + _LINGER)
        self.network.finish(self.timeout, _LINGER)
        self._forward()  # so that the farewell, which other ranks of this host may carry, follows
        self._wake()

    def close(self) -> None:
        """Hang up, once peers have the farewell or the failure that the world has sent, or after
        the time limit. A rank that leaves hands over the lines that it carries.
        """
        with self.closing:
            first = not self.closed
            self.closed = True
            if self.network is not None:
                # no row may arrive in memory that is the caller's again
                self.network.abort()
        if not first:
            return
        if self.forwarder is not None:
            # then this rank has all that others of this host have sent to other hosts through it
            self.mesh.acknowledged(_LINGER)
        leaves = self.forwarder is not None and not self.mesh.failure()[0]
        hands_over = leaves and self.lines.has_heirs()
        deadline = time.monotonic() + _LINGER
        self._forward()
        ending = [] if hands_over else [*self.lines.connections.values()]
        for line in ending:
            line.flush(deadline)
            shutdown(line.connection, socket.SHUT_WR)
        if self.forwarder is not None:  # else nothing has begun, and nobody would notice
            for line in ending:
                line.ended.wait(max(0.0, deadline - time.monotonic()))
        for line in ending:
            shutdown(line.connection, socket.SHUT_RDWR)
        self.lanes.end(deadline + _LINGER)
        self.stopping = True
        self._wake()
        if self.forwarder is not None:
            join([self.forwarder], deadline + _LINGER)
        if hands_over:
            self._forward()
            self.lines.hand_over(deadline)
        if self.network is not None:
            self.network.stop()
        if self.regions is not None:
            self.regions.close()
        self.disown()

    def join(self) -> None:
        """Wait, up to a time limit, for the threads of a relay that is closed; one of them may be
        what closes it. A return from native code to an interpreter that has ended aborts the
        process.
        """
        deadline = time.monotonic() + _CLOSING
        if self.forwarder is not None:
            join([self.forwarder], deadline)
        join(self.resolving, deadline)

    def _note_trouble(self) -> None:
        """Deal with what the network has noticed of peers, each on a thread that may wait."""
        assert self.network is not None
        for kind, peer, call, text in self.network.troubles():
            if kind == _native.Trouble.unconnected:
                self.links.need(peer)
            else:
                self._note(kind, peer, call, text)

    def _note(self, kind: _native.Trouble, peer: int, call: int, text: str) -> None:
        self.resolving.append(
            started(
                lambda error: self.fail(error, self.rank), self._resolve, kind, peer, call, text
            )
        )

    def _connected(self, peer: int, descriptor: int) -> None:
        assert self.network is not None
        self.network.connect(peer, descriptor)

    def _not_connected(self, culprit: int, error: WeftError) -> None:
        if culprit == self.rank:
            self.fail(error, culprit)
        else:
            self._note(_native.Trouble.broken, culprit, 0, str(error))

    def _resolve(self, kind: _native.Trouble, peer: int, call: int, text: str) -> None:
        """Close the world for what is wrong with a peer, unless the peer has hung up: the mesh
        reports that to the calls that need the peer.
        """
        assert self.network is not None
        deadline = time.monotonic() + _NOTICED
        if kind == _native.Trouble.garbled:
            self._fail_garbled(peer, WeftError(text))
        elif kind == _native.Trouble.mismatch:
            own = self.executor.peer_call(self.rank, call)
            while (
                not (theirs := self.executor.peer_call(peer, call)) and time.monotonic() < deadline
            ):
                time.sleep(0.001)
            error = MismatchError.between(call, self.rank, own, peer, printable_lines(theirs))
            self.fail(error, peer)
        elif not self._is_noticed(peer, deadline):
            how = f"cannot be reached any more ({text})"
            self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _is_noticed(self, peer: int, deadline: float) -> bool:
        """Whether this rank learns by then that a peer has left, or of the failure of some rank."""
        assert self.network is not None
        while not (
            self.closed
            or self.network.ended(peer)
            or self.mesh.left(peer)
            or self.mesh.failure()[0]
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _forward_control(self) -> None:
        """Forward control messages between the mesh and peers until the relay is closed."""
        poll, handlers = select.poll(), dict[int, _Handler]()
        linking: Ready = {}
        while not self.stopping:
            before, linking = linking, self.links.ready()
            if self.changed or linking or before:
                self.changed = False
                poll, handlers = self._polled(linking)
            for fd, event in poll.poll():
                if fd in handlers and not self.stopping:
                    handlers[fd](event)
            self._report_dropped()

    def _polled(self, linking: Ready) -> tuple[select.poll, dict[int, _Handler]]:
        """What to poll now, and what to call then."""
        assert self.network is not None
        poll = select.poll()
        handlers: dict[int, _Handler] = {
            self.woken.fileno(): self._woken,
            self.mesh.relay_descriptor: self._from_mesh,
            self.network.trouble_descriptor: lambda event: self._note_trouble(),
            **{each.fileno(): partial(self._drop_surplus, each) for each in self.surplus},
        }
        for fd in handlers:
            poll.register(fd, select.POLLIN)
        for fd, (events, ready) in linking.items():
            poll.register(fd, events)
            handlers[fd] = ready
        for host, line in [*self.lines.connections.items()]:
            poll.register(line.connection, select.POLLIN | (select.POLLOUT if line.unsent else 0))
            handlers[line.connection.fileno()] = partial(self._from_line, host)
        return poll, handlers

    def _from_line(self, host: int, event: int) -> None:
        line = self.lines.connections[host]
        if event & select.POLLOUT and line.advance():
            self.changed = True
        if event & ~select.POLLOUT and not self._receive(
            lambda: self.lines.receive(host), lambda: self.lines.holder(host)
        ):
            with self.forwarding:
                self.lines.end(host, expected=self.closed)
            self.changed = True

    def _receive(self, receive: Callable[[], bool], culprit: Callable[[], int | None]) -> bool:
        """Whether there may be more to receive; a message that is not valid is the `culprit`'s."""
        try:
            return receive()
        except WeftError as error:
            sender = culprit()
            self._fail_garbled(self.rank if sender is None else sender, error)
        except BaseException as error:
            self.fail(error, self.rank)
        return False

    def _woken(self, event: int) -> None:
        self.woken.recv(4096)
        self._from_mesh(event)  # another thread may have taken what told of it

    def _from_mesh(self, event: int) -> None:
        """Forward what the mesh has, and process what it has received for this relay."""
        self._forward()
        for peer, message in self.mesh.arrived():
            self._receive(partial(self._process, peer, message), partial(int, peer))

    def _forward(self) -> None:
        """Send letters of the mesh, without the files of notes, which cannot leave this host."""
        with self.forwarding:
            if self.lines.adopt():
                self.changed = True
            for origin, target, text in self.mesh.outgoing():
                self.lines.send(origin, target, text)

    def tell(self, peer: int, message: bytes) -> None:
        """Send a peer a letter."""
        with self.forwarding:
            self.lines.send(self.rank, peer, message)

    def _look_again(self) -> None:
        self.changed = True
        self._wake()

    def _wake(self) -> None:
        """Let the thread that forwards look at what there is to do."""
        with contextlib.suppress(OSError):  # it is awake, or the world is closed
            self.wake.send(b"!")

    def _process(self, peer: int, message: bytes) -> bool:
        """Process a letter that is not the mesh's; True. Raises `WeftError` for one that is not
        valid.
        """
        assert self.regions is not None
        if message == _FAREWELL:
            self.regions.release_all(peer)
        elif message[:1] == b"M" and len(message) == _DROPPED.size:
            self.regions.release(peer, _DROPPED.unpack(message)[1])
        elif self.links.takes(message):
            self.links.process(peer, message)
        else:
            raise WeftError(f"unknown message {message[:20]!r}")
        return True

    def _fail_garbled(self, peer: int, error: WeftError) -> None:
        how = f"sent an invalid message to rank {self.rank} ({error})"
        self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _drop_surplus(self, connection: socket.socket, event: int) -> None:
        self.surplus.remove(connection)
        connection.close()
        self.changed = True


def _drop(relay: weakref.ref[Relay], number: int) -> None:
    if (found := relay()) is not None:
        found.drop(number)
