"""How ranks find each other: by the process group or the store they share, in which each says where it is."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.schedules.thresholds import Thresholds
from weft.world.forked import keep_in_children
from weft.world.listener import Address

Said = TypeVar("Said")
_PLACE, _PLACES = 1 << 14, 0x7FFFFFFE  # bytes of a message that says where a rank is, and its tag
_LAST_WORD = 0.5  # seconds that a rank which gives up may take to say so


class Place(NamedTuple):
    """Where a rank lives: its process, its host, the address of its socket, the cores it may run on, its compute threads, the
    package, NUMA node and cache that it is in, as far as all its cores are in one, the thresholds that follow from these, and where
    it lets peers try to read its memory (`peer_memory.probe`)."""

    pid: int
    host: str
    address: Address
    cores: frozenset[int]
    threads: int
    spot: tuple[int, ...] = ()
    thresholds: Thresholds = Thresholds()
    probe: int = 0


class GaveUp(NamedTuple):
    """What a rank that gives up says instead of where it is, and why."""

    why: str


def default_group(environment: Mapping[str, str] = os.environ) -> dist.ProcessGroup | None:
    """The default process group, initialised from the launcher's variables if it is not yet; None for a process on its own."""
    if not dist.is_available():
        raise WeftError("this torch is built without torch.distributed")
    if not dist.is_initialized():
        if not translated(environment):
            return None
        dist.init_process_group("gloo")
        _owned()
    return dist.group.WORLD


def join(store: Store, rank: int, ranks: int) -> None:
    """Initialise the default process group of ranks that share a store already."""
    dist.init_process_group("gloo", store=PrefixStore("weft", store), rank=rank, world_size=ranks)
    _owned()


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


def _owned() -> None:
    """The default group is weft's to end, in this process."""
    keep_in_children(dist.group.WORLD)
    atexit.register(_leave_group, os.getpid())


def _leave_group(process: int) -> None:
    """A group that weft made must be gone before the interpreter is: its threads may still want to run Python. A forked child has
    none of them."""
    if os.getpid() == process and dist.is_initialized():
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
    found = {name: [environment[key] for key in keys if key in environment] for name, keys in known.items()}
    variables = {name: values[0] for name, values in found.items() if values}
    if not {"RANK", "WORLD_SIZE"} <= {*variables}:
        return None
    mpich = "PMI_RANK" in environment  # which names no job, but its ranks on a host have one parent
    jobs = [] if mpich else [environment[key] for key in ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_ID") if key in environment]
    job = jobs[0] if jobs else str(os.getppid())
    port = 29500 if mpich and _several_hosts(variables) else 20000 + sum(map(ord, job)) * 7919 % 12000
    first = re.findall(r"([^,\[]*)\[?(\d*)", environment.get("SLURM_STEP_NODELIST", "localhost"))[0]  # node01 of node[01-03]
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", "".join(first))
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return variables


def _several_hosts(variables: Mapping[str, str]) -> bool:
    """Whether the launcher says that not all ranks are on this host."""
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])) < int(variables["WORLD_SIZE"])


def host_identity() -> str:
    """Equal for two processes exactly if they can share memory and abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


class ByGroup:
    """How the ranks of a process group find each other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group")
        on_cpu = torch.device("cpu") in group._device_types
        self.backend = group._get_backend(torch.device("cpu")).name() if on_cpu else ""
        self.peers = [peer for peer in range(self.ranks) if peer != self.rank]

    @contextlib.contextmanager
    def exchanged(self, own: Said, timeout: float) -> Iterator[list[Said]]:
        """What all ranks say of where they are, each its `own`; in the ``with`` block what is on its way may still arrive.

        Raises `PeerLost` or `PeerTimeout` naming the rank from which nothing comes, where that can be known, or that gave up.
        """
        group, rank, said = self.group, self.rank, [own] * self.ranks
        if self.backend != "gloo":
            dist.all_gather_object(said, own, group=group)
            yield said
            return
        deadline, under_way = time.monotonic() + timeout, self._say(own)
        for peer in self.peers:
            theirs = torch.empty(_PLACE, dtype=torch.uint8)
            try:
                group.recv([theirs], peer, _PLACES).wait(time_left(deadline))
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise PeerLost(f"rank {peer} was lost while rank {rank} waited to learn where it is: {error}") from error
                raise PeerTimeout(f"rank {rank} waited {timeout:g} s for rank {peer} to say where it is") from error
            said[peer] = _known(rank, peer, theirs.numpy().tobytes())
        yield said
        del under_way

    def give_up(self, error: BaseException) -> None:
        """Let no rank wait for what this one would have said next."""
        deadline = time.monotonic() + _LAST_WORD
        for word in self._say(GaveUp(str(error)[:1000])) if self.backend == "gloo" else ():
            with contextlib.suppress(RuntimeError):  # who is gone need not hear it
                word.wait(time_left(deadline))

    def _say(self, own: object) -> list[dist.Work]:
        """Send all peers a message, which is through when all of this is."""
        words, under_way = pickle.dumps(own), list[dist.Work]()
        message = torch.zeros(_PLACE, dtype=torch.uint8)
        message[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        for peer in self.peers:
            with contextlib.suppress(RuntimeError):  # which receiving from it says, too
                under_way.append(self.group.send([message], peer, _PLACES))
        return under_way


class ByStore:
    """The same of ranks that share a store and know their numbers, and nothing else."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.rounds = itertools.count()
        # A group may be made again with what another of its name has left in the store.
        self.store = PrefixStore(f"weft {store.add(f'weft {rank}', 1)}", store)

    @contextlib.contextmanager
    def exchanged(self, own: Said, timeout: float) -> Iterator[list[Said]]:
        """As `ByGroup.exchanged`."""
        turn = self._say(own)
        deadline, said = time.monotonic() + timeout, list[Said]()
        for peer in range(self.ranks):
            key = f"{turn} {peer}"
            try:
                self.store.wait([key], time_left(deadline))
                words = self.store.get(key)
            except RuntimeError as error:
                raise PeerTimeout(f"rank {self.rank} waited {timeout:g} s for rank {peer} to say where it is: {error}") from error
            said.append(_known(self.rank, peer, words))
        yield said

    def give_up(self, error: BaseException) -> None:
        """As `ByGroup.give_up`."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it who would ask it
            self._say(GaveUp(str(error)[:1000]))

    def _say(self, own: object) -> int:
        """Lay down what this rank has to say; the number of the turn."""
        turn = next(self.rounds)
        self.store.set(f"{turn} {self.rank}", pickle.dumps(own))  # type: ignore[arg-type]  # bytes do, too
        return turn


def time_left(deadline: float) -> timedelta:
    """The time until then, or next to none."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _known(rank: int, peer: int, words: bytes) -> Any:
    """What a peer has said of where it is."""
    said = pickle.loads(words)
    if isinstance(said, GaveUp):
        raise PeerLost(f"rank {peer} gave up while rank {rank} waited to learn where it is: {said.why}")
    return said
