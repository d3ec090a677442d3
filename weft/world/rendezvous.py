"""How ranks find each other: the process group or the store they share, and a Unix socket between every two on a host.

The sockets have abstract addresses, which vanish with their owners and cannot be reached from another host (a network namespace
is one); who is connected is checked to be the same user.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import PeerLost, PeerTimeout, WeftError

_PLACE, _PLACES = 1 << 14, 0x7FFFFFFE  # bytes of a message that says where a rank is, and its tag


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


class Meeting(Protocol):
    """How the ranks of a world to be find each other: this rank's number, how many there are, and ways to speak to all of them."""

    rank: int
    ranks: int

    def exchanged(self, own: Place, timeout: float) -> contextlib.AbstractContextManager[list[Place]]:
        """The places of all ranks, each of which gives its `own`; in the ``with`` block what is on its way may still arrive.

        Raises `PeerLost` or `PeerTimeout` naming the rank whose place does not come, where that can be known.
        """

    def connected(self, name: str, timeout: float) -> Carrier:
        """Connections between all ranks, of this name, which carry CPU tensors with tags."""


class Carrier(Protocol):
    """What moves tensors between hosts: a process group, or a backend of torch's by itself."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> dist.Work: ...


class Alone:
    """A rank by itself."""

    rank, ranks = 0, 1

    @contextlib.contextmanager
    def exchanged(self, own: Place, timeout: float) -> Iterator[list[Place]]:
        yield [own]

    def connected(self, name: str, timeout: float) -> Carrier:
        raise AssertionError("a rank by itself has nobody to be connected with")


class ByGroup:
    """Ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")
        on_cpu = torch.device("cpu") in group._device_types
        self.backend = group._get_backend(torch.device("cpu")).name() if on_cpu else ""

    @contextlib.contextmanager
    def exchanged(self, own: Place, timeout: float) -> Iterator[list[Place]]:
        group, rank, places = self.group, self.rank, [own] * self.ranks
        if self.backend != "gloo":
            dist.all_gather_object(places, own, group=group)
            yield places
            return
        deadline, said = time.monotonic() + timeout, pickle.dumps(own)
        mine = torch.zeros(_PLACE, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        peers = [peer for peer in range(len(places)) if peer != rank]
        under_way = []
        for peer in peers:
            with contextlib.suppress(RuntimeError):  # which the receive says, too
                under_way.append(group.send([mine], peer, _PLACES))
        for peer in peers:
            theirs = torch.empty_like(mine)
            try:
                group.recv([theirs], peer, _PLACES).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise PeerLost(f"rank {peer} was lost while rank {rank} waited to learn where it is: {error}") from error
                raise PeerTimeout(f"rank {rank} waited {timeout:g} s for rank {peer} to say where it is") from error
            places[peer] = Place(*pickle.loads(theirs.numpy().tobytes()))
        yield places
        del under_way

    def connected(self, name: str, timeout: float) -> Carrier:
        if not self.backend:
            raise WeftError(
                f"the backend {dist.get_backend(self.group)} moves no CPU tensors: initialise torch.distributed with "
                '"cpu:gloo,cuda:nccl", or gloo'
            )
        made: Carrier = dist.new_group(
            dist.get_process_group_ranks(self.group),
            timeout=timedelta(seconds=timeout),
            backend="gloo" if self.backend == "weft" else None,
            use_local_synchronization=True,
            group_desc=f"weft {name}",
        )
        return made


class ByStore:
    """Ranks that share a store and know their numbers, and nothing else."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        # A group may be made again with what another of its name has left in the store.
        self.store = PrefixStore(f"weft {store.add(f'weft {rank}', 1)}", store)

    @contextlib.contextmanager
    def exchanged(self, own: Place, timeout: float) -> Iterator[list[Place]]:
        self.store.set(str(self.rank), pickle.dumps(own))  # type: ignore[arg-type]  # bytes do, too
        deadline, places = time.monotonic() + timeout, []
        for peer in range(self.ranks):
            try:
                self.store.wait([str(peer)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
                places.append(Place(*pickle.loads(self.store.get(str(peer)))))
            except RuntimeError as error:
                raise PeerTimeout(f"rank {self.rank} waited {timeout:g} s for rank {peer} to say where it is: {error}") from error
        yield places

    def connected(self, name: str, timeout: float) -> Carrier:
        made: Any = dist.ProcessGroupGloo(PrefixStore(name, self.store), self.rank, self.ranks, timeout=timedelta(seconds=timeout))
        return cast(Carrier, made)


def _lost(rank: int, peer: int, places: Sequence[Place]) -> PeerLost:
    how = "died or gave up"
    return PeerLost(f"rank {peer} (pid {places[peer].pid}) {how} while rank {rank} waited to connect to it", how)


class Listener:
    """This rank's socket, to which peers connect."""

    def __init__(self) -> None:
        self.address = f"weft-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.bind("\0" + self.address)
        self.socket.listen(1024)
        self.answered: list[socket.socket] = []

    def connect(self, rank: int, places: list[Place], timeout: float) -> list[int]:
        """Connect to all peers on this host and return a socket for each, in rank order, -1 for the others.

        Every two ranks call each other. The call of the higher one becomes their socket; that of the lower one only shows, by
        hanging up, that the higher one is gone. Raises `PeerTimeout` naming the ranks that did not appear, `PeerLost` one that
        is gone.
        """
        deadline = time.monotonic() + timeout
        near = [peer for peer, place in enumerate(places) if place.host == places[rank].host and peer != rank]
        called: dict[int, socket.socket | None] = {}  # None: it does not listen any more
        callers: dict[int, socket.socket] = {}
        try:
            for peer in near:
                called[peer] = self._call(rank, peer, places, deadline)
            while missing := [peer for peer in near if peer > rank and peer not in callers]:
                watched = {at.fileno(): peer for peer in missing if (at := called[peer]) is not None}
                here = select.poll()
                for fd in (self.socket.fileno(), *watched):
                    here.register(fd, select.POLLIN)
                left = deadline - time.monotonic() if len(watched) == len(missing) else 0.0
                ready = [fd for fd, _ in here.poll(max(0.0, left) * 1000)]
                if self.socket.fileno() in ready:  # first: who has called may go
                    if (hello := self._answer(deadline)) is not None:
                        callers.update([hello])
                elif gone := [peer for peer in missing if (at := called[peer]) is None or at.fileno() in ready]:
                    raise _lost(rank, gone[0], places)
                else:
                    raise PeerTimeout(f"rank {rank} waited {timeout:g} s for ranks {missing} to connect")
            peers = [-1] * len(places)
            for peer in near:
                end = callers.pop(peer) if peer > rank else called.pop(peer)
                assert end is not None
                end.settimeout(None)
                peers[peer] = end.detach()
            return peers
        finally:
            for each in (*called.values(), *callers.values()):
                if each is not None:
                    each.close()

    def _call(self, rank: int, peer: int, places: Sequence[Place], deadline: float) -> socket.socket | None:
        """A connection to a peer; None if a higher one listens no more, since it may have called and gone on."""
        to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            to.settimeout(max(0.001, deadline - time.monotonic()))
            to.connect("\0" + places[peer].address)
            to.send(struct.pack("i", rank))
        except (ConnectionError, TimeoutError) as error:
            to.close()
            if isinstance(error, TimeoutError):
                raise PeerTimeout(f"rank {rank} cannot reach rank {peer} (pid {places[peer].pid}): {error}") from error
            if peer < rank:
                raise _lost(rank, peer, places) from error
            return None
        except BaseException:
            to.close()
            raise
        return to

    def _answer(self, deadline: float) -> tuple[int, socket.socket] | None:
        """Who calls, with the connection; None for a stranger, or one that is gone again."""
        caller, _ = self.socket.accept()
        self.answered.append(caller)
        _, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        caller.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            hello = caller.recv(4) if uid == os.getuid() else b""
        except (ConnectionError, TimeoutError):
            return None
        return (struct.unpack("i", hello)[0], caller) if len(hello) == 4 else None

    def close(self) -> None:
        """Hang up on all whose calls have not become this rank's sockets."""
        self.socket.close()
        for caller in self.answered:
            caller.close()
