"""The sockets at which a rank listens: of Unix sockets for ranks of its host, of TCP for others.

Unix sockets have abstract addresses, which vanish with their owners and cannot be reached from
another host (a network namespace is one); the peer must be the same user. At the beginning of every
connection both ends prove that they have a secret that ranks exchange in the rendezvous
(`weft.bootstrap.handshake`).
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.bootstrap.handshake import Accepted, name_of
from weft.bootstrap.interfaces import (
    INTERFACE,
    addresses,
    candidates,
    family_of,
    is_loopback,
    named_interface,
)
from weft.errors import WeftError

_LISTEN_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
UNPROVED = 64  # accepted connections that are not authenticated, in addition to one for each peer
PROVING = 10.0  # seconds that they have
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Address:
    """The address at which a rank listens, and its secret: a host and a port, or the name of a Unix
    socket and no port. For other hosts it has the port at which the rank accepts connections of its
    world, and what it offers for rows (`weft.bootstrap.transports.offered`).
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
        self.socket = nonblocking(family_of(host) if host else socket.AF_UNIX)
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


def listen_to_hosts(rank: int) -> Listener:
    """A listener for ranks on other hosts: on the interface that GLOO_SOCKET_IFNAME names, else on
    the address of this host's name, else on that of a route to other networks. Raises `WeftError`
    if there is no address.
    """
    interface = named_interface()
    here = addresses()
    tried = []
    for host in [here[interface]] if interface in here else [] if interface else candidates(here):
        try:
            if not is_loopback(host):
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


def nonblocking(family: int) -> socket.socket:
    """A socket of a kind by which ranks connect."""
    made = socket.socket(
        family, socket.SOCK_SEQPACKET if family == socket.AF_UNIX else socket.SOCK_STREAM
    )
    made.setblocking(False)
    return made


class Unproved:
    """Connections that a listener has accepted and that have not proved themselves yet, by `key`,
    saying something of `about` bytes of themselves. They are at most `most`, each for some seconds:
    so strangers occupy a bounded number of descriptors and bytes, and delay no peer.
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
        """Accept the connections in the backlog and advance all without blocking; those that are
        proved now. Raises `OSError` if this process lacks file descriptors.
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
        """Advance the connections that the listener has kept; those that are proved now."""
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
