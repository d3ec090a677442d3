"""This rank's connections to ranks on other hosts.

All that ranks of two hosts exchange goes by connections of the native network
(`native/hosts/network.hpp`), at most one for two ranks. Two ranks of every two hosts are connected
when a world is made: by them hosts learn of failures and farewells (`native/hosts/control.hpp`).
Each other connection is made when it is first needed, by the thread of this module.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import weft._native as _native
from weft.bootstrap.connector import Connector, wait_for
from weft.bootstrap.listener import Address, Listener
from weft.bootstrap.opening import poll
from weft.bootstrap.threads import join, started
from weft.bootstrap.transports import TCP, UCX
from weft.errors import MismatchError, PeerLost, SymmetricMemoryError
from weft.outside import printable_lines
from weft.world.background import BackgroundCopies

_NOTICED = 0.5  # seconds until all threads have noticed that a peer hung up
_LINGER = 0.5  # seconds that peers have to receive messages under way and to hang up
_LOOK = 0.01  # seconds between two looks whether peers have all that was put to memory
_CLOSING = 5.0  # seconds; a close, all of whose waits have limits, takes less


def first_links(hosts: Sequence[int], rank: int) -> dict[int, int]:
    """The hosts to which a rank is the first link rank of its host, and the rank at the other
    end.
    """
    here = hosts[rank]
    return {
        there: _native.link_ranks(hosts, there, here)[0]
        for there in sorted({*hosts} - {here})
        if _native.link_ranks(hosts, here, there)[0] == rank
    }


class Network:
    """The connections of this rank to its `peers`, the ranks on other hosts, of ranks on these
    `hosts`.

    `addresses` are by peer its pid and where it accepts connections, as this rank does at
    `listener`; rows go by `transport`: TCP, or UCX, whose ranks introduce themselves to each other
    by those connections. `connect` and then `start` are to be called first.

    Attributes: `native` and `regions` (of one-sided calls), from `start` on; `copies`.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[int],
        mesh: _native.Mesh,
        listener: Listener,
        addresses: Mapping[int, tuple[int, Address]],
        transport: str = TCP,
    ) -> None:
        self.rank = rank
        self.hosts = hosts
        self.transport = transport
        self.mesh = mesh
        self.peers = [*addresses]
        self.addresses = {peer: address.host for peer, (_, address) in addresses.items()}
        self.connector = Connector(rank, listener, addresses, self._connected, self._not_connected)
        self.native: _native.Network | None = None
        self.regions: _native.Regions | None = None
        self.control: _native.Control | None = None
        self._first = dict[int, socket.socket]()  # connections that are made before `start`
        self._dropped = deque[int]()  # memory in which this rank has no tensor any more
        self._wake, self._woken = socket.socketpair()  # the thread, when there are
        self._wake.setblocking(False)
        self.copies = BackgroundCopies()
        self.thread: threading.Thread | None = None
        self._resolving = list[threading.Thread]()  # what is wrong with peers
        self._stopping = False  # the thread
        self._closing = threading.RLock()  # a signal handler may interrupt a close, and close too
        self.closed = False

    def connect(self, timeout: float) -> None:
        """Make the connections that every two hosts have; raises as `connector.connect`."""
        wait_for(self.connector, first_links(self.hosts, self.rank).values(), self.rank, timeout)

    def start(
        self,
        executor: _native.Executor,
        fail: Callable[[BaseException, int], object],
        spins: int,
    ) -> None:
        """Begin to send and receive. `executor` notes the calls of peers; `fail` closes the world
        for an error and the rank that caused it; `spins` is how often waits test before they yield.
        """
        # All live until the world is closed, at the latest when the interpreter ends.
        self.executor = executor
        self.fail = fail
        self.native = executor.connect(len(executor.pids), ucx=self.transport == UCX)
        self.regions = _native.Regions(self.peers, self.mesh, self.native, spins)
        self.control = _native.Control(self.rank, self.hosts, self.mesh, self.native, self.regions)
        for peer in [*self._first]:
            self._connected(peer, self._first.pop(peer))
        self.thread = started(lambda error: fail(error, self.rank), self._work)

    def announce_refusal(self, call: int, times: int, why: str) -> None:
        """Soon inform peers that this rank has rejected a call this many times, and why."""
        assert self.native is not None
        self.native.announce_refusal(call, times, why)

    def disown(self) -> None:
        """In a forked child: close its copies of the connections."""
        self._wake.close()
        self._woken.close()
        if self.native is not None:
            self.native.disown()
        for connection in self._first.values():
            connection.close()
        self.connector.close()

    def hold(self, segment: _native.Segment, part: _native.Mapping) -> None:
        """Let peers use this rank's part of a segment, until they have no tensor in it."""
        assert self.regions is not None
        self.regions.hold(segment.number, part)
        weakref.finalize(segment, _drop, weakref.ref(self), segment.number).atexit = False

    def drop(self, number: int) -> None:
        """Note that this rank has no tensor in memory any more, on any thread at any place."""
        self._dropped.append(number)
        self._look()

    def finish(self, timeout: float) -> None:
        """Return when this rank has received all rows that its calls expect, within `timeout`, and
        peers have received all that it sent, or after the time limits.
        """
        assert self.native is not None
        self.copies.end(time.monotonic() + _LINGER)
        self.native.finish(timeout, _LINGER)

    def close(self) -> None:
        """Hang up, once peers have the farewell or the failure that the world has sent, or after
        the time limit.
        """
        with self._closing:
            first = not self.closed
            self.closed = True
            if self.native is not None and self.mesh.failure()[0]:
                # no row may arrive in memory that is the caller's again
                self.native.abort()
        if not first:
            return
        if self.native is not None:
            # then this rank has all that others of this host have sent to other hosts through it
            self.mesh.acknowledged(_LINGER)
            self.native.close(_LINGER)
        deadline = time.monotonic() + _LINGER
        self.copies.end(deadline)
        self._stopping = True
        self._look()
        if self.thread is not None:
            join([self.thread], deadline)
        if self.native is not None:
            self.native.stop()
        if self.regions is not None:
            self.regions.close()
        self.disown()

    def join(self) -> None:
        """Wait, up to a time limit, for the threads of a network that is closed; one of them may be
        what closes it. A return from native code to an interpreter that has ended aborts the
        process.
        """
        deadline = time.monotonic() + _CLOSING
        if self.thread is not None:
            join([self.thread], deadline)
        join(self._resolving, deadline)

    def _work(self) -> None:
        """Make connections, and deal with what the native network notices, until this is closed."""
        assert self.native is not None
        woken = self._woken.fileno()
        events = [(each, select.POLLIN) for each in (woken, self.native.trouble_descriptor)]
        while not self._stopping:
            patience = min(self.connector.patience, _LOOK if self._dropped else math.inf)
            if woken in poll([*events, *self.connector.polled()], patience):
                self._woken.recv(4096)
            self.connector.advance()
            for kind, peer, call, text in self.native.troubles():
                if kind == _native.Trouble.unconnected:
                    self.connector.need(peer)
                else:
                    self._note(kind, peer, call, text)
            self._report_dropped()

    def _report_dropped(self) -> None:
        """Let other hosts know of memory in which this rank has no tensor any more, once they have
        all that this rank has put there.
        """
        assert self.regions is not None
        while self._dropped and (self.mesh.failure()[0] or self.regions.settled()):
            self.mesh.drop(self._dropped.popleft())

    def _look(self) -> None:
        """Let the thread look at what there is to do."""
        with contextlib.suppress(OSError):  # it is awake, or the world is closed
            self._wake.send(b"!")

    def _note(self, kind: _native.Trouble, peer: int, call: int, text: str) -> None:
        """Deal with what is wrong with a peer, on a thread that may wait."""
        self._resolving.append(
            started(
                lambda error: self.fail(error, self.rank), self._resolve, kind, peer, call, text
            )
        )

    def _connected(self, peer: int, connection: socket.socket) -> None:
        if self.native is None:
            self._first[peer] = connection
        else:
            self.native.connect(peer, connection.detach())

    def _not_connected(self, culprit: int, error: BaseException) -> None:
        if self.native is None:
            raise error
        if culprit == self.rank:
            text = f"rank {self.rank} cannot connect to a rank on another host: {error}"
            self.fail(SymmetricMemoryError(text), culprit)
        else:
            self._note(_native.Trouble.broken, culprit, 0, str(error))

    def _resolve(self, kind: _native.Trouble, peer: int, call: int, text: str) -> None:
        """Close the world for what is wrong with a peer, unless the peer has hung up: the mesh
        reports that to the calls that need the peer.
        """
        deadline = time.monotonic() + _NOTICED
        if kind == _native.Trouble.garbled:
            how = f"sent an invalid message to rank {self.rank} ({text})"
            self.fail(PeerLost(f"rank {peer} {how}", how), peer)
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
        assert self.native is not None
        while not (
            self.closed or self.native.ended(peer) or self.mesh.left(peer) or self.mesh.failure()[0]
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


def _drop(network: weakref.ref[Network], number: int) -> None:
    if (found := network()) is not None:
        found.drop(number)
