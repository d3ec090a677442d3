"""Connections between ranks, one for each pair that needs one."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping

import weft._native as _native
from weft.bootstrap.handshake import Accepted, NotProved, OtherUser, Peer
from weft.bootstrap.interfaces import INTERFACE
from weft.bootstrap.listener import PROVING, UNPROVED, Address, Listener, Unproved
from weft.bootstrap.opening import Opening, poll
from weft.errors import PeerLost, PeerTimeout, WeftError

_RANK = struct.Struct("<i")  # that connects
_CONFIRMED = b"\1"  # sent by the rank that accepts a connection
_HANG_UPS = 3  # until a peer that accepts connections counts as lost
_LOOK = 0.1  # seconds between looks at a time limit
_RETRY = 0.01  # seconds after which a peer with a full backlog is tried again


class Outbound:
    """A connection that this rank opens to a peer: `connected` once both ends are authenticated and
    the peer has confirmed it.
    """

    def __init__(self, rank: int, peer: int, pid: int, address: Address) -> None:
        self.rank = rank
        self.peer = peer
        self.pid = pid
        self.address = address
        self.connected = False
        self.opening = self._opening()
        self._hang_ups = 0

    def _opening(self) -> Opening:
        return Opening(self.address, self.address.secret, _RANK.pack(self.rank))

    def advance(self) -> None:
        """Connect and authenticate, without blocking."""
        try:
            proved = self.opening.proved or self.opening.advance()
            self.connected = proved and self._confirmed()
        except OtherUser as error:
            raise another_user(self.peer, self.rank, error.user) from error
        except NotProved as error:  # it serves others than this world now, or too many
            self._hang_ups += 1
            if self._hang_ups == _HANG_UPS:
                raise self.lost() from error
            self.opening.close()
            self.opening = self._opening()
            self.advance()
        except ConnectionError as error:
            raise self.lost() from error
        except OSError as error:
            if not self.address.port:
                raise
            raise self.unreachable(error.strerror or str(error)) from error

    def _confirmed(self) -> bool:
        try:
            if not self.opening.socket.recv(1):
                raise NotProved("the peer has hung up")
        except BlockingIOError:
            if self.opening.ended:
                raise ConnectionResetError("the process has ended") from None
            return False
        return True

    def lost(self) -> PeerLost:
        """The error for a peer that closed the connection."""
        how = "died or gave up"
        if self.address.port:
            how += ", or a firewall refuses connections to it,"
        return PeerLost(
            f"rank {self.peer} (pid {self.pid}) {how} while rank {self.rank} waited to connect to "
            "it",
            how,
        )

    def unreachable(self, why: str) -> PeerTimeout:
        """The error for a peer to which no connection can be opened."""
        hint = (
            f"; is there a firewall? {INTERFACE} sets the network interface, `weft doctor` finds "
            "the cause"
        )
        peer = f"rank {self.peer} (pid {self.pid}){self.address}"
        return PeerTimeout(
            f"rank {self.rank} cannot reach {peer}: {why}{hint if self.address.port else ''}"
        )


def another_user(peer: int, rank: int, user: int) -> WeftError:
    """The error for a peer that runs as another user of this host."""
    return WeftError(
        f"rank {peer} runs as another user than rank {rank}: {user} and {os.getuid()}; run all "
        "ranks of a host as one user, in one user namespace"
    )


class Connector:
    """Connects this rank to `peers`, given by pid and address, each by one connection; it accepts
    theirs at `listener`. `made` takes each connection, `failed` an error and the peer.

    Either end may open a connection, as soon as it needs it, and the other one confirms it by a
    byte. If both open one, that of the lower rank is confirmed. Nothing here waits.
    """

    def __init__(
        self,
        rank: int,
        listener: Listener,
        peers: Mapping[int, tuple[int, Address]],
        made: Callable[[int, socket.socket], object],
        failed: Callable[[int, BaseException], object],
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._made = made
        self._failed = failed
        self.connected = set[int]()
        self._needed = set[int]()
        self._outbound = dict[int, Outbound]()
        self._deferred = dict[int, socket.socket]()  # accepted, while this rank opens one itself
        self._unproved = Unproved(listener, lambda: listener.address.secret, _RANK.size)
        self._unproved.most = len(peers) + UNPROVED
        for each in self._unproved.early():
            self._identify(each)

    def need(self, peer: int) -> None:
        """Let a connection to a peer be made, unless it is."""
        if peer not in self._needed | self.connected:
            self._needed.add(peer)
            self._open(peer)

    def advance(self) -> None:
        """Accept connections, and advance all without blocking."""
        try:
            for each in self._unproved.proved():  # first: a peer may hang up once it is connected
                self._identify(each)
        except OSError as error:
            self._failed(self._rank, error)
        for peer in [*self._outbound]:
            self._go_on(peer)

    def _open(self, peer: int) -> None:
        try:
            self._outbound[peer] = Outbound(self._rank, peer, *self._peers[peer])
        except OSError as error:
            self._failed(self._rank, error)
        else:
            self._go_on(peer)

    def _go_on(self, peer: int) -> None:
        outbound = self._outbound[peer]
        try:
            outbound.advance()
        except (WeftError, OSError) as error:
            self._drop(peer)
            self._failed(self._rank if isinstance(error, OSError) else peer, error)
        else:
            if outbound.connected:
                self._outbound.pop(peer)
                self._take(peer, outbound.opening.detach())

    def _identify(self, proved: Accepted) -> None:
        """Confirm a connection that a peer has opened, unless this rank's own precedes it."""
        (peer,) = _RANK.unpack(proved.about)
        connection = proved.connection
        try:
            Peer(connection).close()
        except OtherUser as error:
            connection.close()
            self._failed(peer, another_user(peer, self._rank, error.user))
            return
        if peer not in self._peers or peer in self.connected:
            connection.close()
        elif self._rank < peer and peer in self._outbound and self._outbound[peer].opening.reached:
            self._replace_deferred(peer, connection)
        else:
            try:
                connection.send(_CONFIRMED)
            except OSError:  # it has hung up
                connection.close()
                return
            self._drop(peer)
            self._take(peer, connection)

    def _take(self, peer: int, connection: socket.socket) -> None:
        self.connected.add(peer)
        self._replace_deferred(peer, None)
        self._made(peer, connection)

    def _replace_deferred(self, peer: int, connection: socket.socket | None) -> None:
        if peer in self._deferred:
            self._deferred.pop(peer).close()
        if connection is not None:
            self._deferred[peer] = connection

    def _drop(self, peer: int) -> None:
        """Drop the connection that this rank is opening to a peer."""
        if peer in self._outbound:
            self._outbound.pop(peer).opening.close()

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        opening = [each for one in self._outbound.values() for each in one.opening.polled()]
        return [*self._unproved.polled(), *opening]

    @property
    def patience(self) -> float:
        """The seconds after which to advance again, even if no descriptor is ready."""
        if not all(each.opening.started for each in self._outbound.values()):
            return _RETRY
        return _LOOK if self._outbound else PROVING

    def close(self) -> None:
        """Close what is not connected."""
        self._unproved.drop()
        for peer in [*self._outbound]:
            self._drop(peer)
        for peer in [*self._deferred]:
            self._replace_deferred(peer, None)

    def unreachable(self) -> list[PeerTimeout]:
        """The errors for peers at whose addresses nobody has answered."""
        waiting = self._outbound.values()
        return [each.unreachable("no answer") for each in waiting if not each.opening.reached]


def connect(
    rank: int, listener: Listener, peers: Mapping[int, tuple[int, Address]], timeout: float
) -> dict[int, socket.socket]:
    """Connect to all `peers`, given by pid and address; connections of other processes delay none.

    Raises `PeerTimeout` naming ranks that did not connect, `PeerLost` one that is dead, `WeftError`
    one that another user runs.
    """
    connections = dict[int, socket.socket]()
    connector = Connector(rank, listener, peers, connections.__setitem__, _raise)
    try:
        wait_for(connector, peers, rank, timeout)
    except BaseException:
        for each in connections.values():
            each.close()
        raise
    finally:
        connector.close()
    for each in connections.values():
        each.setblocking(True)
    return connections


def wait_for(connector: Connector, peers: Iterable[int], rank: int, timeout: float) -> None:
    """Return once peers are connected; raises as `connect`."""
    deadline = _native.Deadline(timeout)
    for peer in peers:
        connector.need(peer)
    while missing := sorted({*peers} - connector.connected):
        if deadline.passed:
            raise next(
                iter(connector.unreachable()),
                PeerTimeout(f"rank {rank} waited {timeout:g} s for ranks {missing} to connect"),
            )
        poll(connector.polled(), min(deadline.left, connector.patience))
        connector.advance()


def _raise(peer: int, error: BaseException) -> None:
    raise error
