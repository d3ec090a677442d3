"""Worlds: `init` makes a `World` of ranks that share memory, signals and an order of calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

import weft._native as _native
from weft.bootstrap.endpoint import Endpoint, Rendezvous
from weft.bootstrap.forked import keep
from weft.bootstrap.rendezvous import RankInfo
from weft.checks import (
    check_dtype,
    check_number,
    check_rank,
    check_size,
    check_tensor,
    check_untraced,
    limited,
)
from weft.errors import WeftError
from weft.membership import renewal
from weft.membership.agreement import LateResponder
from weft.membership.decision import Membership
from weft.plan import Plan
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.uncompiled import untraced
from weft.world import flight, memory, registry, stopped
from weft.world.backend import Backend
from weft.world.connect import connections
from weft.world.control import control_segment
from weft.world.exclusive import Exclusive
from weft.world.failure import Failure
from weft.world.network import Network
from weft.world.notes import Notes
from weft.world.placement import Placement
from weft.world.signals import Signals


class Recorder(Protocol):
    """A recorder of every execution of a plan, such as `weft.plan.trace`."""

    def add(self, plan: Plan, rows: Sequence[int], spans: list[tuple[str, int, int, int]]) -> None:
        """Called after each execution with the rows of each shard, and ``(lane, index of the
        instruction, start, stop)`` in nanoseconds.
        """


_OTHER_NAMES = {
    "size": "ranks",
    "world_size": "ranks",
    "get_world_size": "ranks",
    "get_rank": "rank",
}
"""Names that torch and MPI users try for attributes of a world."""
_log = logging.getLogger("weft")
_SPINS = 200
"""Tests of a counter before a wait yields: some microseconds.

Measured on a 2-core Zen 4: messages of 8 B to 16 MiB between two ranks take 1.05 to 1.2 times as
long with 20, 1.0 to 3.8 times with 2000, as other programs ran beside them.
"""
_numbers = itertools.count(1)


class World:
    """A set of ranks with shared memory, signals and a common order of calls. Made by `init`; a
    context manager.

    Every operator on a world is collective: all ranks make the same calls in the same order. Worlds
    are independent of each other; one world is used by one thread at a time.

    Attributes: `rank`, `ranks` (their number), `global_ranks` (the number of each rank in a larger
    job), `timeout` (default seconds of any wait), `closed` (the reason, or None), `pids`, `cores`
    (the processor cores that each rank may use), `recorder` (of every execution, or None),
    `emulated_link` (its Gbit/s and its latency in microseconds, or None), `device` (of its
    tensors), `stream_ordered` (whether lanes are streams, as on a GPU), `backend` (its device
    backend), `device_options` (set by `configure`), `hosts` (the host of each rank, numbered from
    0), `network` (to the ranks on other hosts, or None), `comm_threads` (as in `init`),
    `thresholds` (the sizes at which its collectives change algorithms, equal on all ranks),
    `engine` (the executor of plans, or None before the first).

    Examples:
        >>> with weft.local_world(2) as local:
        ...     local.run(weft.init)
        [World(rank=0, ranks=2), World(rank=1, ranks=2)]
    """

    def __init__(
        self,
        rank: int,
        infos: Sequence[RankInfo],
        mesh: _native.Mesh,
        timeout: float,
        backend: Backend,
        network: Network | None = None,
        global_ranks: Sequence[int] = (),
    ) -> None:
        self.placement = placement = Placement(rank, infos, global_ranks)
        self.rank = rank
        self.ranks = placement.ranks
        self.global_ranks = placement.global_ranks
        self.hosts = placement.hosts
        self.pids = placement.pids
        self.cores = placement.cores
        self.thresholds = placement.thresholds
        self.timeout = timeout
        self.backend = backend
        self.device = backend.device
        self.stream_ordered = backend.stream_ordered
        self.comm_threads = backend.comm_threads
        self.device_options = DEFAULT
        self.emulated_link: tuple[float, float] | None = None
        self.recorder: Recorder | None = None
        self.number = next(_numbers)
        self.name = (self.number, self.rank, self.ranks)  # an argument of torch's operators
        self.identity = flight.identity(infos[0].address.secret)
        self.mesh = mesh
        self.network = network
        self.failure = Failure(self.identity, placement, mesh, network)
        self.notes = Notes(placement, mesh, self.failure)
        _native.allow_teams(placement.teams)
        # the scheduler may put two ranks on one core
        self.spins = 0 if placement.crowded else _SPINS
        try:
            control, self.reads_memory = control_segment(self.notes, self.number, timeout)
        except BaseException as error:
            self.failure.fail(error)
            raise
        self.executor = _native.Executor(mesh, control, self.spins, self.comm_threads)
        self.executor.pids = self.pids
        self.failure.executor = self.executor
        self.failure.keeps = self
        self.exclusive = Exclusive(self.executor, self.failure)
        if network is not None:
            fail = partial(self.failure.fail, in_background=True)
            network.start(self.executor, fail, self.spins)
        # both set by `weft.engines.engine`, as engines depend on worlds
        self.engine: Any = None
        self.repeats: _native.CallCache | None = None  # the cache of its calls; None once closed
        self.membership: Membership | None = None  # None of a rank of a local world
        self.kept: Sequence[LateResponder] = ()  # endpoints of earlier worlds
        self.keepalive: list[object] = []  # memory that lives as long as the world
        # number 0 is no world's: a world of streams puts its copies on them
        self.transfers = _native.Transfers(
            mesh, self.spins, self.comm_threads, 0 if self.stream_ordered else self.number
        )
        registry.alive[self.number] = self

    @property
    def closed(self) -> str | None:
        """Why this world is closed, or None."""
        return self.failure.closed

    @untraced
    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A symmetric tensor with undefined contents, on the world's device; collective, with one
        `shape` and `dtype` on all ranks.

        `dtype` defaults to torch's default dtype. The memory is reserved at once. Raises
        `SymmetricMemoryError` on every rank if any rank lacks it, `MismatchError` if ranks differ
        in shape or dtype.
        """
        self.failure.check()
        with self.failure.report_rejection:
            dims = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
            try:
                sizes = [operator.index(n) for n in dims]  # type: ignore[arg-type]
            except TypeError:
                raise TypeError(f"sizes must be integers; got {shape}") from None
            if any(n < 0 for n in sizes):
                raise ValueError(f"sizes must not be negative; got {tuple(sizes)}")
            check_size(math.prod(sizes), "the number of elements")
            if dtype is not None:
                check_dtype(dtype, "dtype")
            check_untraced("empty")
        self._drain()
        with self.exclusive:
            return self.allocate(sizes, dtype or torch.get_default_dtype())

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `empty`, for a thread that is in `exclusive`."""
        with self.failure.fail_on_error:
            return self.backend.allocate(self, sizes, dtype)

    @untraced
    def signals(self, count: int, name: str = "signals") -> Signals:
        """`count` zeroed counters on every rank for one-sided calls; collective, with the same
        `count` on all ranks.

        `name` appears in errors. Raises `SymmetricMemoryError` on every rank if any rank lacks
        memory, `MismatchError` if ranks differ in `count`, `ValueError` unless `count` is positive.
        On a GPU the counters are in its memory.
        """
        self.failure.check()
        with self.failure.report_rejection:
            if not (isinstance(count, int) and count > 0):
                raise ValueError(f"count must be a positive integer; got {count!r}")
            check_size(count, "count")
        self._drain()
        with self.exclusive, self.failure.fail_on_error:
            return self.backend.signals(self, count, name)

    def _drain(self) -> None:
        """Wait for outstanding asynchronous collectives, and raise their errors."""
        if self.engine is not None:
            self.engine.drain()

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this rank's part of a symmetric tensor of this world, or a view of
        one.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a tensor; got {type(tensor).__name__}")
        try:
            segment = memory.find(tensor)
        except (RuntimeError, ValueError):  # a tensor without memory: sparse, fake, …
            return False
        return segment is not None and segment.world == self.number

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """`rank`'s part of a symmetric tensor (or of the same view of it), as a tensor over the
        peer's own memory.

        Reads and writes go straight to the peer; order them with signals or an operator.
        """
        rank = check_rank(rank, "rank", self.ranks)
        check_tensor(tensor, "tensor")
        segment = memory.find(tensor)
        if segment is None or segment.world != self.number:
            raise ValueError(
                "tensor is not a symmetric tensor of this world; make it with world.empty(...)"
            )
        if not self.hosts.here(rank):
            raise ValueError(
                f"rank {rank} is on another host, whose memory cannot be mapped; use put, get or "
                "an operator"
            )
        part = memory.numbers(
            segment, rank, tensor.dtype, memory.offset(tensor, segment, self.rank)
        )
        return part.as_strided(tensor.shape, tensor.stride())

    def emulate_link(self, gbps: float, latency_us: float = 0.0) -> None:
        """Emulate a link: from now on every copy to or from a peer takes at least `latency_us` plus
        its bytes at `gbps` (1e9 bits per second).

        Copies of a rank share one link, one after another. 0 Gbit/s ends the emulation.
        """
        check_number(gbps, "gbps")
        check_number(latency_us, "latency_us")
        if not (0 <= gbps < math.inf and 0 <= latency_us < math.inf):
            raise ValueError(
                "bandwidth and latency must be finite and not negative; got "
                f"{gbps} Gbit/s and {latency_us} us"
            )
        if gbps and self.hosts.several:
            raise ValueError(
                "ranks on several hosts have a real link; a link can be emulated on one host only"
            )
        self.emulated_link = (gbps, latency_us) if gbps else None
        if self.engine is not None:
            self.engine.calls.clear()  # variants depend on the link
        self.executor.emulate_link(gbps * 1e9 / 8, latency_us * 1e-6)

    def configure(self, device_options: DeviceOptions) -> None:
        """Execute all later calls with these options, on every rank; a rank that calls with others
        than its peers raises `MismatchError` on all.

        Raises `ValueError` for options that this world cannot honour.
        """
        self.backend.check_options(device_options, self.ranks)
        if self.engine is not None and self.stream_ordered:
            self.engine.check_options(device_options)
        self.device_options = device_options

    @property
    def remote_reads(self) -> bool:
        """Whether plans may read rows in peers' memory: not if rows cross an emulated link or one
        between hosts.
        """
        return self.emulated_link is None and not self.hosts.several

    def shrink(self, timeout: float | None = None) -> World:
        """The world of the ranks that are left, in place of this one, which has lost some;
        collective among those, each of which calls it after the error by which it learned of the
        loss.

        Ranks keep their order and their `global_ranks`. The new world is the default if this one
        was; its `timeout`, device options and link are this one's. On an open world all ranks call
        it after the same calls, and those that are to leave call `close`: calls that others are in
        complete, and those that need a rank which has called `shrink` raise `PeerLost`.

        Ranks that have ended, or closed the world, are left out at once. `timeout` (by default the
        world's) is the seconds that others have to call `shrink`: afterwards those that have may go
        on if they are more than half of this world's ranks, or half of them with its rank 0. So a
        rank that is suspended or cut off is never part of a second world.

        Raises `PeerTimeout` on all ranks if they may not continue, `Excluded` on a rank that the
        others left out, `WeftError` on a local world or one of streams, or if there is a world that
        follows this one already.
        """
        self._check_renewable()
        if self.closed is None:
            with contextlib.suppress(WeftError):  # of calls that others do not make any more
                self._drain()
        self._leave()
        return self._renewed(0, timeout, "shrink")

    def grow(self, joiners: int, timeout: float | None = None) -> World:
        """The world of this one's ranks and so many others, which call `weft.join`; collective.

        It may be called instead of `shrink` after a loss. Those that join take the lowest free
        numbers of `global_ranks`, so a replacement has the number, and the place in the order, of
        the rank that was lost. `timeout` is the seconds for which they, and ranks, are waited for.

        Raises as `shrink`, and `PeerTimeout` on all ranks if others do not join in time, which
        leaves an open world open; `MismatchError` if ranks expect other numbers.
        """
        self._check_renewable()
        if not (isinstance(joiners, int) and joiners > 0):
            raise ValueError(f"joiners must be a positive integer; got {joiners!r}")
        if self.closed is None:
            self._drain()
        else:
            self._leave()
        return self._renewed(joiners, timeout, "grow")

    def invitation(self) -> str:
        """A text, to be passed to `weft.join`, by which other processes find the ranks of this
        world; whoever has it may join. It serves while one of the ranks is in this world.
        """
        self._check_renewable()
        assert self.membership is not None
        return renewal.invitation(self.membership)

    def _check_renewable(self) -> None:
        """Raise `WeftError` unless a world can follow this one."""
        self.failure.check_process()
        if self.failure.followed:
            self.failure.check()
        if self.membership is None or self.stream_ordered:
            kind = "a local world" if self.membership is None else "a world of streams"
            raise WeftError(
                f"{kind} cannot shrink or grow; make a new one with {self.failure.maker}"
            )
        if self.membership.endpoint.closed:
            self.failure.check()

    def _renewed(self, joiners: int, timeout: float | None, by: str) -> World:
        assert self.membership is not None
        limit = self.timeout if timeout is None else limited(timeout)
        left = list[int]()
        if self.membership.name == self.identity:
            left = [*filter(self.mesh.gone, self.placement.others)]

        def adopt(membership: Membership) -> None:
            self.membership = membership

        def make(rendezvous: Rendezvous, endpoint: Endpoint, global_ranks: Sequence[int]) -> World:
            return connect(rendezvous, limit, self.backend, endpoint, global_ranks)

        try:
            made, kept = renewal.renew(
                self.membership, joiners, limit, self.backend.device_id, make, adopt, left
            )
        except BaseException:
            if self.closed is not None:
                self.membership.endpoint.close()
            raise
        place(made, self.membership, [*self.kept, *kept])
        self.kept = ()
        made.timeout = self.timeout
        made.device_options = self.device_options
        if self.emulated_link is not None:
            made.emulate_link(*self.emulated_link)
        self._leave()
        self.failure.followed = by
        self.membership = None  # the endpoint of the latest is the new world's
        self.engine = None
        self.failure.dissolve()
        if self is registry.default:
            registry.make_default(made)
        return made

    def disown(self) -> None:
        """In a forked child: close the sockets by which peers see that this rank is alive.

        Nothing else is destroyed, as destructors would wait for the parent's threads.
        """
        keep(self)
        self.failure.disown()
        self.repeats = None
        self.mesh.disown()
        self.transfers.disown()
        if self.membership is not None:
            self.membership.endpoint.close()
        for each in self.kept:
            each.disown()
        if self.network is not None:
            self.network.disown()

    def close(self) -> None:
        """Leave the world, once all asynchronous transfers are complete.

        Peers may complete calls that do not need this rank. Symmetric memory lives until its last
        tensor is freed, workspaces end with the world. In a forked child it does nothing.
        """
        if self.failure.forked:
            return
        self._leave(for_good=True)
        if self.membership is not None:
            self.membership.endpoint.close()
        for each in self.kept:
            each.close()
        self.kept = ()
        self.mesh.close()

    def _leave(self, for_good: bool = False) -> None:
        """As `close`, but keep the endpoints at which peers learn whether this rank continues,
        unless it leaves `for_good`.
        """
        if self.network is not None:
            self.network.copies.finish()
        self.transfers.finish()
        if self.engine is not None:
            self.engine.finish_transfers()
        self.repeats = None
        self.keepalive.clear()
        self.failure.unreported = False
        if self.failure.closed is None:
            if self.network is not None:
                self.network.finish(self.timeout)
            self.mesh.leave(for_good)
            self.failure.closed = "close() was called, or its with block ended"
            _log.info("closed world %s after call %d", self.identity, self.executor.calls)
            if self.engine is not None:
                self.engine.abandon()
        if self.network is not None:
            self.network.close()
            self.network.join()
        self.exclusive.deferred = None
        if self.engine is not None:
            self.engine.release()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failure.fail(error, for_good=True)
        self.close()

    def __deepcopy__(self, memo: object) -> World:
        return self  # it belongs to the ranks, not to a layer that is copied

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, ranks={self.ranks}{', closed' if self.closed else ''})"


def _missing(name: str, right: str) -> property:
    """A placeholder for an attribute that a world does not have: its error names the `right`
    one.
    """

    def get(world: World) -> NoReturn:
        raise AttributeError(
            f"'World' object has no attribute {name!r}; use world.{right}", name=name, obj=world
        )

    return property(get)


# properties, since a `__getattr__` would triple the time of every attribute
for _name, _right in _OTHER_NAMES.items():
    setattr(World, _name, _missing(_name, _right))


def connect(
    rendezvous: Rendezvous,
    timeout: float,
    backend: Backend,
    endpoint: Endpoint | None = None,
    global_ranks: Sequence[int] = (),
) -> World:
    """A world of the ranks of a rendezvous, with these `global_ranks` if they are part of a larger
    job. Peers reach this rank at its `endpoint`, by default a new one; it is closed on failure.
    """
    with contextlib.ExitStack() as unless_made:
        if endpoint is None:
            try:
                endpoint = Endpoint(backend.device_id)
            except BaseException as error:
                rendezvous.give_up(error)
                raise
            unless_made.callback(endpoint.close)
        with connections(rendezvous, endpoint, timeout, backend) as (
            rank,
            infos,
            mesh,
            network,
            handles,
        ):
            world = World(rank, infos, mesh, timeout, backend, network, global_ranks)
        world.membership = Membership.of_made(
            world.identity, rank, handles, endpoint, world.global_ranks
        )
        log_made(world)
        stopped.report_first(lambda: [world.failure for world in registry.alive.values()])
        with world.failure.fail_on_error:
            backend.prepare(world)
        unless_made.pop_all()
        return world


def place(world: World, membership: Membership, kept: Sequence[LateResponder]) -> None:
    """Make a new world the successor of the one before, whose endpoints are kept."""
    assert world.membership is not None
    world.membership.in_doubt = membership.doubtful
    world.kept = kept


def log_made(world: World) -> None:
    """Log a new world, at level INFO."""
    if not _log.isEnabledFor(logging.INFO):
        return
    hosts = f", on {world.hosts.number} hosts" if world.hosts.several else ""
    cores = ",".join(map(str, sorted(world.cores[world.rank])))
    _log.info(
        "made world %s: rank %d of %d%s, pid %d on cores %s; plans run on %s %s",
        world.identity,
        world.rank,
        world.ranks,
        hosts,
        world.pids[world.rank],
        cores,
        world.device,
        "streams" if world.stream_ordered else "threads",
    )
