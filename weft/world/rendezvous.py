"""How ranks find each other: by the process group or the store they share, in which each says where
it is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.checks import LONGEST
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.schedules.thresholds import Thresholds
from weft.version import __version__
from weft.world.forked import keep_in_children
from weft.world.listener import INTERFACE, Address
from weft.world.peer_memory import Probe
from weft.world.wire import convert, decode, encode

Info = TypeVar("Info")
STARTING = 300.0
"""Seconds that ranks of a launcher have to come unless `weft.init` is told otherwise: some import
for long.
"""

_PLACE, _PLACES = 1 << 14, 0x7FFFFFFE  # bytes of a message that says where a rank is, and its tag
_LAST_WORD = 0.5  # seconds that a rank which gives up may take to say so
_PATIENCE = 10.0  # seconds of waiting for ranks to come, after which a warning names them
_AGAIN = 0.05  # seconds after which a rank looks again whether rank 0 listens
_JOB = "WEFT_JOB"  # the variable in which a process remembers the job that it was started in
_log = logging.getLogger("weft")


class RankInfo(NamedTuple):
    """Where a rank lives: its process, its host, the address of its socket, the cores it may run
    on, its compute threads, the package, NUMA node and cache that it is in, as far as all its cores
    are in one, the thresholds that follow from these, and where it lets peers try to read its
    memory.
    """

    pid: int
    host: str
    address: Address
    cores: frozenset[int]
    threads: int
    locality: tuple[int, ...] = ()
    thresholds: Thresholds = Thresholds()
    probe: Probe = Probe()


class Announcement(NamedTuple):
    """What a rank says to all others when they meet: its version of weft, its job, why it gives up
    if it does, and where it is.
    """

    version: str
    job: str
    gives_up: str
    info: Any


def default_group(
    environment: Mapping[str, str] = os.environ, timeout: float = STARTING
) -> dist.ProcessGroup | None:
    """The default process group, initialised from the launcher's variables if it is not yet; None
    for a process on its own.

    Raises as `launched` and `join` do.
    """
    if not dist.is_available():
        raise WeftError("this torch is built without torch.distributed")
    if not dist.is_initialized():
        if not translated(environment):
            return None
        join(*launched(timeout), timeout)
    return dist.group.WORLD


def launched(timeout: float) -> tuple[Store, int, int]:
    """The store that the ranks of a launcher share, this rank, and their number, once all ranks
    have come to the store.

    Raises `PeerTimeout` that names the ranks which do not come in time, `PeerLost` if the store is
    lost meanwhile, `WeftError` if rank 0 cannot hold it.
    """
    rank, ranks, address, port = (
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return _store(int(rank), int(ranks), address, int(port), timeout), int(rank), int(ranks)


def _store(rank: int, ranks: int, address: str, port: int, timeout: float) -> Store:
    deadline, where, ours = (
        time.monotonic() + timeout,
        f"{address}:{port}",
        f"job {job()}" if job() else "the job",
    )
    advice = (
        "is it started, and are MASTER_ADDR and MASTER_PORT alike on all ranks and open to them?"
    )
    holds = (
        rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )  # else torchrun does
    try:
        if not holds:
            _reach(address, port, deadline)
        tcp = TCPStore(
            address,
            port,
            ranks,
            holds,
            time_left(deadline),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, OSError) as error:
        if holds:
            raise WeftError(
                f"rank 0 cannot listen on port {port}, where ranks of {ours} are to meet: {error}; "
                "another job may use it: set "
                "MASTER_PORT to another one on all ranks"
            ) from error
        raise PeerTimeout(
            f"rank {rank} waited {timeout:g} s for rank 0 of {ours} to listen at {where}: {advice} "
            f"({error})"
        ) from error
    # Jobs that come to one port by chance do not see each other, nor a job what it left there
    # before it was started again.
    store: Store = PrefixStore(
        f"weft {job()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", tcp
    )
    store = PrefixStore(str(store.add(f"{rank}", 1)), store)
    store.set(f"here {rank}", "")
    keys, warned = [f"here {peer}" for peer in range(ranks)], False
    while True:
        patience = min(time.monotonic() + _PATIENCE, deadline)
        try:
            with contextlib.suppress(dist.DistStoreError):  # it took too long
                store.wait(keys, time_left(patience))
                return store
            missing = _listed([peer for peer, key in enumerate(keys) if not store.check([key])])
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} lost the store at {where} while it waited for all {ranks} ranks to "
                f"join {ours}; whoever holds it has "
                f"died or given up: {error}"
            ) from error
        if missing and time.monotonic() >= deadline:
            if holds:
                time.sleep(_LAST_WORD)  # others, who came a little later, want to know as well
            raise PeerTimeout(
                f"rank {rank} waited {timeout:g} s for {missing} of {ranks} to join {ours} at "
                f"{where}: {advice}"
            )
        if missing and not warned:
            _log.warning(
                "rank %d waits for %s of %d to join %s at %s", rank, missing, ranks, ours, where
            )
            warned = True


def _reach(address: str, port: int, deadline: float) -> None:
    """Return once somebody listens there, `OSError` if nobody does in time: torch tries for twice
    as long as it is told.
    """
    while True:
        try:
            return socket.create_connection(
                (address, port), max(0.001, deadline - time.monotonic())
            ).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_AGAIN)


def _listed(ranks: list[int]) -> str:
    """In words; empty for none."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:10]))}{more}"
        if ranks
        else ""
    )


def join(store: Store, rank: int, ranks: int, timeout: float) -> None:
    """Initialise the default process group of ranks that share a store already. Raises
    `PeerTimeout` if they cannot connect.
    """
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", store),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as error:
        raise PeerTimeout(
            f"rank {rank} cannot connect to all {ranks} ranks by gloo: {error}; {INTERFACE} says "
            "which interface ranks use, `weft "
            "doctor` what is wrong"
        ) from error
    _owned()
    c10d._set_pg_timeout(c10d.default_pg_timeout)  # for what the group is used for later


def translated(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process; if so torch's variables are set. Raises `WeftError`
    if one is missing.
    """
    variables = launcher_variables(environment)
    if variables is None:
        return False
    if variables["MASTER_ADDR"] == "localhost" and _several_hosts(variables):
        raise WeftError(
            "mpirun has started ranks on several hosts and does not say where rank 0 is: give all "
            "ranks MASTER_ADDR, the "
            "address of its host (mpirun -x MASTER_ADDR=node0 with Open MPI, mpiexec -genv "
            "MASTER_ADDR node0 with MPICH)"
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return True


def _owned() -> None:
    """The default group is weft's to end, in this process."""
    keep_in_children(dist.group.WORLD)
    atexit.register(_leave_group, os.getpid())


def _leave_group(process: int) -> None:
    """A group that weft made must be gone before the interpreter is: its threads may still want to
    run Python. A forked child has none of them.
    """
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """What torch's ``env://`` initialisation needs, translated from the variables of torchrun,
    mpirun or srun.

    mpirun and SLURM do not say where rank 0 listens. Unless ``MASTER_ADDR`` is set it is the first
    host of a SLURM step and this host otherwise; unless ``MASTER_PORT`` is set the port is derived
    from the job, which all its ranks know. MPICH names no job: where it has started ranks on
    several hosts the port is torch's own, 29500.
    """
    known = {
        "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
        "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": (
            "LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "MPI_LOCALRANKID",
            "SLURM_LOCALID",
        ),
        "LOCAL_WORLD_SIZE": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    }
    found = {
        name: [environment[key] for key in keys if key in environment]
        for name, keys in known.items()
    }
    variables = {name: values[0] for name, values in found.items() if values}
    if not {"RANK", "WORLD_SIZE"} <= {*variables}:
        return None
    mpich = "PMI_RANK" in environment  # which names no job, but its ranks on a host have one parent
    if mpich and _several_hosts(variables):
        name, port = "", 29500
    else:
        name = _job_of_launcher(environment, mpich)
        port = 20000 + zlib.crc32(name.encode()) % 12000
    if "RANK" not in environment and name:
        variables[_JOB] = name
    first = re.findall(r"([^,\[]*)\[?(\d*)", environment.get("SLURM_STEP_NODELIST", "localhost"))[
        0
    ]  # node01 of node[01-03]
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", "".join(first))
    variables["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return variables


def _job_of_launcher(environment: Mapping[str, str], mpich: bool) -> str:
    """What tells the job that a launcher has started from all others on this host."""
    if not mpich and "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if not mpich and "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
    return f"process {os.getppid()}"


def job() -> str:
    """The name of this process's job, alike on all its ranks; empty where the launcher gave it
    none.
    """
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get(_JOB, "")


def _several_hosts(variables: Mapping[str, str]) -> bool:
    """Whether the launcher says that not all ranks are on this host."""
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])) < int(
        variables["WORLD_SIZE"]
    )


def host_identity() -> str:
    """Equal for two processes exactly if they can share memory and abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


class GroupRendezvous:
    """How the ranks of a process group that has gloo find each other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = [peer for peer in range(self.ranks) if peer != self.rank]

    @contextlib.contextmanager
    def exchange(self, own: Info, timeout: float) -> Iterator[list[Info]]:
        """What all ranks say of where they are, each its `own`; in the ``with`` block what is on
        its way may still arrive.

        Raises `PeerLost` or `PeerTimeout` naming the rank from which nothing comes or that gave up,
        `WeftError` naming one that runs another version of weft, belongs to another job, or says
        what nobody can understand.
        """
        group, rank, said = self.group, self.rank, [own] * self.ranks
        deadline, under_way = time.monotonic() + timeout, self._say(_word(own))
        for peer in self.peers:
            theirs = torch.empty(_PLACE, dtype=torch.uint8)
            try:
                group.recv([theirs], peer, _PLACES).wait(time_left(deadline))
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise PeerLost(
                        f"rank {peer} was lost while rank {rank} waited to learn where it is: "
                        f"{error}"
                    ) from error
                raise PeerTimeout(
                    f"rank {rank} waited {timeout:g} s for rank {peer} to say where it is"
                ) from error
            said[peer] = _known(rank, peer, theirs.numpy().tobytes().rstrip(b"\0"), type(own))
        yield said
        del under_way

    def give_up(self, error: BaseException) -> None:
        """Let no rank wait for what this one would have said next."""
        deadline = time.monotonic() + _LAST_WORD
        for word in self._say(_word(None, error)):
            with contextlib.suppress(RuntimeError):  # who is gone need not hear it
                word.wait(time_left(deadline))

    def _say(self, word: bytes) -> list[dist.Work]:
        """Send all peers a message, which is through when all of this is."""
        under_way = list[dist.Work]()
        message = torch.zeros(_PLACE, dtype=torch.uint8)
        message[: len(word)] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        for peer in self.peers:
            with contextlib.suppress(RuntimeError):  # which receiving from it says, too
                under_way.append(self.group.send([message], peer, _PLACES))
        return under_way


class StoreRendezvous:
    """The same of ranks that share a store and know their numbers, and nothing else."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.rounds = itertools.count()
        # A group may be made again with what another of its name has left in the store.
        self.store = PrefixStore(f"weft {store.add(f'weft {rank}', 1)}", store)

    @contextlib.contextmanager
    def exchange(self, own: Info, timeout: float) -> Iterator[list[Info]]:
        """As `GroupRendezvous.exchange`."""
        turn = self._say(_word(own))
        deadline, said = time.monotonic() + timeout, list[Info]()
        for peer in range(self.ranks):
            key = f"{turn} {peer}"
            try:
                self.store.wait([key], time_left(deadline))
                word = self.store.get(key)
            except dist.DistStoreError as error:
                raise PeerTimeout(
                    f"rank {self.rank} waited {timeout:g} s for rank {peer} to say where it is"
                ) from error
            except RuntimeError as error:
                raise PeerLost(
                    f"rank {self.rank} lost the store while it waited for rank {peer} to say where "
                    f"it is: {error}"
                ) from error
            said.append(_known(self.rank, peer, word, type(own)))
        yield said

    def give_up(self, error: BaseException) -> None:
        """As `GroupRendezvous.give_up`."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it who would ask it
            self._say(_word(None, error))

    def _say(self, word: bytes) -> int:
        """Lay down what this rank has to say; the number of the turn."""
        turn = next(self.rounds)
        self.store.set(f"{turn} {self.rank}", word)  # type: ignore[arg-type]  # bytes do, too
        return turn


def by(group: dist.ProcessGroup) -> GroupRendezvous | StoreRendezvous:
    """How the ranks of a group find each other: by gloo, which notices who dies meanwhile, or else
    by the group's store.
    """
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of the group")
    cpu = torch.device("cpu")
    if cpu in group._device_types and group._get_backend(cpu).name() == "gloo":
        return GroupRendezvous(group)
    _, store = c10d._world.pg_map.get(group, (None, None))
    if store is None:
        raise WeftError(
            "the group has neither gloo nor a store, by which ranks could meet: pass another one, "
            "as of dist.new_group()"
        )
    return StoreRendezvous(
        PrefixStore("weft world", store), dist.get_rank(group), dist.get_world_size(group)
    )


def time_left(deadline: float) -> timedelta:
    """The time until then, or next to none."""
    return timedelta(seconds=min(max(0.001, deadline - time.monotonic()), LONGEST))


def _word(own: object, gives_up: BaseException | None = None) -> bytes:
    return encode(
        Announcement(
            __version__,
            job(),
            (str(gives_up) or type(gives_up).__name__)[:1000] if gives_up else "",
            own,
        )
    )


def _known(rank: int, peer: int, word: bytes, kind: Any) -> Any:
    """What a peer has said of where it is."""
    try:
        theirs = decode(word, Announcement)
        if theirs.version != __version__:
            raise WeftError(
                f"rank {peer} runs weft {theirs.version}, rank {rank} {__version__}: let all run "
                "the same"
            )
        if theirs.job != job():
            raise WeftError(
                f"rank {peer} belongs to another job ({theirs.job!r}, rank {rank} to {job()!r}): "
                "let each use a port of its own"
            )
        if theirs.gives_up:
            raise PeerLost(
                f"rank {peer} gave up while rank {rank} waited to learn where it is: "
                f"{theirs.gives_up}"
            )
        return convert(kind, theirs.info)
    except ValueError as error:
        raise WeftError(
            f"rank {rank} does not understand what rank {peer} says of where it is: {error}; does "
            "it run another version of weft, "
            "or has somebody else written there?"
        ) from error
