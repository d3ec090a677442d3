"""Rendezvous: ranks find each other by a process group or a store that they share, and exchange
records of themselves.
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
from weft.world.listener import INTERFACE, Address, choose_interface
from weft.world.peer_memory import Probe
from weft.world.wire import convert, decode, encode

Info = TypeVar("Info")
STARTING = 300.0
"""Default seconds for all ranks of a launcher to reach `weft.init`: imports may be slow."""

_MESSAGE_BYTES = 1 << 14  # of the messages of a `GroupRendezvous`
_TAG = 0x7FFFFFFE  # of these messages
_GIVE_UP = 0.5  # seconds that a rank which gives up may take to inform the others
_PATIENCE = 10.0  # seconds of waiting for ranks, after which a warning names them
_NAMED = 15.0  # seconds in which the name of rank 0's host must become known
_RETRY = 0.05  # seconds between attempts to connect to rank 0
_JOB = "WEFT_JOB"  # the variable with the job in which this process was started
_log = logging.getLogger("weft")


class RankInfo(NamedTuple):
    """A rank as its peers see it: its process, host, socket address, allowed cores and compute
    threads; the package, NUMA node and cache that contain all its cores; thresholds that follow
    from these; a probe by which peers test whether they can read its memory; and its GPU, if any.
    """

    pid: int
    host: str
    address: Address
    cores: frozenset[int]
    threads: int
    locality: tuple[int, ...] = ()
    thresholds: Thresholds = Thresholds()
    probe: Probe = Probe()
    device: str = ""


class Announcement(NamedTuple):
    """The message of a rank to all others: its version of weft, its job, the reason if it gives up,
    and a record of the rank.
    """

    version: str
    job: str
    gives_up: str
    info: Any


def default_group(
    environment: Mapping[str, str] = os.environ, timeout: float = STARTING
) -> dist.ProcessGroup | None:
    """The default process group, initialised from the launcher's variables if it is not yet; None
    for a process that no launcher started.

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
    # The prefix separates jobs that use one port by chance, and a restarted job from its past.
    store: Store = PrefixStore(
        f"weft {job()} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", tcp
    )
    store = PrefixStore(str(store.add(f"{rank}", 1)), store)
    store.set(f"here {rank}", "")
    keys = [f"here {peer}" for peer in range(ranks)]
    warned = False
    while True:
        patience = min(time.monotonic() + _PATIENCE, deadline)
        try:
            with contextlib.suppress(dist.DistStoreError):  # a timeout
                store.wait(keys, time_left(patience))
                return store
            missing = _listed([peer for peer, key in enumerate(keys) if not store.check([key])])
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} lost the store at {where} while it waited for all {ranks} ranks to "
                f"join {ours}; the process that serves it has died or given up: {error}"
            ) from error
        if missing and time.monotonic() >= deadline:
            if serves:
                time.sleep(_GIVE_UP)  # ranks that started later read the missing ranks as well
            raise PeerTimeout(
                f"rank {rank} waited {timeout:g} s for {missing} of {ranks} to join {ours} at "
                f"{where}: {advice}"
            )
        if missing and not warned:
            _log.warning(
                "rank %d waits for %s of %d to join %s at %s", rank, missing, ranks, ours, where
            )
            warned = True


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


def _listed(ranks: list[int]) -> str:
    """A list of ranks for a message; empty for no ranks."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:10]))}{more}"
        if ranks
        else ""
    )


def join(store: Store, rank: int, ranks: int, timeout: float) -> None:
    """Initialise the default process group of ranks that share a store. Raises `PeerTimeout` if
    they cannot connect.
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
            f"rank {rank} cannot connect to all {ranks} ranks by gloo: {error}; {INTERFACE} sets "
            "the network interface, weft doctor finds the cause"
        ) from error
    _owned()
    c10d._set_pg_timeout(c10d.default_pg_timeout)  # for later uses of the group


def translated(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process; if so torch's variables are set. Raises `WeftError`
    if one is missing.
    """
    variables = launcher_variables(environment)
    if variables is None:
        return False
    if variables["MASTER_ADDR"] == "localhost" and _several_hosts(variables):
        raise WeftError(
            "mpirun has started ranks on several hosts without the address of rank 0: set "
            "MASTER_ADDR on all ranks to the address of its host (mpirun -x MASTER_ADDR=node0 "
            "with Open MPI, mpiexec -genv MASTER_ADDR node0 with MPICH)"
        )
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return True


def _owned() -> None:
    """Note that weft made the default group: it ends with this process, and not in its children."""
    keep_in_children(dist.group.WORLD)
    atexit.register(_leave_group, os.getpid())


def _leave_group(process: int) -> None:
    """Destroy a group that weft made before the interpreter ends: its threads may still run Python.
    A forked child has none of them.
    """
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The variables of torch's ``env://`` initialisation, translated from those of torchrun,
    mpirun or srun; None without a launcher.

    mpirun and SLURM do not give the address of rank 0. Unless ``MASTER_ADDR`` is set it is the
    first host of a SLURM step and this host otherwise; unless ``MASTER_PORT`` is set the port is a
    hash of the job's name, which all its ranks have. MPICH names no job: if it has started ranks on
    several hosts the port is torch's default, 29500.

    Raises `WeftError` for variables that no launcher sets.
    """
    sources = {
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
        for name, keys in sources.items()
    }
    variables = {name: values[0] for name, values in found.items() if values}
    if not {"RANK", "WORLD_SIZE"} <= {*variables}:
        for name, other in ("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"):
            if name in environment:
                raise WeftError(
                    f"{name} is set, but {other} is not: set both on every rank, as torchrun and "
                    "weft run do, or neither"
                )
        return None
    _check_ranks(variables)
    if here := _tasks_of_step(environment, variables):
        variables.setdefault("LOCAL_WORLD_SIZE", here)
    # MPICH names no job, but its ranks on a host have one parent. srun may set PMI_RANK too.
    mpich = "PMI_RANK" in environment and (
        "SLURM_STEP_ID" not in environment or "MPI_LOCALNRANKS" in environment
    )
    if mpich and _several_hosts(variables):
        name = ""
        port = 29500
    else:
        name = _job_of_launcher(environment, mpich)
        port = 20000 + zlib.crc32(name.encode()) % 12000
    if "RANK" not in environment and name:
        variables[_JOB] = name
    first = _first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR", first)
    variables["MASTER_PORT"] = given = environment.get("MASTER_PORT", str(port))
    if not (given.isdecimal() and int(given) < 1 << 16):
        raise WeftError(f"MASTER_PORT must be a port from 0 to 65535; got {given!r}")
    return variables


def _check_ranks(variables: Mapping[str, str]) -> None:
    """Raise `WeftError` unless RANK and WORLD_SIZE are numbers, and the rank one of the job's."""
    for name in ("RANK", "WORLD_SIZE"):
        if not variables[name].isdecimal():
            raise WeftError(f"{name} must be a number; got {variables[name]!r}")
    rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if rank >= ranks:
        raise WeftError(
            f"RANK is {rank}, but WORLD_SIZE is {ranks}: ranks are counted from 0, so the last is "
            f"{ranks - 1}"
        )


def _job_of_launcher(environment: Mapping[str, str], mpich: bool) -> str:
    """A name for the job of a launcher, different from all others on this host."""
    if not mpich and "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if not mpich and "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '')}"
    return f"process {os.getppid()}"


def job() -> str:
    """The name of this process's job, equal on all its ranks; empty if the launcher gave none."""
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get(_JOB, "")


def _tasks_of_step(environment: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """The number of ranks on this host, by SLURM's list 4(x2),3 of those on each, if the ranks are
    the tasks of a step of SLURM; else "".
    """
    if variables["WORLD_SIZE"] != environment.get("SLURM_STEP_NUM_TASKS"):
        return ""
    counts = [
        count
        for count, hosts in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(hosts or 1))
    ]
    here = int(environment.get("SLURM_NODEID", 0))
    return counts[here] if here < len(counts) else ""


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of hosts: a01-ib of a[01-03,7]-ib,b."""
    first = re.findall(r"(?:\[[^\]]*\]|[^,\[])*", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _several_hosts(variables: Mapping[str, str]) -> bool:
    """Whether ranks are on other hosts too, by the launcher's variables."""
    return int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"])) < int(
        variables["WORLD_SIZE"]
    )


def host_identity() -> str:
    """An identifier that is equal for two processes exactly if they can share memory and abstract
    sockets.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


class GroupRendezvous:
    """The rendezvous of ranks in a process group that has gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.peers = [peer for peer in range(self.ranks) if peer != self.rank]

    @contextlib.contextmanager
    def exchange(self, own: Info, timeout: float) -> Iterator[list[Info]]:
        """The records of all ranks, of which this rank contributes `own`. Messages to peers may
        still be in flight in the ``with`` block, at whose end all have arrived.

        Raises `PeerLost` or `PeerTimeout` naming a rank that sends nothing or gave up, `WeftError`
        naming one that runs another version of weft, belongs to another job, or sends another form
        of message.
        """
        group = self.group
        rank = self.rank
        infos = [own] * self.ranks
        deadline = time.monotonic() + timeout
        in_flight = self._send(_announcement(own))
        for peer in self.peers:
            theirs = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
            try:
                group.recv([theirs], peer, _TAG).wait(time_left(deadline))
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise PeerLost(
                        f"rank {peer} was lost while rank {rank} waited for its address: {error}"
                    ) from error
                raise PeerTimeout(
                    f"rank {rank} waited {timeout:g} s for the address of rank {peer}"
                ) from error
            infos[peer] = _checked(rank, peer, theirs.numpy().tobytes().rstrip(b"\0"), type(own))
        yield infos
        _complete(in_flight, deadline)

    def give_up(self, error: BaseException) -> None:
        """Send all ranks the reason in place of this rank's next record."""
        deadline = time.monotonic() + _GIVE_UP
        _complete(self._send(_announcement(None, error)), deadline)

    def _send(self, announcement: bytes) -> list[dist.Work]:
        """Begin to send all peers a message."""
        in_flight = list[dist.Work]()
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        message[: len(announcement)] = torch.frombuffer(bytearray(announcement), dtype=torch.uint8)
        for peer in self.peers:
            with contextlib.suppress(RuntimeError):  # receiving from it raises the same
                in_flight.append(self.group.send([message], peer, _TAG))
        return in_flight


def _complete(in_flight: list[dist.Work], deadline: float) -> None:
    """Wait until messages have arrived, as those to a peer that is lost never do."""
    for work in in_flight:
        with contextlib.suppress(RuntimeError):
            work.wait(time_left(deadline))


class StoreRendezvous:
    """The rendezvous of ranks that share a store and nothing else."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.rounds = itertools.count()
        # An earlier group of the same name may have left keys in the store.
        self.store = PrefixStore(f"weft {store.add(f'weft {rank}', 1)}", store)

    @contextlib.contextmanager
    def exchange(self, own: Info, timeout: float) -> Iterator[list[Info]]:
        """As `GroupRendezvous.exchange`."""
        number = self._publish(_announcement(own))
        deadline = time.monotonic() + timeout
        keys = [f"{number} {peer}" for peer in range(self.ranks)]
        try:
            # all keys in one request: a thousand ranks would make a million of single ones
            with contextlib.suppress(dist.DistStoreError):  # a timeout
                self.store.wait(keys, time_left(deadline))
            missing: list[int] = []
            if not self.store.check(keys):
                missing = [at for at, key in enumerate(keys) if not self.store.check([key])]
            messages = [] if missing else self.store.multi_get(keys)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.rank} lost the store while it waited for the addresses of "
                f"{self.ranks} ranks: {error}"
            ) from error
        if missing:
            raise PeerTimeout(
                f"rank {self.rank} waited {timeout:g} s for the address of {_listed(missing)} "
                f"(timeout after {1e3 * timeout:.0f}ms)"  # words by which frameworks recognise it
            )
        yield [
            own if peer == self.rank else _checked(self.rank, peer, message, type(own))
            for peer, message in enumerate(messages)
        ]

    def give_up(self, error: BaseException) -> None:
        """As `GroupRendezvous.give_up`."""
        with contextlib.suppress(RuntimeError):  # the store is gone, for its readers too
            self._publish(_announcement(None, error))

    def _publish(self, announcement: bytes) -> int:
        """Put a message into the store; the number of this exchange."""
        number = next(self.rounds)
        self.store.set(f"{number} {self.rank}", announcement)  # type: ignore[arg-type]  # or bytes
        return number


def member(group: object) -> dist.ProcessGroup:
    """The group, of which this process must be a member."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a member of the group: only members call weft.init(group)"
        )
    if not isinstance(group, dist.ProcessGroup):
        number = (
            f": weft run -n {group} script.py starts {group} ranks, each of which calls weft.init()"
        )
        raise TypeError(
            f"group must be a process group of torch.distributed; got {type(group).__name__}"
            f"{number if isinstance(group, int) else ''}"
        )
    return group


def rendezvous_of(group: dist.ProcessGroup) -> GroupRendezvous | StoreRendezvous:
    """The rendezvous of a group's ranks: by gloo, which notices deaths meanwhile, or else by the
    group's store.
    """
    cpu = torch.device("cpu")
    if cpu in group._device_types and group._get_backend(cpu).name() == "gloo":
        return GroupRendezvous(group)
    _, store = c10d._world.pg_map.get(group, (None, None))
    if store is None:
        raise WeftError(
            "the group has neither gloo nor a store by which ranks could find each other: pass "
            "another one, as of dist.new_group()"
        )
    return StoreRendezvous(
        PrefixStore("weft world", store), dist.get_rank(group), dist.get_world_size(group)
    )


def time_left(deadline: float) -> timedelta:
    """The time until a deadline, at least a millisecond."""
    return timedelta(seconds=min(max(0.001, deadline - time.monotonic()), LONGEST))


def _announcement(own: object, gives_up: BaseException | None = None) -> bytes:
    return encode(
        Announcement(
            __version__,
            job(),
            (str(gives_up) or type(gives_up).__name__)[:1000] if gives_up else "",
            own,
        )
    )


def _checked(rank: int, peer: int, message: bytes, kind: Any) -> Any:
    """The record in a peer's message."""
    try:
        theirs = decode(message, Announcement)
        if theirs.version != __version__:
            raise WeftError(
                f"rank {peer} runs weft {theirs.version}, rank {rank} {__version__}: install one "
                "version for all ranks"
            )
        if theirs.job != job():
            raise WeftError(
                f"rank {peer} belongs to another job ({theirs.job!r}, rank {rank} to {job()!r}): "
                "give each job a port of its own"
            )
        if theirs.gives_up:
            raise PeerLost(
                f"rank {peer} gave up while rank {rank} waited for its address: {theirs.gives_up}"
            )
        return convert(kind, theirs.info)
    except ValueError as error:
        raise WeftError(
            f"rank {rank} cannot read the address that rank {peer} sent: {error}; does it run "
            "another version of weft, or did another program write it?"
        ) from error
