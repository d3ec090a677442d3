"""The connections of a world's ranks, made from the records of their rendezvous."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import weft._native as _native
from weft.bootstrap.connector import another_user, connect
from weft.bootstrap.endpoint import Endpoint, Handle, Rendezvous
from weft.bootstrap.interfaces import INTERFACE
from weft.bootstrap.rendezvous import RankInfo
from weft.bootstrap.transports import agreed
from weft.errors import WeftError
from weft.schedules.levels import numbered
from weft.world.backend import Backend
from weft.world.network import Network


class Connections(NamedTuple):
    """The parts that a world is made of: this rank, all records, the sockets to peers, and the
    network to those on other hosts. `handles` are the endpoints by which ranks can reach each other
    again.
    """

    rank: int
    infos: Sequence[RankInfo]
    mesh: _native.Mesh
    network: Network | None
    handles: Sequence[Handle]


@contextlib.contextmanager
def connections(
    rendezvous: Rendezvous, endpoint: Endpoint, timeout: float, backend: Backend
) -> Iterator[Connections]:
    """Connect to all ranks of a rendezvous; what is open is closed if the ``with`` block fails.
    Raises as `weft.init`.
    """
    rank = rendezvous.rank
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as unless_made:
        infos = stack.enter_context(rendezvous.exchange(endpoint.info, timeout))
        backend.meet([info.device for info in infos])
        others = {peer: info for peer, info in enumerate(infos) if peer != rank}
        local = {
            peer: (info.pid, info.address)
            for peer, info in others.items()
            if info.host == endpoint.info.host
        }
        for peer in local:
            if infos[peer].user != os.getuid():
                raise another_user(peer, rank, infos[peer].user)
        remote = [peer for peer in others if peer not in local]
        if remote and backend.stream_ordered:
            raise WeftError("ranks with GPUs must be on one host in this version of weft")
        try:
            ends = connect(rank, endpoint.here, local, timeout)
            for end in ends.values():
                stack.enter_context(end)
            outside = endpoint.open_to_hosts(rank) if remote else None
            fds = dict.fromkeys(remote, _native.Mesh.elsewhere) | {
                peer: end.fileno() for peer, end in ends.items()
            }
            mesh = _native.Mesh([fds.get(peer, -1) for peer in range(len(infos))])
        except BaseException as error:
            if remote:
                rendezvous.give_up(error)
            raise
        unless_made.callback(mesh.close)
        for end in ends.values():
            end.detach()
        network = None
        handles = [Handle(info) for info in infos]
        if outside is not None:
            addresses = stack.enter_context(rendezvous.exchange(outside.address, timeout))
            handles = [*map(Handle, infos, addresses)]
            if unreachable := [peer for peer in remote if not addresses[peer].port]:
                raise WeftError(
                    f"ranks {unreachable} have no address for other hosts: set {INTERFACE} there"
                )
            assert endpoint.of_world is not None
            network = Network(
                rank,
                numbered(info.host for info in infos),
                mesh,
                endpoint.of_world,
                {peer: (infos[peer].pid, addresses[peer].of_world) for peer in remote},
                agreed({peer: each.offer for peer, each in enumerate(addresses)}),
            )
            unless_made.callback(network.close)
            network.connect(timeout)
        yield Connections(rank, infos, mesh, network, handles)
        unless_made.pop_all()
