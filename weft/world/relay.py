"""Control between this rank and ranks on other hosts: notes, failures, one-sided calls.

To the rest of weft a peer on another host has a Unix socket, as a peer on this host has. The relay
holds the other end of that socket, and forwards its messages over a TCP connection to the peer's
relay, which writes them to a socket of its own. So notes, failures, farewells and deaths use the
same code on one host and on several.

Rows, and what ranks are told of each other's calls, go by connections of the native network
(`native/hosts/network.hpp`), so that no control message waits behind them. They stay in the
connection until the receiver has begun their call. So one-sided calls, which need no call of the
receiver, go by control (`weft.world.remote`).
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import weft._native as _native
from weft.errors import MismatchError, PeerLost, WeftError
from weft.world.control import LONGEST, Control, Landing, shutdown
from weft.world.lanes import Lanes, join, started
from weft.world.remote import KINDS, Remote
from weft.world.transports import TCP, UCX

# Messages of the mesh: a note, a farewell, or a failure with the rank that caused it.
_OF_MESH = re.compile(rb"n|f$|a[^\n]*\n\d{1,9}\n", re.DOTALL)
_NOTICED = 0.5  # seconds until all threads have noticed that a peer hung up
_LINGER = 0.5  # seconds that peers have to receive messages under way and to hang up


class Relay:
    """Connections of this rank to its `peers`, the ranks on other hosts.

    `control` and `rows` have a TCP connection to each of them, one-sided calls go by `remote`.
    Rows go by `transport`: TCP, or UCX, which ranks introduce to each other by those connections.
    `timeout` is the seconds in which a peer must send the rest of its rows to a rank that leaves,
    `addresses` has those of the peers.
    """

    def __init__(
        self,
        rank: int,
        control: Mapping[int, socket.socket],
        rows: Mapping[int, socket.socket],
        timeout: float,
        transport: str = TCP,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.peers = list(control)
        self.timeout = timeout
        self.control = {peer: Control(connection) for peer, connection in control.items()}
        self.addresses = {peer: connection.getpeername()[0] for peer, connection in control.items()}
        self.rows = rows
        # from `start` on; it owns the connections of rows
        self.network: _native.Network | None = None
        self.remote = Remote(rank, control, self._send_request, self._wake)
        self.unsent: set[int] = set()  # peers to whom messages wait for the connection
        self.wake, self.woken = socket.socketpair()  # to the thread that forwards, when there are
        self.wake.setblocking(False)
        self.local_ends: dict[int, socket.socket] = {}
        self.forwarding = {peer: threading.Lock() for peer in control}
        self.hung_up = {peer: threading.Event() for peer in control}
        self.lanes = Lanes(lambda error: self.fail(error, rank))
        self.forwarder: threading.Thread | None = None
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
        ranks = max(self.rank, *self.peers) + 1
        rows = [self.rows[peer].fileno() if peer in self.rows else -1 for peer in range(ranks)]
        self.network = executor.connect(rows, ucx=self.transport == UCX)
        for connection in self.rows.values():
            connection.detach()
        self.forwarder = started(lambda error: fail(error, self.rank), self._forward_control)

    def announce_refusal(self, call: int, times: int, why: str) -> None:
        """Soon tell peers that this rank has refused a call so many times, and why."""
        assert self.network is not None
        self.network.announce_refusal(call, times, why)

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        for end in (*self.local_ends.values(), self.wake, self.woken):
            end.close()
        for control in self.control.values():
            control.connection.close()
        if self.network is not None:
            self.network.disown()
        for connection in self.rows.values():
            connection.close()

    def finish(self) -> None:
        """Return when this rank has received all rows that its calls expect and peers have received
        all that it sent, or after the time limits.

        Rows may be for another rank of this host, which would miss them. The farewell goes to all
        ranks of a host, and must not overtake rows that one of them receives for another.
        """
        assert self.network is not None
        self.lanes.end(time.monotonic() + _LINGER)
        self.network.finish(self.timeout, _LINGER)

    def close(self) -> None:
        """Hang up, once peers have the farewell or the failure that the world has sent, or after
        the time limit.
        """
        with self.closing:
            first = not self.closed
            self.closed = True
            if self.network is not None:
                # no row may arrive in memory that is the caller's again
                self.network.abort()
        self.remote.abandon()
        deadline = time.monotonic() + _LINGER
        if not first:
            return
        for peer, control in self.control.items():
            with contextlib.suppress(OSError):
                while self._forward(peer):
                    pass
            control.flush(deadline)
            shutdown(control.connection, socket.SHUT_WR)
        if self.forwarder is not None:  # else nothing has begun, and nobody would notice
            for hung_up in self.hung_up.values():
                hung_up.wait(max(0.0, deadline - time.monotonic()))
        for control in self.control.values():
            shutdown(control.connection, socket.SHUT_RDWR)
        self.lanes.end(deadline + _LINGER)
        if self.forwarder is not None:
            join([self.forwarder], deadline + _LINGER)
        if self.network is not None:
            self.network.stop()
        self.remote.close()
        self.disown()

    def _note_trouble(self) -> None:
        """Deal with what the network has noticed of peers, each on a thread that may wait."""
        assert self.network is not None
        for trouble in self.network.troubles():
            started(lambda error: self.fail(error, self.rank), self._resolve, *trouble)

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
            self.fail(MismatchError.between(call, self.rank, own, peer, theirs), peer)
        elif not (self.closed or self.network.ended(peer) or self.hung_up[peer].wait(_NOTICED)):
            how = f"cannot be reached any more ({text})"
            self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _forward_control(self) -> None:
        """Forward control messages between the mesh and peers until all peers have hung up."""
        of_mesh = {end.fileno(): peer for peer, end in self.local_ends.items()}
        of_peers = {control.connection.fileno(): peer for peer, control in self.control.items()}
        at = {peer: fd for fd, peer in of_peers.items()}
        assert self.network is not None
        trouble = self.network.trouble_descriptor
        poll = select.poll()
        for fd in (*of_mesh, *of_peers, self.woken.fileno(), trouble):
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
                elif fd == trouble:
                    self._note_trouble()
                else:
                    self.woken.recv(4096)
            self.remote.report_dropped()
            while self.unsent:
                fd = at[self.unsent.pop()]
                if fd in of_peers:
                    poll.modify(fd, select.POLLIN | select.POLLOUT)

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
        """Forward a message of a peer to the mesh, or carry out its one-sided call; the place of
        the bytes that follow it. Raises `WeftError` for any other message.
        """
        if _OF_MESH.match(message):
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
        if self.network is not None:
            self.network.hung_up(peer)
        shutdown(self.local_ends[peer], socket.SHUT_RDWR)
        shutdown(self.control[peer].connection, socket.SHUT_WR)
