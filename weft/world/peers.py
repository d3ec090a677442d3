"""The ranks of a world from the view of one of them: their numbers, hosts and failures."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weft._native as _native
import weft.errors as errors
from weft.bootstrap import peer_memory
from weft.bootstrap.rendezvous import RankInfo
from weft.errors import MismatchError, PeerLost, PeerTimeout, SymmetricMemoryError, WeftError
from weft.outside import printable, printable_lines
from weft.schedules.device_options import DEFAULT
from weft.schedules.levels import (
    OVERSUBSCRIBED_SIGNAL_LATENCY,
    SIGNAL_LATENCY,
    Levels,
    nested,
    numbered,
)
from weft.schedules.thresholds import agreed
from weft.world import details, flight, places
from weft.world.hosts import Hosts
from weft.world.network import Network

if TYPE_CHECKING:
    from weft.world.backend import Backend

_log = logging.getLogger("weft")
_REPORTED = "_reported"
"""The attribute of an error that peers have been sent."""
_SPINS = 200
"""Tests of a counter before a wait yields: some microseconds.

Measured on a 2-core Zen 4: messages of 8 B to 16 MiB between two ranks take 1.05 to 1.2 times as
long with 20, 1.0 to 3.8 times with 2000, as other programs ran beside them.
"""


class OnError:
    """Context that passes an exception to `handle`, but for a `SymmetricMemoryError`, which all
    ranks raise together.
    """

    def __init__(self, handle: Callable[[BaseException], object]) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SymmetricMemoryError):
            self.handle(error)


class Exclusive:
    """Context of a part of a call during which no other thread may call, as ranks make calls in one
    order: a deferred call begins before. A second thread closes the world.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __enter__(self) -> None:
        if self.peers.deferred is not None:
            self.peers.deferred.begin()
        try:
            self.peers.executor.enter()
        except WeftError as error:
            self.peers.fail(error)
            raise

    def __exit__(self, *raised: object) -> None:
        self.peers.executor.leave()


_numbers = itertools.count(1)


class Peers:
    """This rank and its peers: the part of a world that memory, signals and the network use.

    Attributes: those of `World` that describe its ranks, `others` (all ranks but this one),
    `threads` (the smallest number of compute threads of a rank when the world was made),
    `oversubscribed` (whether ranks of a host share cores), `staging_reason` (why this rank cannot
    read ordinary tensors in its peers' memory, or ""), `reads_memory` (whether all ranks can),
    `huge_pages` (whether large tensors of all ranks are in huge pages), `global_ranks` (the number
    of each rank in a larger job, for errors), `number` (of this world in this process), `identity`
    (its name in files, equal on all ranks), `group_name` (of the process group of
    torch.distributed whose world it is, or ""), `recorded` (the file of its flight recorder),
    `closed` (the reason, or None), `followed` (the method that returned the world in place of this
    one, or ""), `failed_at` (the time of the error that closed it, by the
    monotonic clock), `places` (of peers in the user's program, after a mismatch), `unreported`
    (whether a background thread closed it and no call has raised the error yet), `forked` (whether
    this process is a forked child of the one that made it).
    """

    maker = "weft.init()"
    """The call that makes another such world, for errors."""
    deferred: Any = None
    """The call, if there is one, whose method `begin` is to be called before the next call."""
    before_failure: Callable[[BaseException], object] = staticmethod(lambda error: None)
    """Called with an error before it closes the world and peers are notified; raises nothing."""
    returned: Collection[int] = ()
    """The ranks of a local world that have returned from its `run`."""

    def __init__(
        self,
        rank: int,
        infos: Sequence[RankInfo],
        mesh: _native.Mesh,
        timeout: float,
        backend: Backend,
        network: Network | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = len(infos)
        self.timeout = timeout
        self.network = network
        self.backend = backend
        self.device = backend.device
        self.stream_ordered = backend.stream_ordered
        self.comm_threads = backend.comm_threads
        self.device_options = DEFAULT
        self.others = [peer for peer in range(self.ranks) if peer != rank]
        self.hosts = Hosts(numbered(info.host for info in infos), rank)
        self.locality_groups = groups(infos)
        self.oversubscribed = oversubscribed(infos)
        self.global_ranks: Sequence[int] = range(self.ranks)
        self.pids = [info.pid for info in infos]
        self.cores = [info.cores for info in infos]
        self.threads = min(info.threads for info in infos)
        self.thresholds = agreed(info.thresholds for info in infos)
        alone = self.ranks == 1 or self.hosts.several
        self.staging_reason = (
            "" if alone else peer_memory.refusal(self.pids, [info.probe for info in infos])
        )
        self.reads_memory = not (alone or self.staging_reason)
        self.huge_pages = all(info.probe.huge_pages for info in infos)
        self.number = next(_numbers)
        self.identity = flight.identity(infos[0].address.secret)
        self.group_name = ""
        self.recorded: Path | None = None
        self.closed: str | None = None
        self.followed = ""
        self.places = dict[int, str]()  # of peers in the user's program, after a mismatch
        self.failed_at = math.inf
        self.forked = False
        self.unreported = False
        self.keepalive: list[object] = []  # memory that lives as long as the world
        # of a part of a call that all ranks must complete
        self.fail_on_error: AbstractContextManager[None] = OnError(self.fail)
        # of what precedes the first signal of a call
        self.report_refusal: AbstractContextManager[None] = OnError(self.refuse)
        self.exclusive: AbstractContextManager[None] = Exclusive(self)
        self.mesh = mesh
        here = [info for info in infos if info.host == infos[rank].host]
        cores = _all_cores(here)
        _native.allow_teams(sum(info.threads for info in here) <= cores)
        # the scheduler may put two ranks on one core
        self.spins = _SPINS if len(here) <= cores else 0
        try:
            control = self._control_segment()
        except BaseException as error:
            self.fail(error)
            raise
        self.executor = _native.Executor(self.mesh, control, self.spins, self.comm_threads)
        self.executor.pids = self.pids
        if network is not None:
            network.start(self.executor, partial(self.fail, in_background=True), self.spins)

    @cached_property
    def levels(self) -> Levels:
        """The levels by which ranks synchronize, equal on all since computed from all records."""
        return nested(
            self.ranks,
            self.locality_groups,
            OVERSUBSCRIBED_SIGNAL_LATENCY if self.oversubscribed else SIGNAL_LATENCY,
        )

    def check(self) -> None:
        """Raise `WeftError` if this world is closed; first the error that closed it, if no call has
        raised it yet.
        """
        self.check_process()
        if self.followed:
            raise WeftError(
                f"this world is over: {self.followed}() has returned the one that follows it; use "
                "that one"
            )
        if self.unreported:
            raise self.failure("to make the call")
        if self.closed is not None:
            raise WeftError(
                f"this world is closed: {self.closed}; make a new one with {self.maker}"
            )

    def check_process(self) -> None:
        """Raise `WeftError` in a forked child, which inherits the memory of its parent's worlds
        without their threads.
        """
        if self.forked:
            raise WeftError(
                f"this world belongs to process {self.pids[self.rank]}: a forked child makes a "
                "world of its own, or none; call from the parent, or start children by spawn, as "
                'DataLoader(multiprocessing_context="spawn") does'
            )

    def failure(self, doing: str) -> WeftError:
        """The error for a failure that a peer caused or reported while this rank waited `doing`, a
        phrase, or "" if it did not wait; closes the world.
        """
        self.unreported = False
        kind, culprit, text = self.mesh.failure()
        kind, text = printable(kind), printable_lines(text)
        if kind in ("MismatchError", "PeerTimeout"):
            return self.fail(getattr(errors, kind)(text), culprit)
        if culprit == self.rank and kind == "SymmetricMemoryError":
            return self.fail(SymmetricMemoryError(f"{text}, and waited {doing}"))
        if culprit == self.rank:  # another of its threads, or a signal handler
            if kind == "PeerLost":  # to a peer, which noticed first that this rank closes its world
                text = f"rank {self.rank} {text.rstrip(',')}"
            elif kind != "WeftError":
                text = f"{kind}: {text}"
            return self.fail(WeftError(f"{text}, and waited {doing}"))
        how = f"failed with {kind}: {text},"
        if kind == "PeerLost":
            how = text or "died"
        elif kind == "SystemExit":
            how = f"was ended by sys.exit({text}),"
        return self.lost(culprit, how, doing)

    def lost(self, peer: int, how: str, doing: str) -> WeftError:
        """The error for a lost peer that this rank waited for, `doing` as in `failure`; closes the
        world.
        """
        waited = f"waited {doing}" if doing else "was at work of its own"
        message = (
            f"{self.name_of(peer)} {how} while rank {self.rank} {waited}"
            f"{self.also('Connection closed by peer')}"
        )
        return self.fail(PeerLost(message, how, self.pids[peer] * self.hosts.here(peer)), peer)

    def name_of(self, peer: int) -> str:
        """The name of a peer in errors."""
        elsewhere = (
            f", rank {self.global_ranks[peer]} of the job,"
            if self.global_ranks[peer] != peer
            else ""
        )
        return f"rank {peer} (pid {self.pids[peer]}){elsewhere}"

    def timed_out(self, doing: str, late: int, why: str, timeout: float | None = None) -> WeftError:
        """The error for a wait that took too long because rank `late` has not done something, the
        phrase `why`; closes the world.
        """
        seconds = timeout or self.timeout
        longer = "if it needs longer, give a larger timeout="
        if late in self.returned:
            advice = "it has returned from local.run, in which all ranks must make the same calls"
        elif self.pids[late] == self.pids[self.rank]:
            advice = f"it is a thread of this process; {longer}"
        else:
            advice = f"py-spy dump --pid {self.pids[late]} shows where it is; {longer}"
            if self.network is not None and late in self.network.addresses:
                address = self.network.addresses[late]
                advice = f"is its host, {address}, or the network down? There {advice}"
        return self.fail(
            PeerTimeout(
                f"rank {self.rank} waited {seconds:g} s {doing}: {self.name_of(late)} {why}; "
                f"{advice}{self.also_timed_out(seconds)}"
            )
        )

    def also(self, words: str) -> str:
        """The end of a message of a process group of torch.distributed: `words` of gloo's, by which
        frameworks recognise an error that another group survives.
        """
        return f" ({words})" if self.group_name else ""

    def also_timed_out(self, seconds: float) -> str:
        """As `also`, of a time limit; torch's own tests look for `timeout` as a word."""
        return self.also(f"timed out after a timeout of {seconds:g} s")

    def fail(
        self,
        error: BaseException,
        culprit: int | None = None,
        in_background: bool = False,
        for_good: bool = False,
    ) -> WeftError:
        """Close the world because of `error`, notify all peers, and return it; from a thread
        `in_background` the next call raises it. A rank that leaves `for_good` says so.
        """
        first = self.closed is None and not self.forked
        if first:
            self.before_failure(error)
            text = error.how if isinstance(error, PeerLost) else str(error)
            text = text.encode(errors="replace")[:8000].decode(errors="ignore")
            self.mesh.abort(type(error).__name__, self.rank if culprit is None else culprit, text)
            if for_good:
                self.mesh.leave(for_good)
            self.unreported = in_background
            self.closed = f"{type(error).__name__}: {error}"
            self.failed_at = time.monotonic()
        if self.network is not None and not self.forked:
            # no message may arrive in memory that is returned to the caller, by which the thread
            # that fails first may not have closed the network yet
            self.network.close()
        if first:
            self.recorded = flight.write(self, error, culprit)
            _log.info("world %s has failed: %s", self.identity, self.closed)
        if not (in_background or self.forked):
            details.add(self, error, culprit)
        if self.recorded is not None and isinstance(error, WeftError):
            error.name_record(str(self.recorded))
        return error  # type: ignore[return-value]

    def refuse(self, error: BaseException) -> None:
        """Inform peers, once, that this rank does not make its next call because of `error`, which
        has sent nothing. If they make the call, and this rank does not make it after all within a
        second, they raise `MismatchError` with the error's text.
        """
        alike = isinstance(error, SymmetricMemoryError)  # all ranks raise it together
        if self.closed is not None or self.forked or alike or not isinstance(error, Exception):
            return
        if getattr(error, _REPORTED, False):
            return
        setattr(error, _REPORTED, True)
        place = places.here()
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if place:
            why += f", at {place}"
        call = self.executor.refuse(why)
        if self.network is not None:
            times = self.executor.times_refused(self.rank, call)
            self.network.announce_refusal(call, times, why)

    def mismatch(self, number: int, call: str, peer: int, theirs: str) -> WeftError:
        """The error for a `call` of this rank, its call of that `number`, where a peer makes
        another; closes the world.
        """
        # the refusal that a peer has noticed tells more than the call that this rank made after it
        if self.executor.times_refused(self.rank, number) and self.mesh.failure()[0]:
            return self.failure("to make it")
        return self.fail(
            MismatchError.between(number, self.rank, call, peer, printable_lines(theirs))
        )

    def refused(self, call: str, peer: int) -> WeftError:
        """The error for a `call` of this rank that a peer refuses; closes the world."""
        theirs = printable(self.executor.reason_of_refusal(peer))
        return self.fail(MismatchError.refused(self.rank, call, peer, theirs), peer)

    def keep_place(self, peer: int, note: str) -> bool:
        """Whether a note has the place of a peer in the user's program, which is kept then."""
        if not note.startswith(details.PLACE):
            return False
        self.places[peer] = printable(note.removeprefix(details.PLACE))
        return True

    def _control_segment(self) -> _native.Segment:
        """The segment of headers and counters, exchanged before calls can be checked."""
        size = _native.Executor.control_bytes(self.ranks)
        header = _native.Executor.header_bytes
        doing = "to make the world"
        here = [*filter(self.hosts.here, range(self.ranks))]
        elsewhere = [peer for peer in self.others if not self.hosts.here(peer)]
        # the calls of ranks on other hosts are kept behind the part of one rank of this
        sizes = {rank: size + (rank == here[0]) * len(elsewhere) * header for rank in here}
        try:
            own, file = _native.create_mapping(sizes[self.rank])
        except OSError as error:
            raise SymmetricMemoryError(
                f"rank {self.rank} has no memory to make the world: {error}"
            ) from None
        parts = [own] * self.ranks
        local = [peer for peer in here if peer != self.rank]
        for peer in local:
            send(self, peer, self.staging_reason, file, doing)
        for peer in local:
            staged, theirs = receive(
                self, peer, doing, f"for rank {peer} (pid {self.pids[peer]}) {doing}"
            )
            parts[peer] = attach(self, peer, theirs, sizes[peer], doing)
            self.reads_memory = self.reads_memory and not staged
        for at, peer in enumerate(elsewhere):
            parts[peer] = _native.part_of_mapping(parts[here[0]], size + at * header, header)
        return _native.Segment(parts, self.rank, self.number, 0)


def attach(peers: Peers, peer: int, file: _native.File | None, size: int, doing: str) -> Any:
    """A peer's part of a segment, mapped from the file that it sent; failure closes the world, as
    peers continue.
    """
    try:
        if file is None:  # the kernel delivers none when this process has no free descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return _native.attach_mapping(file, size)
    except OSError as error:
        raise peers.fail(
            SymmetricMemoryError(
                f"{doing}: rank {peers.rank} cannot map the part of rank {peer}: {error}"
            )
        ) from None


def send_to_all(peers: Peers, note: str, file: _native.File | None, doing: str) -> None:
    """Send every peer a note, and those of this host a file if there is one."""
    for peer in filter(peers.hosts.here, peers.others):
        send(peers, peer, note, file, doing)
    if peers.hosts.several:
        peers.mesh.publish(note)


def send(peers: Peers, peer: int, note: str, file: _native.File | None, doing: str) -> None:
    """Send a peer of this host a note, and a file if there is one."""
    try:
        peers.mesh.send(peer, note, file)
    except OSError as error:
        raise peers.fail(
            WeftError(f"rank {peers.rank} cannot send to rank {peer} {doing}: {error}")
        ) from None


def receive(
    peers: Peers, peer: int, doing: str, late: str, look: Callable[[], None] = lambda: None
) -> tuple[str, _native.File | None]:
    """A peer's note, and its file if it sent one. The phrases `doing` and `late` describe the wait
    in errors.

    `look` is called while nothing has arrived, and may raise an error.
    """
    deadline = _native.Deadline(peers.timeout)
    while True:
        # returns soon, so that signals are handled
        status, (note, file) = peers.mesh.receive(peer, 0.05)
        if status == _native.WaitStatus.none:
            if not peers.keep_place(peer, note):
                return note, file
            continue
        look()
        if status == _native.WaitStatus.failed:
            raise peers.failure(doing)
        if status == _native.WaitStatus.left:
            raise peers.lost(peer, "closed its world", doing)
        if deadline.passed:
            raise peers.timed_out(late, peer, "has not made the call")


def oversubscribed(infos: Sequence[RankInfo]) -> bool:
    """Whether ranks of a host share cores."""
    by_host = [
        [info for info in infos if info.host == host] for host in {info.host for info in infos}
    ]
    return any(len(ranks) > _all_cores(ranks) for ranks in by_host)


def _all_cores(infos: Sequence[RankInfo]) -> int:
    """The number of distinct cores of several ranks of a host."""
    return len(frozenset[int]().union(*(info.cores for info in infos)))


def groups(infos: Sequence[RankInfo]) -> Levels:
    """The group of each rank at every level, innermost first: cache, NUMA node, package, host.

    Its depth is that of the shortest locality of a rank: ranks that are not bound to cores are
    grouped by host alone.
    """
    depth = min(len(info.locality) for info in infos)
    return tuple(
        numbered((info.host, info.locality[:kept]) for info in infos)
        for kept in range(depth, -1, -1)
    )
