"""How ranks connect: each listens, and every two call each other, in one host by Unix sockets and between hosts by TCP.

Unix sockets have abstract addresses, which vanish with their owners and cannot be reached from another host (a network namespace
is one); who calls is checked to be the same user. Between hosts, and here too, callers know a secret that ranks tell each other.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.world.topology import said

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names the interface to use, to gloo too
_HELLO = struct.Struct("16si")  # the secret of who is called, and the rank that calls
_AT_ONCE = 1.0  # seconds in which who calls says who it is
_SIOCGIFADDR = 0x8915


class Address(NamedTuple):
    """Where a rank listens, and what it wants to hear."""

    family: int
    at: Any
    secret: bytes

    def __str__(self) -> str:
        return f" at {self.at[0]}, port {self.at[1]}" if self.family != socket.AF_UNIX else ""


class Listener:
    """This rank's `socket`, to which peers connect at its `address`."""

    def __init__(self, family: int = socket.AF_UNIX, host: str = "") -> None:
        self.socket = _made(family)
        try:
            self.socket.bind(f"\0weft-{secrets.token_hex(16)}" if family == socket.AF_UNIX else (host, 0))
            self.socket.listen(1024)
        except BaseException:
            self.socket.close()
            raise
        self.address = Address(family, self.socket.getsockname(), secrets.token_bytes(16))

    def connect(
        self, rank: int, peers: Mapping[int, tuple[int, Address]], timeout: float
    ) -> dict[int, tuple[socket.socket, socket.socket]]:
        """Call all `peers`, of each of which the pid and the address are given, and be called by them: the connections of the lower
        rank's call and of the higher's to each.

        Raises `PeerTimeout` naming the ranks that did not appear, `PeerLost` one that is gone.
        """
        deadline = time.monotonic() + timeout
        called: dict[int, socket.socket] = {}
        callers: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as made:
            for peer, (pid, address) in peers.items():
                called[peer] = made.enter_context(_call(rank, peer, pid, address, deadline))
            while missing := [peer for peer in peers if peer not in callers]:
                watched = {called[peer].fileno(): peer for peer in missing}
                here = select.poll()
                here.register(self.socket, select.POLLIN)
                for fd in watched:
                    here.register(fd, select.POLLRDHUP)
                ready = [fd for fd, _ in here.poll(max(0.0, deadline - time.monotonic()) * 1000)]
                if self.socket.fileno() in ready:  # first: who has called may go
                    if (hello := self._answer()) is not None:
                        callers[hello[0]] = made.enter_context(hello[1])
                elif ready:
                    raise _lost(rank, watched[ready[0]], peers[watched[ready[0]]][0])
                else:
                    raise PeerTimeout(f"rank {rank} waited {timeout:g} s for ranks {missing} to connect")
            for each in (*called.values(), *callers.values()):
                each.settimeout(None)
            made.pop_all()
        return {peer: (called[peer], callers[peer]) if rank < peer else (callers[peer], called[peer]) for peer in peers}

    def _answer(self) -> tuple[int, socket.socket] | None:
        """Who calls, with the connection; None for a stranger, or one that is gone again."""
        caller, _ = self.socket.accept()
        with contextlib.ExitStack() as stranger, contextlib.suppress(ConnectionError, TimeoutError):
            stranger.enter_context(caller)
            caller.settimeout(_AT_ONCE)
            hello = b""
            while len(hello) < _HELLO.size and _same_user(caller) and (more := caller.recv(_HELLO.size - len(hello))):
                hello += more
            if len(hello) == _HELLO.size and hmac.compare_digest(hello[:16], self.address.secret):
                stranger.pop_all()
                return _HELLO.unpack(hello)[1], caller
        return None


def _call(rank: int, peer: int, pid: int, address: Address, deadline: float) -> socket.socket:
    """A connection to a peer."""
    to, here = _made(address.family), address.family == socket.AF_UNIX
    try:
        to.settimeout(max(0.001, deadline - time.monotonic()))
        to.connect(address.at)
        to.sendall(_HELLO.pack(address.secret, rank))
    except BaseException as error:
        to.close()
        if isinstance(error, ConnectionError):
            raise _lost(rank, peer, pid) from error
        if isinstance(error, TimeoutError) or (isinstance(error, OSError) and not here):
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror
            hint = "" if here else f"; is there a firewall? {INTERFACE} says which interface ranks use, `weft doctor` what is wrong"
            raise PeerTimeout(f"rank {rank} cannot reach rank {peer} (pid {pid}){address}: {why}{hint}") from error
        raise
    return to


def _lost(rank: int, peer: int, pid: int) -> PeerLost:
    how = "died or gave up"
    return PeerLost(f"rank {peer} (pid {pid}) {how} while rank {rank} waited to connect to it", how)


def _made(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_UNIX else socket.SOCK_STREAM)


def _same_user(caller: socket.socket) -> bool:
    if caller.family != socket.AF_UNIX:
        return True
    _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def listen_to_hosts(rank: int) -> Listener:
    """A listener for ranks on other hosts: on the interface that GLOO_SOCKET_IFNAME names, else where this host's name leads, else
    where a route out of it begins. Raises `WeftError` if there is no such place."""
    interface, known, tried = named_interface(), addresses(), []
    for host in [known[interface]] if interface in known else [] if interface else _candidates(known):
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return Listener(family_of(host), host)
        except OSError as error:
            tried.append(f"{host}: {error.strerror}")
    named = f"{INTERFACE}={interface} is no interface with an address" if interface else "no address that others could reach"
    has = ", ".join(f"{name} {address}" for name, address in known.items())
    raise WeftError(f"rank {rank} cannot listen to ranks on other hosts: {named} ({'; '.join(tried) or has}); set {INTERFACE}")


def _candidates(known: Mapping[str, str]) -> Iterator[str]:
    """Where this host may be reached, the likeliest first."""
    with contextlib.suppress(OSError):
        yield from (str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM))
    for outside in ("192.0.2.1", "2001:db8::1"):  # nothing is sent there
        with contextlib.suppress(OSError), socket.socket(family_of(outside), socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            yield probe.getsockname()[0]
    yield from known.values()


def named_interface() -> str:
    """The interface that GLOO_SOCKET_IFNAME names, the first if it names several; empty if it is not set."""
    return os.environ.get(INTERFACE, "").split(",")[0]


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def addresses() -> dict[str, str]:
    """The address of each interface: that of IPv4, else one of IPv6 that is valid beyond its link."""
    found = {}
    for digits, _, _, scope, _, name in map(str.split, said(Path("/proc/net/if_inet6")).splitlines()):
        if scope in ("00", "10"):  # global, this host
            found[name] = str(ipaddress.IPv6Address(int(digits, 16)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
