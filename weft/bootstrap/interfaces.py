"""The network interfaces of this host, and the one by which other hosts reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.host.topology import read_text

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names the interface to use, to gloo too
_SIOCGIFADDR = 0x8915


def candidates(here: Mapping[str, str]) -> Iterator[str]:
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
    of_name = (host for host in _of_name(socket.gethostname()) if host in own or is_loopback(host))
    if named_interface() or not is_loopback(next(of_name, "127.0.0.1")):
        return
    for host in _of_name(master):
        if (source := _source(host)) in own and not is_loopback(source):
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


def is_loopback(host: str) -> bool:
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
