"""How worlds are made: `init`, `join`, and without a group."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from weft.bootstrap.endpoint import Endpoint, Known, Rendezvous
from weft.bootstrap.rendezvous import StoreRendezvous, member, rendezvous_of
from weft.bootstrap.shared_store import STARTING, launched
from weft.checks import limited
from weft.host import placement
from weft.launchers.variables import translated
from weft.membership import renewal
from weft.schedules.device_options import DEFAULT, DeviceOptions
from weft.world import registry
from weft.world.backend import Backend, backend_of
from weft.world.world import World, connect, place

_TIMEOUT = 30.0  # default seconds of every wait of a world


def init(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
    device: torch.device | str = "cpu",
    products: str = "torch",
    streams: bool = False,
    device_options: DeviceOptions = DEFAULT,
    comm_threads: int = 1,
) -> World:
    """Make a world of the ranks of `group`, collectively.

    Without a group: all ranks of `torch.distributed` if it is initialised, otherwise those that
    torchrun, mpirun or SLURM started, by its variables; with none of these, a world of one. A world
    made without a group is the default of every operator. Ranks meet by a store, that of the group
    or at MASTER_ADDR and MASTER_PORT: no process group is made, and one made later may share it.

    Ranks that a launcher started are each bound to separate cores, on one NUMA node if possible,
    unless the launcher has bound them or the variable WEFT_BIND is 0.

    Ranks of one host share memory, ranks of different hosts connect by TCP, on the interface that
    the variable GLOO_SOCKET_IFNAME names if it is set. weft detects which ranks share a host.
    `timeout` is in seconds and bounds every wait, by default 30, and the wait for all ranks to
    call `init`, by default 300, since imports may be slow; the longest limit is a million seconds.

    `device` holds the ranks' tensors: ``cpu``, ``cuda``, this process's current GPU, or a GPU with
    a number, such as ``cuda:1``, which becomes the current one. Peers reach its memory through
    torch's symmetric memory. There fused operators multiply by `products`: ``torch``, a product
    after each wait, or ``triton``, one persistent kernel that waits for rows, puts its tiles and
    notifies their owners; on a CPU that kernel runs under TRITON_INTERPRET=1.
    `device_options` are the tile and the SMs of these products, and the SMs and lanes of transfers.
    With `streams` plans run on a CPU as on a GPU, each lane on a thread: slower, for tests.

    Copies and sums of 256 KiB and more on the caller's thread use ``torch.get_num_threads()``
    threads, unless the ranks of this host have more threads than cores. Copies and sums in the
    background (comm lanes of fused operators, asynchronous collectives and transfers) use
    `comm_threads`; ranks may differ in it. More than one pays where ``torch.set_num_threads``
    leaves cores for them. On a rank of a `local_world` the result is its world there.

    Raises `ValueError` for a `timeout` or `comm_threads` that is not positive, for a `group` that
    this process is not a member of, and for `device_options` that this world cannot honour;
    `TypeError` for a `group` that is none; `WeftError` if there is no GPU, the launcher's variables
    are incomplete or contradict each other, ranks with GPUs
    are on several hosts, this host has no address for ranks on others, or ranks run other versions
    of weft, as other users, or belong to another job; `PeerTimeout` if some ranks do not appear or
    cannot be reached; `PeerLost` if one gives up meanwhile, or is lost. Once the call has failed on
    all ranks, they may make it again. `SymmetricMemoryError` if this rank lacks memory.

    Examples:
        >>> with weft.init() as world:  # 1 rank here, n in a script that weft run -n starts
        ...     world.rank, world.ranks
        (0, 1)
    """
    if group is None and (here := registry.of_thread()) is not None:
        return here
    backend = backend_of(device, products, streams, comm_threads)
    limit, starting = (_TIMEOUT, STARTING) if timeout is None else (limited(timeout),) * 2
    members, meeting = _meeting(group, starting)
    try:
        backend.check_options(device_options, meeting.ranks)
        backend.join(members, meeting)
        placement.bind_as_launched()  # before there is memory
    except BaseException as error:
        meeting.give_up(error)
        raise
    world = connect(meeting, limit, backend)
    world.device_options = device_options
    if group is None:
        registry.make_default(world)
    return world


def _meeting(
    group: dist.ProcessGroup | None, starting: float
) -> tuple[dist.ProcessGroup | None, StoreRendezvous]:
    """The rendezvous of a group's ranks, by default of all ranks, and the group if there is one."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None:
        return group, rendezvous_of(member(group))
    if translated(os.environ):
        return None, StoreRendezvous(*launched(starting))
    return None, StoreRendezvous(HashStore(), 0, 1)


def init_by_store(
    store: Store, rank: int, ranks: int, timeout: float, global_ranks: Sequence[int] = ()
) -> World:
    """Make a world of `ranks` ranks that share a store and nothing else, collectively; it does not
    become the default.

    `global_ranks` are the ranks' numbers in a larger job, if they are part of one. `timeout` and
    errors are as of `init`.
    """
    meeting = StoreRendezvous(store, rank, ranks)
    return connect(meeting, limited(timeout), Backend(), global_ranks=global_ranks)


def join(invitation: str, *, timeout: float | None = None, comm_threads: int = 1) -> World:
    """Join the ranks of a world, which call `World.grow`; the world of all is this process's
    default.

    `invitation` is what `World.invitation` returned on one of them. `timeout` is the seconds for
    which they are waited for, by default 300, and of every wait of the world, by default 30.
    `comm_threads` and the binding to cores are as of `init`.

    Raises `ValueError` for any other text; `PeerTimeout` if this process is not let in, `PeerLost`
    if no rank of the invitation is left, `WeftError` if none can be reached from this host or they
    run another version of weft.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with weft.init() as world, ThreadPoolExecutor() as pool:  # as from another process
        ...     joined = pool.submit(weft.join, world.invitation())
        ...     world.grow(1), joined.result()
        (World(rank=0, ranks=2), World(rank=1, ranks=2))
    """
    handles = renewal.invited(invitation)
    backend = Backend(comm_threads)
    limit, starting = (_TIMEOUT, STARTING) if timeout is None else (limited(timeout),) * 2
    placement.bind_as_launched()

    def make(rendezvous: Rendezvous, endpoint: Endpoint, global_ranks: Sequence[int]) -> World:
        return connect(rendezvous, limit, backend, endpoint, global_ranks)

    made, membership, kept = renewal.join(handles, starting, limit, backend.device_id, make)
    place(made, membership, kept)
    registry.make_default(made)
    return made


def reconfigure(
    name: str,
    handles: Sequence[str],
    endpoint: Endpoint,
    timeout: float,
    backend: Backend | None = None,
) -> World:
    """Make a world of exactly the processes with these handles, in this order, by nothing else:
    each calls this with one `name`, the same handles, and its own endpoint. It does not become the
    default.

    A handle is the text `handle_of(endpoint)`, passed on by any means. The caller decides who is
    alive: ranks run no agreement. After an error the endpoint serves for another attempt with
    another name; after success it is the world's, and closed with it. Raises as `init`, and
    `ValueError` unless the endpoint's handle is among `handles`.
    """
    places = [renewal.handle_in(each) for each in handles]
    if endpoint.handle not in places:
        raise ValueError("handles must include that of the endpoint")
    rank = places.index(endpoint.handle)
    with endpoint.named(name):
        known = Known(rank, [each.named(name) for each in places])
        return connect(known, limited(timeout), backend or Backend(), endpoint)
