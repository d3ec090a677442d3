"""How ranks find each other: the process group they belong to, and a Unix socket between every two on a host.

The sockets have abstract addresses, which vanish with their owners and cannot be reached from another host (a network namespace
is one); who is connected is checked to be the same user.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import PeerTimeout, WeftError


class Place(NamedTuple):
    """Where a rank lives: its process, its host, the address of its socket and the cores it may run on."""

    pid: int
    host: str
    address: str
    cores: frozenset[int]


def default_group(environment: Mapping[str, str] = os.environ) -> dist.ProcessGroup | None:
    """The default process group, initialised from the launcher's variables if it is not yet; None for a process on its own."""
    if not dist.is_available():
        raise WeftError("this torch is built without torch.distributed")
    if not dist.is_initialized():
        if not translated(environment):
            return None
        dist.init_process_group("gloo")
        atexit.register(_leave_group)
    return dist.group.WORLD


def join(store: Store, rank: int, ranks: int) -> None:
    """Initialise the default process group of ranks that share a store already."""
    dist.init_process_group("gloo", store=PrefixStore("weft", store), rank=rank, world_size=ranks)
    atexit.register(_leave_group)


def translated(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process; if so torch's variables are set. Raises `WeftError` if one is missing."""
    variables = launcher_variables(environment)
    if variables is None:
        return False
    if variables["MASTER_ADDR"] == "localhost" and _several_hosts(variables):
        raise WeftError(
            "mpirun has started ranks on several hosts and does not say where rank 0 is: give all ranks MASTER_ADDR, the "
            "address of its host (mpirun -x MASTER_ADDR=node0 with Open MPI, mpiexec -genv MASTER_ADDR node0 with MPICH)"
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return True


def _leave_group() -> None:
    """A group that weft made must be gone before the interpreter is: its threads may still want to run Python."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """What torch's ``env://`` initialisation needs, translated from the variables of torchrun, mpirun or srun.

    mpirun and SLURM do not say where rank 0 listens. Unless ``MASTER_ADDR`` is set it is the first host of a SLURM step and this
    host otherwise; unless ``MASTER_PORT`` is set the port is derived from the job, which all its ranks know. MPICH names no job:
    where it has started ranks on several hosts the port is torch's own, 29500.
    """
    known = {
        "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
        "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    }
    found = {name: next((environment[key] for key in keys if key in environment), None) for name, keys in known.items()}
    if found["RANK"] is None or found["WORLD_SIZE"] is None:
        return None
    variables = {name: value for name, value in found.items() if value is not None}
    job = next((environment[key] for key in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_ID") if key in environment), str(os.getppid()))
    if "PMI_RANK" in environment:  # MPICH names no job, but its ranks on a host have one parent
        job = str(os.getppid())
    port = 20000 + sum(map(ord, job)) * 7919 % 12000
    if "PMI_RANK" in environment and _several_hosts(variables):
        port = 29500
    first = re.split(r"[,\[]", environment.get("SLURM_STEP_NODELIST", "localhost"))
    bracket = re.match(r"[^\[,]*\[(\d+)", environment.get("SLURM_STEP_NODELIST", ""))
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", first[0] + (bracket.group(1) if bracket else ""))
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return variables


def _several_hosts(variables: Mapping[str, str]) -> bool:
    """Whether the launcher says that not all ranks are on this host."""
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])) < int(variables["WORLD_SIZE"])


def host_identity() -> str:
    """Equal for two processes exactly if they can share memory and abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


class Listener:
    """This rank's socket, to which peers connect."""

    def __init__(self) -> None:
        self.address = f"weft-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.bind("\0" + self.address)
        self.socket.listen(1024)

    def connect(self, rank: int, places: list[Place], timeout: float) -> list[int]:
        """Connect to all peers on this host and return a socket for each, in rank order, -1 for the others.

        Lower ranks are called, higher ones call. Raises `PeerTimeout` naming the ranks that did not appear.
        """
        deadline = time.monotonic() + timeout
        peers = [-1] * len(places)
        near = [peer for peer, place in enumerate(places) if place.host == places[rank].host]
        for peer in [peer for peer in near if peer < rank]:
            to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            to.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                to.connect("\0" + places[peer].address)
                to.send(struct.pack("i", rank))
            except OSError as error:
                raise PeerTimeout(f"rank {rank} cannot reach rank {peer} (pid {places[peer].pid}): {error}") from error
            to.settimeout(None)
            peers[peer] = to.detach()
        while missing := [peer for peer in near if peer > rank and peers[peer] < 0]:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                caller, _ = self.socket.accept()
                _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                caller.settimeout(max(0.001, deadline - time.monotonic()))
                hello = caller.recv(4) if uid == os.getuid() else b""
            except TimeoutError as error:
                raise PeerTimeout(f"rank {rank} waited {timeout:g} s for ranks {missing} to connect") from error
            if len(hello) == 4:
                caller.settimeout(None)
                peers[struct.unpack("i", hello)[0]] = caller.detach()
        return peers

    def close(self) -> None:
        self.socket.close()
