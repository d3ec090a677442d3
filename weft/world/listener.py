"""Connections between ranks: each rank listens, and every two connect to each other, on one host by
Unix sockets and between hosts by TCP.

Unix sockets have abstract addresses, which vanish with their owners and cannot be reached from
another host (a network namespace is one); the peer must be the same user. At the beginning of every
connection both ends prove that they have a secret that ranks exchange in the rendezvous
(`weft.world.handshake`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import weft._native as _native
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.world.handshake import Accepted, Caller, NotProved, OtherUser, Peer, name_of
from weft.world.topology import read_text

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names the interface to use, to gloo too
_RANK = struct.Struct("<i")  # that connects
_CONFIRMED = b"\1"  # sent by the rank that accepts a connection
_LISTEN_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
UNPROVED = 64  # accepted connections that are not proved, in addition to one for each peer
PROVING = 10.0  # seconds that they have
_HANG_UPS = 3  # of a peer that accepts connections, until it is taken for lost
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOOK = 0.1  # seconds between looks at a time limit
_RETRY = 0.01  # seconds after which a peer with a full backlog is tried again
_IN_PROGRESS = (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Address:
    """The address at which a rank listens, and its secret: a host and a port, or the name of a Unix
    socket and no port. For other hosts it has the port at which the rank accepts connections of its
    world, and what it offers for rows (`weft.world.transports.offered`).
    """

    host: str
    port: int
    secret: bytes
    offer: str = ""
    port_of_world: int = 0

    def __post_init__(self) -> None:
        for port in (self.port, self.port_of_world):
            if not 0 <= port < 1 << 16:
                raise ValueError(f"a port is from 0 to 65535; got {port}")

    @property
    def family(self) -> socket.AddressFamily:
        return family_of(self.host) if self.port else socket.AF_UNIX

    @property
    def of_world(self) -> Address:
        """The address for connections of the world."""
        return replace(self, port=self.port_of_world)

    @property
    def at(self) -> str | tuple[str, int]:
        """The address in the form that sockets take."""
        return (self.host, self.port) if self.port else self.host

    def __str__(self) -> str:
        return f" at {self.host}, port {self.port}" if self.port else ""


class Listener:
    """A listening socket of this rank, at `address`: a port of this `host`, or a Unix socket
    without one.
    """

    def __init__(self, host: str = "") -> None:
        name = f"\0weft-{secrets.token_hex(16)}"
        self.socket = _nonblocking(family_of(host) if host else socket.AF_UNIX)
        try:
            self.socket.bind((host, 0) if host else name)
            self.socket.listen(_LISTEN_BACKLOG)
            port = self.socket.getsockname()[1] if host else 0
        except BaseException:
            self.socket.close()
            raise
        self.address = Address(host or name, port, secrets.token_bytes(16))
        self.early: list[Accepted] | None = None

    def keep_early(self) -> None:
        """From now on keep connections with another secret for a later `connect`, when that may be
        the listener's: a peer may be an attempt ahead.
        """
        self.early = self.early or []

    def close(self) -> None:
        for each in self.early or ():
            each.connection.close()
        self.early = None
        self.socket.close()


class Outbound:
    """A connection that this rank opens to a peer: `started` unless the peer's backlog is full,
    `connected` once both have proved themselves, and the peer has confirmed it.
    """

    def __init__(self, rank: int, peer: int, pid: int, address: Address) -> None:
        self.rank = rank
        self.peer = peer
        self.pid = pid
        self.address = address
        self.socket = _nonblocking(address.family)
        self.started = False
        self.connected = False
        self._proof: Caller | None = None
        self._process: Peer | None = None
        self._hang_ups = 0

    def advance(self) -> None:
        """Connect and prove this rank, as far as possible without waiting."""
        try:
            if self._process is not None and self._process.ended:
                raise self.lost()
            if self._proof is None and not self._begin():
                return
            assert self._proof is not None
            self.connected = self._proof.advance() and self._confirmed()
        except OtherUser as error:
            raise another_user(self.peer, self.rank, error.user) from error
        except NotProved as error:  # it serves others than this world now, or too many
            self._hang_ups += 1
            if self._hang_ups == _HANG_UPS:
                raise self.lost() from error
            self.close()
            self.socket = _nonblocking(self.address.family)
            self._proof = None
            self.advance()
        except ConnectionError as error:
            raise self.lost() from error
        except OSError as error:
            if self.address.family == socket.AF_UNIX:
                raise
            raise self.unreachable(error.strerror or str(error)) from error

    def _begin(self) -> bool:
        """Whether the connection is made, of which then the proof begins."""
        code = self.socket.connect_ex(self.address.at)
        self.started = code != errno.EAGAIN
        if code in _IN_PROGRESS:
            return False
        if code not in (0, errno.EISCONN):
            raise OSError(code, os.strerror(code))
        self._process = Peer(self.socket)
        self._proof = Caller(self.socket, self.address.secret, _RANK.pack(self.rank))
        return True

    def _confirmed(self) -> bool:
        try:
            if not self.socket.recv(1):
                raise NotProved("the peer has hung up")
        except BlockingIOError:
            return False
        return True

    @property
    def reached(self) -> bool:
        """Whether somebody listens at the peer's address."""
        return self._proof is not None

    def close(self) -> None:
        self.detach().close()

    def detach(self) -> socket.socket:
        """The connection, without what is needed until it is made."""
        if self._process is not None:
            self._process.close()
            self._process = None
        return self.socket

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll: writable, or readable while the peer is to prove
        itself and to confirm; and the end of its process.
        """
        if not self.started:
            return []
        event = select.POLLOUT if self._proof is None else select.POLLIN
        process = self._process.polled() if self._process is not None else []
        return [(self.socket.fileno(), event), *process]

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


class Unproved:
    """Connections that a listener has accepted and that have not proved themselves yet, by `key`,
    saying something of `about` bytes of themselves. They are at most `most`, each for some seconds:
    so strangers take a bounded number of files and bytes, and delay no peer.
    """

    def __init__(self, listener: Listener, key: Callable[[], bytes], about: int) -> None:
        self.listener = listener
        self.most = UNPROVED
        self._key = key
        self._about = about
        self._waiting: dict[Accepted, float] = {}  # until when, in the order of acceptance

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        sockets = (self.listener.socket, *(each.connection for each in self._waiting))
        return [(each.fileno(), select.POLLIN) for each in sockets]

    def proved(self) -> list[Accepted]:
        """Accept the connections in the backlog, and go on with all as far as possible without
        waiting; those that are proved now. Raises `OSError` if this process lacks files for one.
        """
        now = time.monotonic()
        found = [each for each in [*self._waiting] if self._advance(each)]
        for each in [each for each, until in self._waiting.items() if until < now]:
            self._close(each)
        for _ in range(_LISTEN_BACKLOG):
            try:
                connection, _ = self.listener.socket.accept()
            except BlockingIOError:
                break
            except ConnectionError:  # closed again
                continue
            except OSError as error:
                strangers = [each for each in self._waiting if not each.key_name]
                if error.errno not in _EXHAUSTED or not strangers:
                    raise
                for each in strangers:
                    self._close(each)
                break
            connection.setblocking(False)
            accepted = Accepted(connection, self._about)
            self._waiting[accepted] = now + PROVING
            if self._advance(accepted):
                found.append(accepted)
            self.drop(keep=self.most)
        return found

    def early(self) -> list[Accepted]:
        """Go on with connections that the listener has kept; those that are proved now."""
        found = self.listener.early or []
        if found:
            self.listener.early = []
        self._waiting |= dict.fromkeys(found, time.monotonic() + PROVING)
        return [each for each in found if self._advance(each)]

    def drop(self, keep: int = 0) -> None:
        """Close connections except the last `keep`, first those that name no key of this process:
        its peers name it at once.
        """
        surplus = len(self._waiting) - keep
        if surplus > 0:
            for each in sorted(self._waiting, key=lambda each: bool(each.key_name))[:surplus]:
                self._close(each)

    def _close(self, accepted: Accepted) -> None:
        del self._waiting[accepted]
        accepted.connection.close()

    def _advance(self, accepted: Accepted) -> bool:
        """Whether a connection is proved now, and waits no longer. One that cannot prove itself is
        closed, or kept for later if the listener keeps those of another key.
        """
        try:
            early = self.listener.early
            if early is not None and accepted.named() and accepted.key_name != name_of(self._key()):
                del self._waiting[accepted]
                early.append(accepted)
                if len(early) > self.most:
                    early.pop(0).connection.close()
                return False
            proved = accepted.advance(self._key())
        except OSError:
            self._close(accepted)
            return False
        if proved:
            del self._waiting[accepted]
        return proved


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
        """Accept connections, and go on with all as far as possible without waiting."""
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
                self._take(peer, outbound.detach())

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
        elif self._rank < peer and peer in self._outbound and self._outbound[peer].reached:
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
        """Give up the connection that this rank opens to a peer."""
        if peer in self._outbound:
            self._outbound.pop(peer).close()

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll."""
        opening = [each for one in self._outbound.values() for each in one.polled()]
        return [*self._unproved.polled(), *opening]

    @property
    def patience(self) -> float:
        """The seconds after which to go on, whatever the descriptors tell."""
        if not all(each.started for each in self._outbound.values()):
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
        return [each.unreachable("no answer") for each in waiting if not each.reached]


def connect(
    rank: int, listener: Listener, peers: Mapping[int, tuple[int, Address]], timeout: float
) -> dict[int, socket.socket]:
    """Connect to all `peers`, given by pid and address; connections of other processes delay none.

    Raises `PeerTimeout` naming ranks that did not connect, `PeerLost` one that is gone, `WeftError`
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


def _nonblocking(family: int) -> socket.socket:
    made = socket.socket(
        family, socket.SOCK_SEQPACKET if family == socket.AF_UNIX else socket.SOCK_STREAM
    )
    made.setblocking(False)
    return made


def poll(events: Iterable[tuple[int, int]], seconds: float) -> set[int]:
    """The descriptors that are ready within `seconds`."""
    poll = select.poll()
    for descriptor, event in events:
        poll.register(descriptor, event)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}


def listen_to_hosts(rank: int) -> Listener:
    """A listener for ranks on other hosts: on the interface that GLOO_SOCKET_IFNAME names, else on
    the address of this host's name, else on that of a route to other networks. Raises `WeftError`
    if there is no address.
    """
    interface = named_interface()
    here = addresses()
    tried = []
    for host in [here[interface]] if interface in here else [] if interface else _candidates(here):
        try:
            if not _loopback(host):
                return Listener(host)
        except OSError as error:
            tried.append(f"{host}: {error.strerror}")
    named = (
        f"{INTERFACE}={interface} is not an interface with an address"
        if interface
        else "it has no address that they could reach"
    )
    has = ", ".join(f"{name} {address}" for name, address in here.items())
    raise WeftError(
        f"rank {rank} cannot listen to ranks on other hosts: {named} ({'; '.join(tried) or has}); "
        f"set {INTERFACE}"
    )


def _candidates(here: Mapping[str, str]) -> Iterator[str]:
    """Addresses at which this host may be reachable, the likeliest first."""
    yield from _of_name(socket.gethostname())
    yield from filter(None, map(_source, ("192.0.2.1", "2001:db8::1")))
    yield from here.values()


def named_interface() -> str:
    """The interface that GLOO_SOCKET_IFNAME names, the first if it names several; empty if it is
    not set.
    """
    return os.environ.get(INTERFACE, "").split(",")[0]


def choose_interface(master: str) -> None:
    """Name the interface by which this host reaches `master`, the address of rank 0's, in
    GLOO_SOCKET_IFNAME, if no other host can reach the address that gloo would take: the first of
    this host's name at which it can listen. Many systems give the name a loopback address.
    """
    own = {address: name for name, address in addresses().items()}
    of_name = (host for host in _of_name(socket.gethostname()) if host in own or _loopback(host))
    if named_interface() or not _loopback(next(of_name, "127.0.0.1")):
        return
    for host in _of_name(master):
        if (source := _source(host)) in own and not _loopback(source):
            os.environ[INTERFACE] = own[source]
            return


def _of_name(name: str) -> Iterator[str]:
    """The addresses of a name; none if it has none."""
    with contextlib.suppress(OSError, UnicodeError):
        for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            yield str(found[4][0])


def _source(host: str) -> str:
    """The address of this host in packets to another; nothing is sent. Empty without a route."""
    with (
        contextlib.suppress(OSError),
        socket.socket(family_of(host), socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""


def _loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def addresses() -> dict[str, str]:
    """The address of each interface: of IPv4, else of IPv6 that is valid beyond its link."""
    found = {}
    for digits, _, _, scope, _, name in map(
        str.split, read_text(Path("/proc/net/if_inet6")).splitlines()
    ):
        if scope in ("00", "10"):  # global, this host
            found[name] = str(ipaddress.IPv6Address(int(digits, 16)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
