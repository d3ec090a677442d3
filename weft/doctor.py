"""``weft doctor``: what the ranks of a job see of each other and of their machines, and in words what is wrong.

Run it as the job would run: ``torchrun … -m weft doctor`` on every host. A rank that cannot even connect says from where it
tried.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from weft import _native, matmul
from weft.errors import SymmetricMemoryError
from weft.onesided import barrier
from weft.rendezvous import host_identity, launcher_variables
from weft.trace import clock_offsets
from weft.world import World, init

PING, BULK, ROUNDS = 1, 8 << 20, 20  # bytes of a small and a large message, and how many small ones
PRODUCT = 1024  # rows and columns of the product that is timed
_BEHIND = 1.0  # seconds by which a host's clock may be wrong before logs and certificates are
_UNEVEN = 0.5  # of the best link or processor of a job, below which another one is worth a word


class Seen(NamedTuple):
    """What one rank sees of its place."""

    rank: int
    pid: int
    name: str
    host: str
    interface: str
    addresses: dict[str, str]
    cores: tuple[int, ...]
    threads: int
    shared: str
    named: str
    providers: dict[str, float]


def diagnose(console: Console) -> bool:
    """Print what the ranks see, on rank 0; whether nothing is wrong. Collective."""
    place = f"{socket.gethostname()} ({', '.join(f'{name} {address}' for name, address in _addresses().items())})"
    variables = launcher_variables(os.environ) or {}
    master = f"{variables.get('MASTER_ADDR', '')}:{variables.get('MASTER_PORT', '')}"
    try:
        world = init(timeout=60.0)
    except (RuntimeError, ValueError) as error:
        console.print(f"[bold red]No connection[/]: {place} cannot join the job at {master}: {error}", soft_wrap=True)
        console.print(
            f"Is {variables.get('MASTER_ADDR', 'the master')} reachable from here, are its ports open between all hosts, and does "
            f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '(not set)')} name the interface of that network?",
            soft_wrap=True,
        )
        return False
    with world:
        everyone: list[Any] = [_look(world)] * world.ranks
        if world.ranks > 1:
            dist.all_gather_object(everyone, everyone[0])
        links = _links(world)
        troubles = [*_troubles(everyone, links, clock_offsets(world, now=time.time_ns))]
        if world.rank == 0:
            _print(everyone, links, troubles, console)
        return not troubles


def _look(world: World) -> Seen:
    try:
        world.empty(1 << 20, dtype=torch.uint8).fill_(1)
        shared = "works"
    except SymmetricMemoryError as error:
        shared = str(error)
    return Seen(
        world.rank,
        os.getpid(),
        socket.gethostname(),
        host_identity(),
        os.environ.get("GLOO_SOCKET_IFNAME", ""),
        _addresses(),
        tuple(sorted(os.sched_getaffinity(0))),
        torch.get_num_threads(),
        shared,
        _named(),
        {str(dtype).removeprefix("torch."): _gflops(dtype) for dtype in (torch.float32, torch.bfloat16)},
    )


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface."""
    import fcntl
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _named() -> str:
    """What this host's name stands for, which gloo tells peers unless it is given an interface."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _gflops(dtype: torch.dtype) -> float:
    """The rate of weft's product of square matrices, by the provider that it chooses."""
    a, out = torch.ones(PRODUCT, PRODUCT, dtype=dtype), torch.empty(PRODUCT, PRODUCT, dtype=dtype)
    weight, best = matmul.pack(a), float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        matmul.multiply(a, weight, out)
        best = min(best, time.perf_counter() - begun)
    return 2 * PRODUCT**3 / best / 1e9


def _links(world: World) -> dict[tuple[int, int], tuple[float, float]]:
    """(Gbit/s, latency in microseconds) between every two ranks on different hosts, as ``isend`` and ``irecv`` have it."""
    found = {}
    small, large = torch.zeros(PING, dtype=torch.uint8), torch.zeros(BULK, dtype=torch.uint8)
    for one in range(world.ranks):
        for other in range(one + 1, world.ranks):
            barrier(world)
            if world.hosts[one] == world.hosts[other] or world.rank not in (one, other):
                continue
            peer = other if world.rank == one else one
            trips = min(_trip(small, peer, world.rank == one) for _ in range(ROUNDS))
            bulk = min(_trip(large, peer, world.rank == one) for _ in range(3))
            found[one, other] = 2 * 8 * BULK / max(bulk - trips, 1e-9) / 1e9, 1e6 * trips / 2
    several: list[Any] = [found] * world.ranks
    if world.ranks > 1:
        dist.all_gather_object(several, found)
    return {pair: link for part in reversed(several) for pair, link in part.items()}


def _trip(tensor: torch.Tensor, peer: int, first: bool) -> float:
    """Seconds for a message there and back."""
    begun = _native.now()
    for turn in (first, not first):
        if turn:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)
    return (_native.now() - begun) / 1e9


def _troubles(everyone: Sequence[Seen], links: dict[tuple[int, int], tuple[float, float]], offsets: Sequence[int]) -> Iterator[str]:
    """What is wrong, in words."""
    for seen in everyone:
        if seen.shared != "works":
            yield f"rank {seen.rank} on {seen.name} cannot reserve symmetric memory: {seen.shared}"
        if seen.interface and seen.interface.split(",")[0] not in seen.addresses:
            yield (
                f"rank {seen.rank} on {seen.name}: GLOO_SOCKET_IFNAME={seen.interface} has no address there, unlike "
                + ", ".join(seen.addresses)
            )
        if seen.threads > len(seen.cores):
            yield f"rank {seen.rank} on {seen.name} computes with {seen.threads} threads on {len(seen.cores)} core(s)"
    for host in dict.fromkeys(seen.host for seen in everyone):
        here = [seen for seen in everyone if seen.host == host]
        cores, threads = {core for seen in here for core in seen.cores}, sum(seen.threads for seen in here)
        if threads > len(cores):
            yield (
                f"{here[0].name} is over-subscribed: {len(here)} rank(s) with {threads} threads in all on {len(cores)} core(s); "
                "start fewer ranks or set OMP_NUM_THREADS"
            )
    hosts = {seen.host for seen in everyone}
    for seen in everyone if len(hosts) > 1 else ():
        if not seen.interface and seen.named.startswith("127."):
            others = ", ".join(name for name in seen.addresses if name != "lo")
            yield (
                f"rank {seen.rank}: the name {seen.name} stands for {seen.named}, which other hosts cannot reach; set "
                f"GLOO_SOCKET_IFNAME to the interface that they can: one of {others}"
            )
    for seen, offset in zip(everyone, offsets, strict=True):
        if abs(offset) > _BEHIND * 1e9:
            way = "ahead of" if offset > 0 else "behind"
            yield f"the clock of {seen.name} is {abs(offset) / 1e9:.1f} s {way} that of {everyone[0].name} (rank {seen.rank})"
    best = max((gbps for gbps, _ in links.values()), default=0.0)
    for (one, other), (gbps, _) in links.items():
        if gbps < _UNEVEN * best:
            yield f"ranks {one} and {other} are joined by {gbps:.2f} Gbit/s, others by {best:.2f}: the wrong interface?"
    for name in everyone[0].providers:
        fastest = max(seen.providers[name] for seen in everyone)
        for seen in everyone:
            if seen.providers[name] < _UNEVEN * fastest:
                yield f"rank {seen.rank} multiplies {name} at {seen.providers[name]:.0f} GFLOP/s, another at {fastest:.0f}"


def _print(
    everyone: Sequence[Seen], links: dict[tuple[int, int], tuple[float, float]], troubles: Sequence[str], console: Console
) -> None:
    hosts = [*dict.fromkeys(seen.host for seen in everyone)]
    table = Table("rank", "host", "pid", "addresses", "interface", "cores", "threads", "shared memory", "GFLOP/s")
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
    if links:
        table = Table("ranks", "Gbit/s", "latency us")
        for (one, other), (gbps, latency) in sorted(links.items()):
            table.add_row(f"{one} - {other}", f"{gbps:.2f}", f"{latency:.0f}")
        console.print(table)
    for trouble in troubles:
        console.print(f"[bold red]wrong:[/] {trouble}", soft_wrap=True)
    if not troubles:
        console.print(f"Nothing is wrong: {len(everyone)} rank(s) on {len(hosts)} host(s).", style="green")
