"""Endpoints: the sockets at which a process is reached as a rank, while a world is made and as long
as it lives.

While an endpoint is open its process may take part in the next world. Where the kernel of the host
says that nothing listens at an endpoint any more, its process has ended, or has left its world. So
an endpoint is how ranks of a host tell a peer that has ended from one that is slow or suspended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from weft.bootstrap import peer_memory, transports
from weft.bootstrap.listener import Address, Listener, listen_to_hosts
from weft.bootstrap.rendezvous import RankInfo, StoreRendezvous, host_identity
from weft.errors import WeftError
from weft.host import placement, topology

NOWHERE = Address("", 0, b"")
"""The address of an endpoint that ranks on other hosts do not reach."""


class Handle(NamedTuple):
    """What other processes need to make a world with this one: its record, with the address on its
    host, and the address for other hosts.
    """

    info: RankInfo
    outside: Address = NOWHERE

    def named(self, name: str) -> Handle:
        """The handle with the secrets of connections of the world `name` alone."""
        here, outside = (_named(each, name) for each in (self.info.address, self.outside))
        return Handle(self.info._replace(address=here), outside)

    def address_from(self, host: str) -> Address | None:
        """The address for processes on that host, None if there is none."""
        if self.info.host == host:
            return self.info.address
        return self.outside if self.outside.port else None


class Known:
    """The rendezvous of ranks that already have each other's handles."""

    def __init__(self, rank: int, handles: Sequence[Handle]) -> None:
        self.rank = rank
        self.handles = handles

    @contextlib.contextmanager
    def exchange(self, own: RankInfo | Address, timeout: float) -> Iterator[list[Any]]:
        """The records of all ranks of the kind of this rank's `own`."""
        of_process = isinstance(own, RankInfo)
        yield [each.info if of_process else each.outside for each in self.handles]

    def give_up(self, error: BaseException) -> None:
        """Do nothing: nobody waits for this rank's records."""


Rendezvous = StoreRendezvous | Known


class Endpoint:
    """The listening sockets of this process in one world, closed with it; `device` identifies its
    device, and is empty for a CPU.

    Attributes: `here` (the listener on this host), `outside` (that for other hosts, None before
    `open_to_hosts`), `of_world` (that for connections of the world with other hosts).
    """

    def __init__(self, device: str = "") -> None:
        self.here = Listener()
        self.outside: Listener | None = None
        self.of_world: Listener | None = None
        cores = frozenset(os.sched_getaffinity(0))
        self._info = RankInfo(
            os.getpid(),
            host_identity(),
            self.here.address,
            cores,
            torch.get_num_threads(),
            topology.locality(placement.host_topology(), cores),
            placement.thresholds(),
            peer_memory.probe(),
            device,
            os.getuid(),
        )

    @property
    def info(self) -> RankInfo:
        """This process's record, with the address at which connections are accepted now."""
        return self._info._replace(address=self.here.address)

    @property
    def handle(self) -> Handle:
        return Handle(self.info, self.outside.address if self.outside else NOWHERE)

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Accept connections of the world `name` alone from now on; if the block fails, those of
        the endpoint's handle again.
        """
        before = [(each, each.address) for each in self._open]
        for listener, address in before:
            listener.address = _named(address, name)
            listener.keep_early()
        try:
            yield
        except BaseException:
            for listener, address in before:
                listener.address = address
            raise

    @property
    def listeners(self) -> list[Listener]:
        """The listeners for requests of ranks that agree on the next world."""
        return [self.here, *([self.outside] if self.outside else [])]

    @property
    def _open(self) -> list[Listener]:
        return [*self.listeners, *([self.of_world] if self.of_world else [])]

    def open_to_hosts(self, rank: int) -> Listener:
        """Listen to other hosts, too. Raises as `listen_to_hosts`."""
        if self.outside is None:
            self.outside = listen_to_hosts(rank)
            address = self.outside.address
            self.of_world = Listener(address.host)
            self.outside.address = self.of_world.address = dataclasses.replace(
                address,
                offer=transports.offered(),
                port_of_world=self.of_world.address.port,
            )
        return self.outside

    def open_if_possible(self, rank: int) -> None:
        """Listen to other hosts, too, if this one has an address for them."""
        with contextlib.suppress(WeftError):
            self.open_to_hosts(rank)

    @property
    def closed(self) -> bool:
        return self.here.socket.fileno() < 0

    def close(self) -> None:
        """Reject all connections from now on: to others this process has ended."""
        for listener in self._open:
            listener.close()

    def __del__(self) -> None:
        if hasattr(self, "here"):
            self.close()


def key(address: Address) -> bytes:
    """The key that messages to an endpoint begin with; connections of a world begin with the secret
    itself.
    """
    return hashlib.sha256(b"endpoint" + address.secret).digest()[:16]


def _named(address: Address, name: str) -> Address:
    secret = hashlib.sha256(name.encode() + address.secret).digest()[:16]
    return dataclasses.replace(address, secret=secret)
