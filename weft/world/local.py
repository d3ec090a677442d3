"""Worlds inside one process, each rank a thread: for notebooks, experiments, and several ranks on
one GPU.

    with weft.local_world(2) as local:
        parts = local.run(lambda: weft.all_gather(torch.randn(4)))

Ranks behave as in separate processes: they share only symmetric memory, and fail alone.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import torch

import weft._native as _native
from weft.bootstrap import transports
from weft.bootstrap.listener import Address, Listener
from weft.bootstrap.peer_memory import probe
from weft.bootstrap.rendezvous import RankInfo, host_identity
from weft.checks import check_call, check_ranks, integers, limited
from weft.errors import PeerLost, WeftError
from weft.host.placement import threads_per_rank, thresholds
from weft.launchers import hints
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.schedules.levels import numbered
from weft.world.backend import Backend, backend_of
from weft.world.default import LOCAL_MAKER
from weft.world.network import Network
from weft.world.registry import default_here, of_thread
from weft.world.world import World, log_made

_LOOPBACK = "127.0.0.1"


class LocalWorld:
    """Ranks as threads of this process; made by `local_world`. A context manager.

    Attributes: `ranks` (their number), `worlds` (each rank's, for use on its own thread), `closed`
    (whether `close` was called).

    Examples:
        >>> local = weft.local_world(3)
        >>> local.run(lambda: weft.init().rank)
        [0, 1, 2]
        >>> local.close()
    """

    def __init__(
        self,
        ranks: int,
        timeout: float,
        backend: Backend,
        options: DeviceOptions = DEFAULT,
        hosts: Sequence[int] = (),
    ) -> None:
        self.ranks = ranks
        self.device = backend.device
        self.closed = False
        self.hosts = hosts or (0,) * ranks
        self.threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(ranks)]
        self._timeout = timeout
        self._backend = backend
        self._options = options
        self._returned = set[int]()
        self.before = torch.get_num_threads(), _native.allow_teams(True)
        self.worlds = self._new_worlds()
        self.contexts = [backend.on_thread() for _ in range(ranks)]

    def _new_worlds(self) -> list[World]:
        """A world of all ranks, on each rank's thread."""
        ranks, hosts = self.ranks, self.hosts
        cores = frozenset(os.sched_getaffinity(0))
        nowhere = Address("", 0, secrets.token_bytes(16))
        infos = [
            RankInfo(
                os.getpid(),
                f"{host_identity()} {host}",
                nowhere,
                cores,
                threads_per_rank(ranks),
                (),
                thresholds(),
                probe(),
            )
            for host in hosts
        ]
        sockets = _pairs(ranks, lambda one, other: hosts[one] == hosts[other], _unix_pair)
        numbers = numbered(hosts)
        self._listeners = [Listener(_LOOPBACK) for _ in hosts if len({*hosts}) > 1]

        def make(rank: int) -> World:
            torch.set_num_threads(threads_per_rank(ranks))
            ends = {peer: end.detach() for peer, end in sockets[rank].items()}
            elsewhere = [peer for peer in range(ranks) if hosts[peer] != hosts[rank]]
            ends |= dict.fromkeys(elsewhere, _native.Mesh.elsewhere)
            mesh = _native.Mesh([ends.get(peer, -1) for peer in range(ranks)])
            network = None
            if elsewhere:
                network = Network(
                    rank,
                    numbers,
                    mesh,
                    self._listeners[rank],
                    {peer: (os.getpid(), self._listeners[peer].address) for peer in elsewhere},
                    transports.chosen(),
                )
                network.connect(self._timeout)
            world = World(rank, infos, mesh, self._timeout, self._backend, network)
            world.device_options = self._options
            world.failure.maker = LOCAL_MAKER
            world.failure.returned = self._returned
            default_here(world)
            log_made(world)
            self._backend.prepare(world)
            return world

        return self._on_all(make)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on every rank and return the results in rank order.

        In `fn` a rank's world is the default of all operators, and the result of `weft.init()`. An
        exception on any rank closes the world on all, and is raised here once all have stopped:
        that of the rank that failed first. The next call then has a new world, in which tensors of
        the old one are not symmetric. Thread-local state persists between calls; on a GPU each rank
        has its own stream, and all streams are synchronized on return. Raises `TypeError` if `fn`
        cannot take `args`, and `WeftError` after `close` and on a rank of this local world.
        """
        if self.closed:
            raise WeftError("this local world is closed; make a new one with weft.local_world(...)")
        if (own := of_thread()) in self.worlds:
            raise WeftError(
                f"rank {own.rank} of this local world calls local.run and would wait for itself: "
                "all ranks are in local.run already, so call the function"
            )
        check_call("local.run", fn, args)
        if any(world.closed is not None for world in self.worlds):
            self._close_worlds()
            self.worlds = self._new_worlds()

        def work(rank: int) -> Any:
            try:
                with self.contexts[rank]:
                    try:
                        return fn(*args)
                    except BaseException as error:
                        hints.add(error, error.__traceback__)
                        self.worlds[rank].failure.fail(error)
                        raise
            finally:
                self._returned.add(rank)

        self._returned.clear()
        return self._on_all(work)

    def close(self) -> None:
        """End the ranks and their threads. Symmetric tensors of a CPU live on."""
        if self.closed:
            return
        self.closed = True
        for world in self.worlds:
            world.failure.maker = "weft.local_world(...)"
        self._close_worlds()
        for thread in self.threads:
            thread.shutdown()
        threads, teams = self.before
        torch.set_num_threads(threads)
        _native.allow_teams(teams)

    def _close_worlds(self) -> None:
        self._on_all(lambda rank: self.worlds[rank].close())
        for world in self.worlds:
            world.engine = None  # its programs keep memory
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalWorld({self.ranks} ranks on {self.device})"

    def _on_all(self, work: Callable[[int], Any]) -> list[Any]:
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        return [future.result() for future in futures]


def local_world(
    ranks: int,
    device: torch.device | str = "cpu",
    *,
    timeout: float = 30.0,
    streams: bool = False,
    products: str = "torch",
    device_options: DeviceOptions = DEFAULT,
    hosts: Sequence[int] | None = None,
) -> LocalWorld:
    """Make a world of `ranks` ranks that are threads of this process and share `device`: the CPU,
    or one GPU.

    On a GPU each rank has its own stream, and they run concurrently; grids of waiting kernels that
    could fill the GPU are rejected, so that the kernels they wait for can run. `timeout` is in
    seconds and bounds every wait. With `streams` plans run on a CPU as on a GPU, each lane on a
    thread: slower. `products` and `device_options` are those of `weft.init`; with ``triton`` a CPU
    has streams. `hosts`, a number for each rank, lets ranks with different numbers behave as on
    different hosts: they share no memory, and exchange messages over the loopback. With streams
    there is one host.

    Raises `ValueError` for fewer than one rank, or more than a GPU has concurrent streams for, for
    hosts of another number of ranks, and for options that this world cannot honour;
    `WeftError` without a GPU, or without Triton for its products.

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(lambda: weft.all_reduce(torch.ones(3)))
        [tensor([2., 2., 2.]), tensor([2., 2., 2.])]
    """
    check_ranks(ranks)
    backend = backend_of(device, products, streams, shared=True)
    backend.share(ranks, device_options)
    backend.check_options(device_options, ranks)
    on = () if hosts is None else integers(hosts, "hosts")
    if on and len(on) != ranks:
        raise ValueError(f"hosts must have a number for each of the {ranks} ranks; got {on}")
    if backend.stream_ordered and len({*on}) > 1:
        raise ValueError("ranks that work on streams share one host: leave out hosts")
    return LocalWorld(ranks, limited(timeout), backend, device_options, on)


def _pairs(
    ranks: int,
    connected: Callable[[int, int], bool],
    pair: Callable[[], tuple[socket.socket, socket.socket]],
) -> Sequence[dict[int, socket.socket]]:
    """For each rank its end of a `pair` of sockets for each peer to which it is `connected`."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        if connected(one, other):
            ends[one][other], ends[other][one] = pair()
    return ends


def _unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
