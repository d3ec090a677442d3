"""``weft doctor``: what the ranks of a job see of each other and of their machines, and in words
what is wrong.

Run it as the job would run: ``torchrun … -m weft doctor`` on every host. Before gloo is asked to
connect, which takes minutes to give up and says little, ranks try it themselves. One that cannot
even join the job says from where it tried.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from timeit import repeat, timeit
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.distributed_c10d import PrefixStore

import weft._native as _native
from weft.checks import name as dtype_name
from weft.doctor import cores
from weft.doctor.cores import RankReport
from weft.engines.recording import clock_offsets
from weft.errors import SymmetricMemoryError
from weft.kernels.products import multiply
from weft.kernels.weights import pack
from weft.ops.barrier import barrier
from weft.schedules.levels import OVERSUBSCRIBED_SIGNAL_LATENCY, SIGNAL_LATENCY
from weft.schedules.thresholds import Thresholds
from weft.world import World, init, peer_memory, placement
from weft.world.listener import addresses, family_of, named_interface
from weft.world.rendezvous import (
    StoreRendezvous,
    host_identity,
    join,
    launched,
    launcher_variables,
    translated,
)
from weft.world.wire import Kind, all_gather_values

PING, BULK, ROUNDS = 1, 8 << 20, 20  # bytes of a small and a large message, and how many small ones
PRODUCT = 1024  # rows and columns of the product that is timed
NEW = 32 << 20  # bytes of a tensor that is filled
_BEHIND = 1.0  # seconds by which a host's clock may be wrong before logs and certificates are
_STARTING, _CONNECTING = 60.0, 2.0  # seconds for all ranks to come, and for a connection
_UNEVEN = 0.5  # of the best link or processor of a job, below which another one is worth a word


class Contact(NamedTuple):
    """The host of a rank and the address at which gloo would reach it, exchanged before there is a
    connection.
    """

    name: str
    host: str
    interface: str
    addresses: dict[str, str]
    address: str
    port: int


class Link(NamedTuple):
    """What was measured between two ranks: Gbit/s, and the latency in microseconds."""

    one: int
    other: int
    gbps: float
    latency: float


class Tried(NamedTuple):
    """Why one rank could not connect to which others."""

    failed: dict[int, str]


def diagnose(console: Console) -> bool:
    """Print the report of all ranks, on rank 0; whether there is no problem. Collective."""
    try:
        if not dist.is_initialized() and translated(os.environ):
            store, rank, ranks = launched(_STARTING)
            troubles = _reach(StoreRendezvous(PrefixStore("weft doctor", store), rank, ranks))
            if rank == 0:
                _print_problems(troubles, console)
            if troubles:
                return False
            join(store, rank, ranks, _STARTING)
        world = init(timeout=60.0)
    except (RuntimeError, ValueError) as error:
        variables = launcher_variables(os.environ) or {}
        address, port = (variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        place = f"{socket.gethostname()} ({_listed(addresses())})"
        console.print(
            f"[bold red]No connection[/]: {place} cannot join the job at {address}:{port}: "
            f"{error}\n"
            f"Is {address or 'that'} the address of the first host on a network that reaches from "
            f"here, is port {port} open there, "
            "and has every host started the job?",
            soft_wrap=True,
        )
        return False
    with world:
        everyone = _of_all_ranks(world, _look(world), RankReport)
        links = _links(world)
        # only rank 0 has the clocks
        troubles = _of_all_ranks(
            world, [*_troubles(everyone, links, clock_offsets(world, now=time.time_ns))], list[str]
        )[0]
        staged = _of_all_ranks(world, world.staging_reason, str)
        stores = _of_all_ranks(world, _native.stores(), str)
        if world.rank == 0:
            _print(everyone, links, console)
            console.print(_thresholds(everyone, world.thresholds, world.oversubscribed))
            if world.ranks > 1 and not world.multi_host:
                why = next(filter(None, staged), "")
                how = f"staged, since {why}" if why else "read through the kernel, in place"
                console.print(
                    f"Ordinary tensors of {peer_memory.LEAST_BYTES >> 20} MiB and more are {how}.",
                    soft_wrap=True,
                )
            console.print(_stores(stores), soft_wrap=True)
            console.print(_new_memory(), soft_wrap=True)
            _print_problems(troubles, console)
            if not troubles:
                hosts = len(set(world.hosts))
                console.print(
                    f"Nothing is wrong: {len(everyone)} rank(s) on {hosts} host(s).", style="green"
                )
        return not troubles


def _stores(kinds: Sequence[str]) -> str:
    """The kinds of stores that ranks have selected by WEFT_STORES, usually one."""
    return f"Stores to memory: {', '.join(dict.fromkeys(kinds))} (WEFT_STORES)."


def _reach(rendezvous: StoreRendezvous) -> list[str]:
    """Descriptions of failed connections between ranks of different hosts, equal on all ranks.

    Every rank listens on a port that the system chooses, as gloo does, and tries to connect to all
    ranks of other hosts.
    """
    interface, known = named_interface(), addresses()
    with ThreadPoolExecutor() as pool, _listening(interface, known) as listener:
        own = Contact(
            socket.gethostname(), host_identity(), interface, known, *listener.getsockname()[:2]
        )
        with rendezvous.exchange(own, _STARTING) as everyone:
            remote = [peer for peer, other in enumerate(everyone) if other.host != own.host]
            errors = zip(
                remote, pool.map(lambda peer: _connect(everyone[peer]), remote), strict=True
            )
        own_errors = Tried({peer: why for peer, why in errors if why})
        # the exchange ends once no rank needs the listener any more
        with rendezvous.exchange(own_errors, _STARTING) as tried:
            return [*_unreachable(everyone, [failed for (failed,) in tried])]


def _listening(interface: str, known: Mapping[str, str]) -> socket.socket:
    """A socket that listens where gloo does: on the given interface, else on the address of this
    host's name, else on the loopback interface.
    """
    with contextlib.suppress(OSError):
        if (
            host := known.get(interface)
            if interface
            else socket.gethostbyname(socket.gethostname())
        ):
            return socket.create_server((host, 0), family=family_of(host))
    return socket.create_server(("127.0.0.1", 0))


def _of_all_ranks(world: World, own: Kind, kind: type[Kind]) -> list[Kind]:
    """The values of all ranks."""
    return all_gather_values(own, kind) if world.ranks > 1 else [own]


def _connect(to: Contact) -> str:
    """The reason why a connection fails, or ""."""
    try:
        socket.create_connection((to.address, to.port), timeout=_CONNECTING).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unreachable(everyone: Sequence[Contact], failed: Sequence[dict[int, str]]) -> Iterator[str]:
    """Descriptions of unreachable ranks; `failed`: for every rank the reason by peer."""
    hosts = {contact.host for contact in everyone}
    excused = set()
    for rank, contact in enumerate(everyone):
        others = _listed(
            {name: address for name, address in contact.addresses.items() if name != "lo"}
        )
        if contact.interface and contact.interface not in contact.addresses:
            wrong = f"GLOO_SOCKET_IFNAME={contact.interface} is no interface with an address there"
            advice = "set it to one that the other hosts reach"
        elif contact.address.startswith("127.") and len(hosts) > 1:
            name = (
                f"the interface {contact.interface}"
                if contact.interface
                else f"the name {contact.name}"
            )
            wrong = f"{name} stands for {contact.address}, which other hosts cannot reach"
            advice = "set GLOO_SOCKET_IFNAME to the interface that they can"
        else:
            continue
        excused.add(rank)
        yield f"rank {rank} on {contact.name}: {wrong}; {advice}: {others}"
    for rank, report in enumerate(failed):
        for peer, why in report.items():
            if peer not in excused:
                contact = everyone[peer]
                yield (
                    f"rank {rank} on {everyone[rank].name} cannot connect to rank {peer} on "
                    f"{contact.name} at {contact.address}, port "
                    f"{contact.port}: {why}. Is there a firewall? All ports must be open between "
                    "the hosts: gloo and weft take any. Is that address on the network that joins "
                    "them? GLOO_SOCKET_IFNAME sets the interface to use: "
                    f"{_listed(contact.addresses)}"
                )


def _listed(addresses: Mapping[str, str]) -> str:
    return (
        ", ".join(f"{name} {address}" for name, address in addresses.items())
        or "none has an address"
    )


def _print_problems(troubles: Sequence[str], console: Console) -> None:
    for trouble in troubles:
        console.print(f"[bold red]wrong:[/] {trouble}", soft_wrap=True)


def _look(world: World) -> RankReport:
    try:
        world.empty(1 << 20, dtype=torch.uint8).fill_(1)
        shared = "works"
    except SymmetricMemoryError as error:
        shared = str(error)
    return RankReport(
        world.rank,
        os.getpid(),
        socket.gethostname(),
        host_identity(),
        os.environ.get("GLOO_SOCKET_IFNAME", ""),
        addresses(),
        tuple(sorted(os.sched_getaffinity(0))),
        torch.get_num_threads(),
        shared,
        {dtype_name(dtype): _gflops(dtype) for dtype in (torch.float32, torch.bfloat16)},
        placement.host_topology(),
        _native.team_size(),
        placement.cache_sizes(),
    )


def _new_memory() -> str:
    """A sentence on the cost of writing to a large new tensor; the C library may reuse the memory
    of earlier tensors, or not.
    """
    kept = torch.empty(NEW, dtype=torch.uint8)
    again = 1e3 * min(repeat(lambda: kept.fill_(1), number=1, repeat=4))
    new = 1e3 * min(
        timeit(partial(torch.empty(NEW, dtype=torch.uint8).fill_, 1), number=1) for _ in range(4)
    )
    text = (
        f"To fill a tensor of {NEW >> 20} MiB takes {new:.1f} ms where it is new, {again:.1f} ms "
        "where it is not."
    )
    if new < 2 * again:
        return text
    return (
        f"{text} Where results are new in each call this can be avoided: see 'New results' in "
        "docs/performance.md."
    )


def _gflops(dtype: torch.dtype) -> float:
    """The rate of weft's product of square matrices, by the provider that it chooses."""
    a, out = torch.ones(PRODUCT, PRODUCT, dtype=dtype), torch.empty(PRODUCT, PRODUCT, dtype=dtype)
    seconds = min(repeat(partial(multiply, a, pack(a), out), number=1, repeat=3))
    return 2 * PRODUCT**3 / seconds / 1e9


def _links(world: World) -> dict[tuple[int, int], tuple[float, float]]:
    """(Gbit/s, latency in microseconds) between every two ranks on different hosts, as ``isend``
    and ``irecv`` have it.
    """
    found = list[Link]()
    small, large = torch.zeros(PING, dtype=torch.uint8), torch.zeros(BULK, dtype=torch.uint8)
    for one, other in itertools.combinations(range(world.ranks), 2):
        barrier(world)
        if world.hosts[one] == world.hosts[other] or world.rank not in (one, other):
            continue
        peer = other if world.rank == one else one
        trips = min(_trip(small, peer, world.rank == one) for _ in range(ROUNDS))
        bulk = min(_trip(large, peer, world.rank == one) for _ in range(3))
        found.append(
            Link(one, other, 2 * 8 * BULK / max(bulk - trips, 1e-9) / 1e9, 1e6 * trips / 2)
        )
    return {
        (link.one, link.other): (link.gbps, link.latency)
        for links in _of_all_ranks(world, found, list[Link])
        for link in links
    }


def _trip(tensor: torch.Tensor, peer: int, first: bool) -> float:
    """Seconds for a message there and back."""
    begun = _native.now()
    for sends in (first, not first):
        (dist.send if sends else dist.recv)(tensor, peer)
    return (_native.now() - begun) / 1e9


def _troubles(
    everyone: Sequence[RankReport],
    links: dict[tuple[int, int], tuple[float, float]],
    offsets: Sequence[int],
) -> Iterator[str]:
    """Descriptions of problems."""
    for seen in everyone:
        if seen.shared != "works":
            yield f"{seen.place} cannot reserve symmetric memory: {seen.shared}"
        if seen.threads > len(seen.cores):
            yield (
                f"{seen.place} computes with {seen.threads} threads on {len(seen.cores)} core(s): "
                "set OMP_NUM_THREADS"
            )
        if seen.team < seen.threads:
            few = "too few cores, or no OpenMP library in this torch"
            yield (
                f"{seen.place} copies and adds with {seen.team} of its {seen.threads} threads: "
                f"{few}"
            )
    for host in dict.fromkeys(seen.host for seen in everyone):
        yield from cores.troubles([seen for seen in everyone if seen.host == host])
    for seen, offset in zip(everyone, offsets, strict=True):
        if abs(offset) > _BEHIND * 1e9:
            sign = "ahead of" if offset > 0 else "behind"
            yield (
                f"the clock of {seen.name} (rank {seen.rank}) is {abs(offset) / 1e9:.1f} s {sign} "
                f"that of {everyone[0].name}: set both by NTP, or their logs will not match; weft "
                "itself is not affected"
            )
    best = max((gbps for gbps, _ in links.values()), default=0.0)
    for (one, other), (gbps, _) in links.items():
        if gbps < _UNEVEN * best:
            joined = (
                f"ranks {one} and {other} are joined by {gbps:.2f} Gbit/s, others by {best:.2f}"
            )
            yield f"{joined}: the wrong interface? GLOO_SOCKET_IFNAME sets it"
    for name in everyone[0].providers:
        fastest = max(seen.providers[name] for seen in everyone)
        for seen in everyone:
            if (rate := seen.providers[name]) < _UNEVEN * fastest:
                yield (
                    f"{seen.place} multiplies {name} at {rate:.0f} GFLOP/s, another rank at "
                    f"{fastest:.0f}: does something else run "
                    "there, or do ranks share a core?"
                )


def _thresholds(everyone: Sequence[RankReport], agreed: Thresholds, oversubscribed: bool) -> Table:
    """The thresholds of these ranks' world, and their sources."""

    def source(name: str) -> str:
        return " and ".join(
            dict.fromkeys("sysfs" if name in seen.cache_sizes else "default" for seen in everyone)
        )

    first, second = (
        f"{level}-level cache of {size >> 10} KiB ({source(f'{level}_level')})"
        for level, size in (("first", agreed.first_level), ("second", agreed.second_level))
    )
    table = Table("threshold", "here", "from")
    table.add_row("sent eagerly, up to", f"{agreed.eager_bytes >> 10} KiB", first)
    table.add_row("staged at once, up to", f"{agreed.staged_bytes >> 10} KiB", second)
    table.add_row("else by each thread", f"{agreed.slot_bytes >> 10} KiB", second)
    table.add_row(
        "pushed though it could be read, from", f"{agreed.pushed_bytes >> 10} KiB", second
    )
    latency, reason = (
        (OVERSUBSCRIBED_SIGNAL_LATENCY, "default, as ranks share cores")
        if oversubscribed
        else (SIGNAL_LATENCY, "default")
    )
    table.add_row("another level of ranks, if it saves", f"{latency:.1f} notifies", reason)
    return table


def _print(
    everyone: Sequence[RankReport],
    links: dict[tuple[int, int], tuple[float, float]],
    console: Console,
) -> None:
    hosts = [*dict.fromkeys(seen.host for seen in everyone)]
    table = Table(
        "rank",
        "host",
        "pid",
        "addresses",
        "interface",
        "cores",
        "threads",
        "shared memory",
        "GFLOP/s",
    )
    for seen in everyone:
        table.add_row(
            str(seen.rank),
            f"{hosts.index(seen.host)}: {seen.name}",
            str(seen.pid),
            ", ".join(f"{name} {address}" for name, address in seen.addresses.items()),
            seen.interface or "by name",
            ",".join(map(str, seen.cores)),
            str(seen.threads),
            seen.shared,
            ", ".join(f"{name} {rate:.0f}" for name, rate in seen.providers.items()),
        )
    console.print(table)
    for host in hosts:
        console.print(cores.drawing([seen for seen in everyone if seen.host == host]))
    if links:
        table = Table("ranks", "Gbit/s", "latency us")
        for (one, other), (gbps, latency) in sorted(links.items()):
            table.add_row(f"{one} - {other}", f"{gbps:.2f}", f"{latency:.0f}")
        console.print(table)
