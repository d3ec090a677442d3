"""Control between this rank and ranks on other hosts: notes, failures, one-sided calls.

The relay sends what the world's mesh has for peers on other hosts over a TCP connection to each,
and hands what arrives there to the mesh. So notes, failures, farewells and deaths use the same code
on one host and on several.

Rows, and what ranks are told of each other's calls, go by connections of the native network
(`native/hosts/network.hpp`), so that no control message waits behind them; they are made when a
call first needs them (`weft.world.links`). Rows stay in the connection until the receiver has begun
their call. So one-sided calls, which need no call of the
receiver, go by control (`weft.world.remote`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import weft._native as _native
from weft.errors import MismatchError, PeerLost, WeftError
from weft.world import links, remote
from weft.world.control import Control, Landing, shutdown
from weft.world.lanes import Lanes, join, started
from weft.world.links import Links, Ready
from weft.world.remote import Remote
from weft.world.transports import TCP, UCX

_NOTICED = 0.5  # seconds until all threads have noticed that a peer hung up
_LINGER = 0.5  # seconds that peers have to receive messages under way and to hang up


class Relay:
    """Connections of this rank to its `peers`, the ranks on other hosts.

    `control` has a TCP connection to each of them, one-sided calls go by `remote`, `links` makes
    connections for rows, which go by `transport`: TCP, or UCX, whose ranks introduce themselves to
    each other by those connections. `mesh` is that of the world.
    `surplus` connections are closed once their peers have done so.
    `timeout` is the seconds in which a peer must send the rest of its rows to a rank that leaves,
    `addresses` has those of the peers.
    """

    def __init__(
        self,
        rank: int,
        mesh: _native.Mesh,
        control: Mapping[int, socket.socket],
        timeout: float,
        surplus: Mapping[int, socket.socket] | None = None,
        transport: str = TCP,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.mesh = mesh
        self.peers = list(control)
        self.timeout = timeout
        self.control = {peer: Control(connection) for peer, connection in control.items()}
        self.addresses = {peer: connection.getpeername()[0] for peer, connection in control.items()}
        self.network: _native.Network | None = None  # from `start` on
        self.links = Links(
            rank,
            {peer: connection.getsockname()[0] for peer, connection in control.items()},
            {**(surplus or {})},
            self._send_control,
            self._connected,
            self._not_connected,
        )
        self.remote = Remote(rank, mesh, control, self._send_request, self._wake)
        self.unsent: set[int] = set()  # peers to whom messages wait for the connection
        self.wake, self.woken = socket.socketpair()  # to the thread that forwards, when there are
        self.wake.setblocking(False)
        self.forwarding = threading.Lock()  # of messages of the mesh, in their order
        self.hung_up = {peer: threading.Event() for peer in control}
        self.lanes = Lanes(lambda error: self.fail(error, rank))
        self.forwarder: threading.Thread | None = None
        self.closing = threading.Lock()
        self.closed = False

    def start(
        self,
        executor: _native.Executor,
        fail: Callable[[BaseException, int], object],
    ) -> None:
        """Begin to forward messages. `executor` notes the calls of peers; `fail` closes the world
        for an error and the rank that caused it.
        """
        # All live until the world is closed, at the latest when the interpreter ends.
        self.executor = executor
        self.fail = fail
        self.links.pids = executor.pids
        self.network = executor.connect(len(executor.pids), ucx=self.transport == UCX)
        self.forwarder = started(lambda error: fail(error, self.rank), self._forward_control)

    def announce_refusal(self, call: int, times: int, why: str) -> None:
        """Soon tell peers that this rank has refused a call so many times, and why."""
        assert self.network is not None
        self.network.announce_refusal(call, times, why)

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        self.wake.close()
        self.woken.close()
        for control in self.control.values():
            control.connection.close()
        if self.network is not None:
            self.network.disown()
        self.links.close()

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
        self._forward()
        for control in self.control.values():
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
        for kind, peer, call, text in self.network.troubles():
            if kind == _native.Trouble.unconnected:
                self.links.need(peer)
            else:
                self._note(kind, peer, call, text)

    def _note(self, kind: _native.Trouble, peer: int, call: int, text: str) -> None:
        started(lambda error: self.fail(error, self.rank), self._resolve, kind, peer, call, text)

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
            self.fail(MismatchError.between(call, self.rank, own, peer, theirs), peer)
        elif not (self.closed or self.network.ended(peer) or self.hung_up[peer].wait(_NOTICED)):
            how = f"cannot be reached any more ({text})"
            self.fail(PeerLost(f"rank {peer} {how}", how), peer)

    def _forward_control(self) -> None:
        """Forward control messages between the mesh and peers until all peers have hung up."""
        of_peers = {control.connection.fileno(): peer for peer, control in self.control.items()}
        at = {peer: fd for fd, peer in of_peers.items()}
        assert self.network is not None
        trouble = self.network.trouble_descriptor
        of_mesh = self.mesh.outgoing_descriptor
        poll = select.poll()
        for fd in (of_mesh, *of_peers, self.woken.fileno(), trouble):
            poll.register(fd, select.POLLIN)
        linking: Ready = {}
        while of_peers:
            for fd in linking:
                poll.unregister(fd)
            linking = self.links.ready()
            for fd, (events, _) in linking.items():
                poll.register(fd, events)
            for fd, event in poll.poll():
                if fd in of_peers:
                    peer = of_peers[fd]
                    if event & select.POLLOUT and self.control[peer].advance():
                        poll.modify(fd, select.POLLIN)
                    if event & ~select.POLLOUT and not self._receive_control(peer):
                        poll.unregister(fd)
                        self._end(of_peers.pop(fd))
                elif fd == of_mesh:
                    self._forward()
                elif fd == trouble:
                    self._note_trouble()
                elif fd in linking:
                    linking[fd][1]()
                else:
                    self.woken.recv(4096)
            self.remote.report_dropped()
            while self.unsent:
                fd = at[self.unsent.pop()]
                if fd in of_peers:
                    poll.modify(fd, select.POLLIN | select.POLLOUT)

    def _forward(self) -> None:
        """Send peers the messages of the mesh, without the files of notes, which cannot leave this
        host.
        """
        with self.forwarding:
            for peer, message in self.mesh.outgoing():
                for each in self.peers if peer == _native.Mesh.all else [peer]:
                    self._send_control(each, message)

    def _send_control(self, peer: int, message: bytes) -> None:
        if not self.control[peer].send(message, urgent=True):
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
        if message[:1] in remote.KINDS:
            return self.remote.process(peer, message)
        if message[:1] in links.KINDS:
            self.links.process(peer, message)
        elif not self.mesh.deliver(peer, message):
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
        self.mesh.disconnected(peer)
        shutdown(self.control[peer].connection, socket.SHUT_WR)
