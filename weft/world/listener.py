"""How ranks connect: each listens, and every two call each other, in one host by Unix sockets and
between hosts by TCP.

Unix sockets have abstract addresses, which vanish with their owners and cannot be reached from
another host (a network namespace is one); who calls is checked to be the same user. Between hosts,
and here too, callers know a secret that ranks tell each other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.world.topology import read_text

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names the interface to use, to gloo too
_HELLO = struct.Struct("16si")  # the secret of who is called, and the rank that calls
_BACKLOG = 1024  # callers that the kernel keeps until they are answered
_STRANGERS = (
    64  # callers, beside as many as there are peers, that may take their time to say who they are
)
_AGAIN = 0.01  # seconds after which a peer is called again that has too many callers just now
_LATER = (errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and what it wants to hear: a host and a port, or the name of a Unix
    socket and no port.
    """

    host: str
    port: int
    secret: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"there is no port {self.port}")

    @property
    def family(self) -> socket.AddressFamily:
        return family_of(self.host) if self.port else socket.AF_UNIX

    @property
    def at(self) -> str | tuple[str, int]:
        """What sockets call it."""
        return (self.host, self.port) if self.port else self.host

    def __str__(self) -> str:
        return f" at {self.host}, port {self.port}" if self.port else ""


class Listener:
    """This rank's `socket`, to which peers connect at its `address`: a port of this `host`, or a
    Unix socket without one.
    """

    def __init__(self, host: str = "") -> None:
        name = f"\0weft-{secrets.token_hex(16)}"
        self.socket = _made(family_of(host) if host else socket.AF_UNIX)
        try:
            self.socket.bind((host, 0) if host else name)
            self.socket.listen(_BACKLOG)
            port = self.socket.getsockname()[1] if host else 0
        except BaseException:
            self.socket.close()
            raise
        self.address = Address(host or name, port, secrets.token_bytes(16))

    def connect(
        self, rank: int, peers: Mapping[int, tuple[int, Address]], timeout: float
    ) -> dict[int, tuple[socket.socket, socket.socket]]:
        """Call all `peers`, of each of which the pid and the address are given, and be called by
        them: the connections of the lower rank's call and of the higher's to each.

        Others may call as well, and delay nobody. Raises `PeerTimeout` naming the ranks that did
        not appear, `PeerLost` one that is gone, `WeftError` one that another user runs.
        """
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as made:
            callers = made.enter_context(_Callers(rank, self, peers))
            calls = [_Call(rank, peer, *about) for peer, about in peers.items()]
            for call in calls:
                made.enter_context(call.socket)
                call.go_on()
            while missing := [
                call for call in calls if not (call.through and call.peer in callers.known)
            ]:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise next(
                        (call.unanswered("no answer") for call in missing if not call.through), None
                    ) or PeerTimeout(
                        f"rank {rank} waited {timeout:g} s for ranks "
                        f"{[call.peer for call in missing]} to connect"
                    )
                here = select.poll()
                for fd, events in [
                    *callers.awaited(),
                    *(call.awaited() for call in missing if call.begun),
                ]:
                    here.register(fd, events)
                ready = {
                    fd
                    for fd, _ in here.poll(
                        1000 * (left if all(call.begun for call in missing) else min(left, _AGAIN))
                    )
                }
                callers.answer()  # first: who has called may go
                for call in missing:
                    if not call.through and (not call.begun or call.socket.fileno() in ready):
                        call.go_on()
                    elif (
                        call.through
                        and call.peer not in callers.known
                        and call.socket.fileno() in ready
                    ):
                        raise call.lost()
            for connection in (*(call.socket for call in calls), *callers.known.values()):
                connection.setblocking(True)
            made.pop_all()
            callers.cut_off()
        pairs = [(call.peer, call.socket, callers.known[call.peer]) for call in calls]
        return {
            peer: (called, caller) if rank < peer else (caller, called)
            for peer, called, caller in pairs
        }


class _Call:
    """This rank's call to a peer: it has `begun` unless too many others call, and is `through` when
    the peer can read who calls.
    """

    def __init__(self, rank: int, peer: int, pid: int, address: Address) -> None:
        self.rank, self.peer, self.pid, self.address = rank, peer, pid, address
        self.socket, self.begun, self.through = _made(address.family), False, False

    def go_on(self) -> None:
        """Connect, and say who calls, as far as that goes without waiting."""
        try:
            code = self.socket.connect_ex(self.address.at)
            self.begun = code != errno.EAGAIN
            if code in _LATER:
                return
            if code not in (0, errno.EISCONN):
                raise OSError(code, os.strerror(code))
            self.socket.sendall(_HELLO.pack(self.address.secret, self.rank))
            self.through = True
        except ConnectionError as error:
            raise self.lost() from error
        except OSError as error:
            if self.address.family == socket.AF_UNIX:
                raise
            raise self.unanswered(error.strerror or str(error)) from error

    def awaited(self) -> tuple[int, int]:
        """What goes on with the call: that it comes to the peer, and then that the peer is lost."""
        return self.socket.fileno(), select.POLLRDHUP if self.through else select.POLLOUT

    def lost(self) -> PeerLost:
        how = "died or gave up"
        return PeerLost(
            f"rank {self.peer} (pid {self.pid}) {how} while rank {self.rank} waited to connect to "
            "it",
            how,
        )

    def unanswered(self, why: str) -> PeerTimeout:
        hint = f"; is there a firewall? {INTERFACE} says which interface ranks use, `weft doctor` what is wrong"
        whom = f"rank {self.peer} (pid {self.pid}){self.address}"
        return PeerTimeout(
            f"rank {self.rank} cannot reach {whom}: {why}{hint if self.address.port else ''}"
        )


class _Callers:
    """Who calls this rank: peers that are `known` by what they said, and strangers, who may be
    peers that have not said it yet.
    """

    def __init__(self, rank: int, listener: Listener, peers: Mapping[int, object]) -> None:
        self.rank, self.listener, self.peers = rank, listener, peers
        self.known: dict[int, socket.socket] = {}
        self.strangers: dict[
            socket.socket, bytes
        ] = {}  # each with what it has said so far, in the order in which they called

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.cut_off()
        for caller in self.known.values():
            caller.close()

    def awaited(self) -> list[tuple[int, int]]:
        """What there is to answer when it comes."""
        return [(each.fileno(), select.POLLIN) for each in (self.listener.socket, *self.strangers)]

    def answer(self) -> None:
        """Take what callers have said so far, and all who have called by now."""
        for caller in [*self.strangers]:
            self._hear(caller)
        for _ in range(_BACKLOG):
            try:
                caller, _ = self.listener.socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it is gone again
                continue
            caller.setblocking(False)
            self.strangers[caller] = b""
            self._hear(caller)
            self.cut_off(keep=len(self.peers) + _STRANGERS)

    def cut_off(self, keep: int = 0) -> None:
        """Hang up on strangers, but the last that called."""
        for caller in [*self.strangers][: max(0, len(self.strangers) - keep)]:
            del self.strangers[caller]
            caller.close()

    def _hear(self, caller: socket.socket) -> None:
        """Take what a stranger says, who may then be known."""
        heard = self.strangers[caller]
        try:
            more = caller.recv(_HELLO.size - len(heard))
        except BlockingIOError:
            return
        except OSError:  # it is gone
            more = b""
        self.strangers[caller] = heard = heard + more
        if more and len(heard) < _HELLO.size:
            return
        if len(heard) == _HELLO.size and hmac.compare_digest(
            heard[:16], self.listener.address.secret
        ):
            peer = _HELLO.unpack(heard)[1]
            if (user := _user(caller)) != os.getuid():
                raise WeftError(
                    f"rank {peer} runs as another user than rank {self.rank}: {user} and "
                    f"{os.getuid()}; let one user run all ranks "
                    "of a host, in one user namespace"
                )
            if peer in self.peers and peer not in self.known:
                self.known[peer] = caller
        del self.strangers[caller]
        if caller not in self.known.values():
            caller.close()


def _made(family: int) -> socket.socket:
    made = socket.socket(
        family, socket.SOCK_SEQPACKET if family == socket.AF_UNIX else socket.SOCK_STREAM
    )
    made.setblocking(False)
    return made


def _user(caller: socket.socket) -> int:
    """Who runs the process that calls; over TCP nobody can tell, and it may be anybody."""
    if caller.family != socket.AF_UNIX:
        return os.getuid()
    _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def listen_to_hosts(rank: int) -> Listener:
    """A listener for ranks on other hosts: on the interface that GLOO_SOCKET_IFNAME names, else
    where this host's name leads, else where a route out of it begins. Raises `WeftError` if there
    is no such place.
    """
    interface, known, tried = named_interface(), addresses(), []
    for host in (
        [known[interface]] if interface in known else [] if interface else _candidates(known)
    ):
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return Listener(host)
        except OSError as error:
            tried.append(f"{host}: {error.strerror}")
    named = (
        f"{INTERFACE}={interface} is no interface with an address"
        if interface
        else "no address that others could reach"
    )
    has = ", ".join(f"{name} {address}" for name, address in known.items())
    raise WeftError(
        f"rank {rank} cannot listen to ranks on other hosts: {named} ({'; '.join(tried) or has}); "
        f"set {INTERFACE}"
    )


def _candidates(known: Mapping[str, str]) -> Iterator[str]:
    """Where this host may be reached, the likeliest first."""
    with contextlib.suppress(OSError):
        yield from (
            str(found[4][0])
            for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        )
    for outside in ("192.0.2.1", "2001:db8::1"):  # nothing is sent there
        with (
            contextlib.suppress(OSError),
            socket.socket(family_of(outside), socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((outside, 9))
            yield probe.getsockname()[0]
    yield from known.values()


def named_interface() -> str:
    """The interface that GLOO_SOCKET_IFNAME names, the first if it names several; empty if it is
    not set.
    """
    return os.environ.get(INTERFACE, "").split(",")[0]


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def addresses() -> dict[str, str]:
    """The address of each interface: that of IPv4, else one of IPv6 that is valid beyond its link."""
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
