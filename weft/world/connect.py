"""The connections of a world's ranks, made from what a rendezvous tells of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import weft._native as _native
from weft.errors import WeftError
from weft.schedules.levels import numbered
from weft.world.backend import Backend
from weft.world.door import Door, Handle
from weft.world.lines import first_carried
from weft.world.listener import INTERFACE, Address, another_user
from weft.world.relay import Relay
from weft.world.rendezvous import GroupRendezvous, RankInfo, StoreRendezvous
from weft.world.transports import agreed


class Known:
    """The rendezvous of ranks that have each other's handles already."""

    def __init__(self, rank: int, handles: Sequence[Handle]) -> None:
        self.rank = rank
        self.handles = handles

    @contextlib.contextmanager
    def exchange(self, own: RankInfo | Address, timeout: float) -> Iterator[list[Any]]:
        """The records of all ranks of the kind of this rank's `own`."""
        of_process = isinstance(own, RankInfo)
        yield [each.info if of_process else each.outside for each in self.handles]

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for this rank's records."""


Rendezvous = GroupRendezvous | StoreRendezvous | Known


class Connections(NamedTuple):
    """What a world consists of when it is made: this rank, all records, the sockets to peers, and
    the relay to those on other hosts. `handles` are by what each rank is found again.
    """

    rank: int
    infos: Sequence[RankInfo]
    mesh: _native.Mesh
    relay: Relay | None
    handles: Sequence[Handle]


@contextlib.contextmanager
def connections(
    rendezvous: Rendezvous, door: Door, timeout: float, backend: Backend
) -> Iterator[Connections]:
    """Connect to all ranks of a rendezvous; what is open is closed if the ``with`` block fails.
    Raises as `weft.init`.
    """
    rank = rendezvous.rank
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as unless_made:
        infos = stack.enter_context(rendezvous.exchange(door.info, timeout))
        backend.meet([info.device for info in infos])
        others = {peer: info for peer, info in enumerate(infos) if peer != rank}
        local = {
            peer: (info.pid, info.address)
            for peer, info in others.items()
            if info.host == door.info.host
        }
        for peer in local:
            if infos[peer].user != os.getuid():
                raise another_user(peer, rank, infos[peer].user)
        remote = [peer for peer in others if peer not in local]
        if remote and backend.stream_ordered:
            raise WeftError("ranks with GPUs must be on one host in this version of weft")
        try:
            connected = door.here.connect(rank, local, timeout)
            outside = door.open_to_hosts(rank) if remote else None
        except BaseException as error:
            if remote:
                rendezvous.give_up(error)
            raise
        ends = {}
        for peer, (unused, connection) in connected.items():
            unused.close()
            ends[peer] = stack.enter_context(connection)
        hosts = numbered(info.host for info in infos)
        lines, surplus = dict[int, socket.socket](), list[socket.socket]()
        handles = [Handle(info) for info in infos]
        if outside is not None:
            addresses = stack.enter_context(rendezvous.exchange(outside.address, timeout))
            handles = [*map(Handle, infos, addresses)]
            if unreachable := [peer for peer in remote if not addresses[peer].port]:
                raise WeftError(
                    f"ranks {unreachable} have no address for other hosts: set {INTERFACE} there"
                )
            transport = agreed({peer: each.offer for peer, each in enumerate(addresses)})
            located = {
                peer: (infos[peer].pid, addresses[peer])
                for peer in first_carried(hosts, rank).values()
            }
            for peer, (unused, connection) in outside.connect(rank, located, timeout).items():
                lines[hosts[peer]] = unless_made.enter_context(connection)
                if rank < peer:  # it has opened it, and the peer need not have noticed
                    unused.close()
                else:
                    surplus.append(unless_made.enter_context(unused))
        fds = dict.fromkeys(remote, _native.Mesh.elsewhere) | {
            peer: end.fileno() for peer, end in ends.items()
        }
        mesh = _native.Mesh([fds.get(peer, -1) for peer in range(len(infos))])
        for end in ends.values():
            end.detach()
        relay = None
        if outside is not None:
            at = [each.host for each in addresses]
            relay = Relay(rank, hosts, mesh, lines, at, timeout, surplus, transport)
            unless_made.callback(relay.close)
        yield Connections(rank, infos, mesh, relay, handles)
        unless_made.pop_all()
