"""Rendezvous: ranks find each other by a store that they share, and exchange records of
themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

import weft._native as _native
from weft.bootstrap.listener import Address
from weft.bootstrap.peer_memory import Probe
from weft.bootstrap.stores import arrived, count_reader, wait_for_readers
from weft.bootstrap.wire import convert, decode, encode
from weft.checks import LONGEST
from weft.errors import PeerLost, PeerTimeout, WeftError
from weft.launchers.variables import job
from weft.outside import printable, printable_lines
from weft.schedules.thresholds import Thresholds
from weft.version import __version__

Info = TypeVar("Info")
_SIZE = re.compile("[0-9]{1,9} [0-9]{1,9}")  # the first rank's number of ranks, and its own
_READ = 1.0  # seconds that others have to read the records, when a rank fails
_SHOWN = 1000  # characters of a text of the store, at most


class RankInfo(NamedTuple):
    """A rank as its peers see it: its process, host, socket address, allowed cores and compute
    threads; the package, NUMA node and cache that contain all its cores; thresholds that follow
    from these; a probe by which peers test whether they can read its memory; its GPU, if any; and
    its user.
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
    user: int = 0


class Announcement(NamedTuple):
    """The message of a rank to all others: its version of weft, its job, the reason if it gives up,
    and a record of the rank.
    """

    version: str
    job: str
    gives_up: str
    info: Any


def host_identity() -> str:
    """An identifier that is equal for two processes exactly if they can share memory and abstract
    sockets.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


def check_size(store: Store, rank: int, ranks: int) -> None:
    """Raise `WeftError` if the first rank of a store has another number of `ranks`, and make all
    ranks that are `met` raise the same.
    """
    first = store.compare_set("ranks", "", f"{ranks} {rank}").decode(errors="replace")
    if not _SIZE.fullmatch(first):
        raise WeftError(
            f"the store has {first[:_SHOWN]!r} where the first rank puts the number of "
            f"ranks: does another program use it? Give rank {rank} a store, or a port, that only "
            "ranks of its job use"
        )
    theirs, other = map(int, first.split())
    if theirs != ranks:
        error = (
            f"WORLD_SIZE (world_size=) differs: it is {theirs} on rank {other}, and {ranks} on "
            f"rank {rank}; set it to one number on all ranks"
        )
        store.set("differs", error)
        raise WeftError(error)


def met(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all these keys of ranks arrive within `seconds`. Raises `WeftError` if ranks disagree
    on the number of ranks (`check_size`).
    """

    def differs() -> bool:
        return store.check(["differs"])

    came = arrived(store, keys, _native.Deadline(seconds), differs)
    if differs():
        raise WeftError(printable_lines(store.get("differs")[:_SHOWN].decode(errors="replace")))
    return came


class StoreRendezvous:
    """The rendezvous of ranks that share a store and nothing else. Raises `PeerLost` if the store
    is lost.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.rounds = itertools.count()
        with self._loss_of_store():
            # an earlier group of the same name may have left keys in the store, or an attempt
            self.store = PrefixStore(f"weft {store.add(f'weft {rank}', 1)}", store)

    @contextlib.contextmanager
    def exchange(self, own: Info, timeout: float) -> Iterator[list[Info]]:
        """The records of all ranks, of which this rank contributes `own`.

        Raises `PeerTimeout` that names the ranks whose records do not come, `PeerLost` naming a
        rank that gave up, `WeftError` naming a rank that runs another version of weft, belongs to
        another job, or sends another form of message.
        """
        number = next(self.rounds)
        keys = [f"{number} {peer}" for peer in range(self.ranks)]
        with self._loss_of_store():
            if number == 0:
                check_size(self.store, self.rank, self.ranks)
            self._publish(number, _announcement(own))
            missing: list[int] = []
            if not met(self.store, keys, timeout):
                missing = [at for at, key in enumerate(keys) if not self.store.check([key])]
            messages = [] if missing else self.store.multi_get(keys)
            if not missing:
                count_reader(self._readers(number), self.ranks)
        if missing:
            raise PeerTimeout(
                f"rank {self.rank} waited {timeout:g} s for the address of {listed(missing)} "
                f"(timeout after {1e3 * timeout:.0f}ms)"  # words by which frameworks recognise it
            )
        try:
            yield [
                own if peer == self.rank else _checked(self.rank, peer, message, type(own))
                for peer, message in enumerate(messages)
            ]
        except BaseException:
            wait_for_readers(self._readers(number), _READ)  # the store may end with this process
            raise

    def give_up(self, error: BaseException) -> None:
        """Send all ranks the reason, in place of this rank's next record."""
        with contextlib.suppress(RuntimeError):  # the store has ended, for its readers too
            number = next(self.rounds)
            self._publish(number, _announcement(None, error))
            count_reader(self._readers(number), self.ranks)  # it reads none

    @contextlib.contextmanager
    def _loss_of_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise PeerLost(
                f"rank {self.rank} lost the store while it waited for the addresses of "
                f"{self.ranks} ranks: {error}"
            ) from error

    def _readers(self, number: int) -> Store:
        """The part of the store for those that have read the records of an exchange."""
        return PrefixStore(f"{number} read", self.store)

    def _publish(self, number: int, announcement: bytes) -> None:
        """Put this rank's message of an exchange into the store."""
        self.store.set(f"{number} {self.rank}", announcement)  # type: ignore[arg-type]  # or bytes


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


def rendezvous_of(group: dist.ProcessGroup) -> StoreRendezvous:
    """The rendezvous of a group's ranks, by its store, whatever its backend."""
    _, store = c10d._world.pg_map.get(group, (None, None))
    if store is None:
        raise WeftError(
            "the group has no store by which ranks could find each other: pass another one, as of "
            "dist.new_group()"
        )
    return StoreRendezvous(
        PrefixStore("weft world", store), dist.get_rank(group), dist.get_world_size(group)
    )


def listed(ranks: list[int]) -> str:
    """A list of ranks for a message; empty for no ranks."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:10]))}{more}"
        if ranks
        else ""
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
                f"rank {peer} runs weft {printable(theirs.version[:_SHOWN])}, rank {rank} "
                f"{__version__}: install one version for all ranks"
            )
        if theirs.job != job():
            raise WeftError(
                f"rank {peer} belongs to another job ({theirs.job[:_SHOWN]!r}, rank {rank} to "
                f"{job()!r}): give each job its own port"
            )
        if theirs.gives_up:
            raise PeerLost(
                f"rank {peer} gave up while rank {rank} waited for its address: "
                f"{printable_lines(theirs.gives_up)}"
            )
        return convert(kind, theirs.info)
    except ValueError as error:
        raise WeftError(
            f"rank {rank} cannot read the address that rank {peer} sent: {error}; does it run "
            "another version of weft, or did another program write it?"
        ) from error
