"""The store that the ranks of a launcher share, at the address in its variables."""

from __future__ import annotations

import logging
import os
import socket
import time

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.bootstrap.forked import keep_in_children
from weft.bootstrap.interfaces import choose_interface
from weft.bootstrap.rendezvous import check_size, listed, met, time_left
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.launchers.variables import job

STARTING = 300.0
"""Default seconds for all ranks of a launcher to reach `weft.init`: imports may be slow."""

_PATIENCE = 10.0  # seconds of waiting for ranks, after which a warning names them
_NAMED = 15.0  # seconds in which the name of rank 0's host must become known
_LATECOMERS = 0.5  # seconds that rank 0 serves the store after its own limit
_RETRY = 0.05  # seconds between attempts to connect to rank 0
_log = logging.getLogger("weft")

_served: dict[int, Store] = {}
"""The stores that this process serves, by port: others may use them as long as it lives, also for
process groups of torch, which share them.
"""


def launched(timeout: float) -> tuple[Store, int, int]:
    """The store that the ranks of a launcher share, this rank, and the number of ranks, once all
    ranks have reached the store.

    Raises `PeerTimeout` that names missing ranks, `PeerLost` if the store is lost meanwhile,
    `WeftError` if rank 0 cannot serve it.
    """
    rank, ranks, address, port = (
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    store = _store(int(rank), int(ranks), address, int(port), timeout)
    choose_interface(address)
    return store, int(rank), int(ranks)


def _store(rank: int, ranks: int, address: str, port: int, timeout: float) -> Store:
    deadline = time.monotonic() + timeout
    where = f"{address}:{port}"
    ours = f"job {job()}" if job() else "the job"
    advice = "is it started, and are MASTER_ADDR and MASTER_PORT equal on all ranks and reachable?"
    # else torchrun serves the store
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    _resolve(address, deadline)
    try:
        if not serves:
            _reach(address, port, deadline)
        tcp = TCPStore(
            address,
            port,
            ranks,
            serves,
            time_left(deadline),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, OSError) as error:
        if serves:
            raise WeftError(
                f"rank 0 cannot listen on port {port} for the ranks of {ours}: {error}; another "
                "job may use the port: set MASTER_PORT to a free one on all ranks"
            ) from None
        raise PeerTimeout(
            f"rank {rank} waited {timeout:g} s for rank 0 of {ours} to listen at {where}: {advice} "
            f"({error})"
        ) from None
    if serves and port not in _served:
        keep_in_children(tcp)
        _served[port] = tcp
    # The prefix separates jobs that use one port by chance, and a restarted job from its past.
    store: Store = PrefixStore(
        f"weft {job()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", tcp
    )
    keys = [f"here {peer}" for peer in range(ranks)]
    left = max(0.0, deadline - time.monotonic())
    soon = min(_PATIENCE, left)
    try:
        store = PrefixStore(str(store.add(f"{rank}", 1)), store)
        check_size(store, rank, ranks)
        store.set(keys[rank], "")
        missing = _missing(store, keys, soon)
        if missing and left > soon:
            _log.warning(
                "rank %d waits for %s of %d to join %s at %s", rank, missing, ranks, ours, where
            )
            missing = _missing(store, keys, left - soon)
    except WeftError:
        _serve_latecomers(serves)
        raise
    except dist.DistNetworkError as error:
        raise PeerLost(
            f"rank {rank} lost the store at {where} while it waited for all {ranks} ranks to "
            f"join {ours}; the process that serves it has died or given up: {error}"
        ) from error
    if missing:
        _serve_latecomers(serves)
        raise PeerTimeout(
            f"rank {rank} waited {timeout:g} s for {missing} of {ranks} to join {ours} at "
            f"{where}: {advice}"
        )
    return store


def _missing(store: Store, keys: list[str], seconds: float) -> str:
    """The ranks whose keys do not come within `seconds`, as a list for a message. Raises as
    `met`.
    """
    if met(store, keys, seconds):
        return ""
    return listed([peer for peer, key in enumerate(keys) if not store.check([key])])


def _serve_latecomers(serves: bool) -> None:
    """Keep the store for ranks that started later, so that they read the error."""
    if serves:
        time.sleep(_LATECOMERS)


def _resolve(address: str, deadline: float) -> None:
    """Return once the address of rank 0 has been resolved: the name of a container may be some
    seconds late.
    """
    deadline = min(deadline, time.monotonic() + _NAMED)
    warned = False
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror as error:
            why = error.strerror
            possible = True
        except UnicodeError:  # an empty or very long part
            why = "no name of a host"
            possible = False
        text = (
            f"MASTER_ADDR is {address!r}, which cannot be resolved ({why}): set it to the name or "
            "address of rank 0's host"
        )
        if not possible or time.monotonic() >= deadline:
            raise WeftError(text)
        if not warned:
            _log.warning("%s", text)
            warned = True
        time.sleep(_RETRY)


def _reach(address: str, port: int, deadline: float) -> None:
    """Return once a process listens at the address, `OSError` if none does in time: torch itself
    would try for twice the limit.
    """
    while True:
        try:
            return socket.create_connection(
                (address, port), max(0.001, deadline - time.monotonic())
            ).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY)
