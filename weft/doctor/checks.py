"""``weft doctor``: a report on the ranks of a job, their hosts and connections, and problems.

Start it with the job's launcher: ``torchrun … -m weft doctor`` on every host. Before there is a
world ranks try to connect, each to all of other hosts, so that one report names every failure. A
rank that cannot join the job reports the address from which it tried.
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
from pathlib import Path
from timeit import repeat, timeit
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed.distributed_c10d import PrefixStore

import weft._native as _native
from weft.bootstrap import transports
from weft.bootstrap.interfaces import addresses, family_of, named_interface
from weft.bootstrap.rendezvous import StoreRendezvous, host_identity
from weft.bootstrap.shared_store import launched
from weft.checks import name as dtype_name
from weft.doctor import cores, memory
from weft.doctor.cores import RankReport
from weft.doctor.tables import table
from weft.engines.recording import clock_offsets
from weft.errors import SymmetricMemoryError
from weft.host import placement
from weft.host.topology import listed, read_text
from weft.kernels.packed import pack
from weft.kernels.products import multiply
from weft.launchers.variables import launcher_variables, translated
from weft.measure.progress import progress
from weft.measure.versions import versions
from weft.ops import stored
from weft.ops.barrier import barrier
from weft.ops.onesided import put_notify
from weft.ops.signalling import wait
from weft.process_group import in_place_of_gloo
from weft.schedules.levels import OVERSUBSCRIBED_SIGNAL_LATENCY, SIGNAL_LATENCY
from weft.schedules.thresholds import Thresholds
from weft.world import World, init
from weft.world.signals import Signals
from weft.world.values import all_gather_values

PING = 1  # bytes of a small message
ROUNDS = 20  # small messages
BULK = 8 << 20  # bytes of a large one
BULK_ROUNDS = 3  # large messages
PRODUCT = 1024  # rows and columns of the product that is timed
NEW = 32 << 20  # bytes of a tensor that is filled
_CLOCK_ERROR = 1.0  # seconds; hosts whose clocks differ by more are reported
_STARTING = 60.0  # seconds for all ranks to start
_CONNECTING = 2.0  # seconds for a connection
_UNEVEN = 0.5  # part of the best link or processor of a job, below which another is reported


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
    """The measured connection of two ranks: Gbit/s, and the latency in microseconds."""

    one: int
    other: int
    gbps: float
    latency: float


class FailedConnections(NamedTuple):
    """The reasons why one rank could not connect to peers, by rank."""

    failed: dict[int, str]


def diagnose(console: Console, verbose: bool = False) -> bool:
    """Print what is wrong and a summary of all ranks, on rank 0, with details if `verbose`; returns
    whether there is no problem. Collective.
    """
    try:
        if not dist.is_initialized() and translated(os.environ):
            store, rank, ranks = launched(_STARTING)
            problems = _reach(StoreRendezvous(PrefixStore("weft doctor", store), rank, ranks))
            if rank == 0:
                _print_problems(problems, console)
            if problems:
                return False
        world = init(timeout=_STARTING)
    except SymmetricMemoryError as error:
        _print_problems([f"there is no memory for a world: {error}; {memory.MORE_MEMORY}"], console)
        return False
    except (RuntimeError, ValueError) as error:
        variables = launcher_variables(os.environ) or {}
        address, port = (variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        place = f"{socket.gethostname()} ({_listed(addresses())})"
        text = (
            f"{place} cannot join the job at {address}:{port}: {error}\n"
            f"Is {address or 'MASTER_ADDR'} the address of the first host on a network that this "
            f"host can reach, is port {port} open there, and was the job started on every host?"
        )
        console.print(f"[bold red]No connection[/]: {escape(text)}")
        return False
    with world:
        with progress("examining ranks and links", 2, shown=world.rank == 0) as advance:
            everyone = all_gather_values(world, _report(world), RankReport)
            advance()
            links = _links(world) if all(each.shared == "works" for each in everyone) else {}
        # only rank 0 has all clock offsets
        problems = all_gather_values(
            world, [*_problems(everyone, links, clock_offsets(world, now=time.time_ns))], list[str]
        )[0]
        staged = all_gather_values(world, world.placement.staging_reason, str)
        stores = all_gather_values(world, _native.stores(), str)
        replaced = all_gather_values(world, in_place_of_gloo.in_force(), bool)
        if world.rank == 0:
            _print_verdict(everyone, problems, console)
            texts = [*_summary(everyone, links)]
            if world.network is not None:
                texts.append(transports.description(world.network.transport))
            if world.ranks > 1 and not world.hosts.several:
                why = next(filter(None, staged), "")
                how = f"are staged, since {why}" if why else "can be read in place"
                texts.append(f"Peers' ordinary tensors {how}.")
            texts += [_gloo(replaced), _setup()]
            if verbose:
                _print_tables(everyone, links, console)
                console.print(
                    _thresholds(everyone, world.thresholds, world.placement.oversubscribed)
                )
                texts += [_stores(stores), _new_memory(), _measurements()]
            else:
                texts.append("--verbose shows each rank, core and link, thresholds and choices.")
            for text in texts:
                console.print(text, markup=False)
        return not problems


def _print_verdict(
    everyone: Sequence[RankReport], problems: Sequence[str], console: Console
) -> None:
    """Print what is wrong, or that nothing is, and what else may matter."""
    _print_problems(problems, console)
    if not problems:
        ranks, hosts = _number(len(everyone), "rank"), _number(len(_by_host(everyone)), "host")
        console.print(f"Nothing is wrong: {ranks} on {hosts}.", style="green")
    for kind, text in _notes(everyone):
        console.print(f"[bold yellow]{kind}:[/] {escape(text)}")
    console.print()


def _summary(
    everyone: Sequence[RankReport], links: Mapping[tuple[int, int], tuple[float, float]]
) -> Iterator[str]:
    """Sentences on each host and its ranks, and on all links."""
    names = everyone[0].providers
    for on in _by_host(everyone):
        ranks = [report.rank for report in on]
        cpus = {cpu for report in on for cpu in report.cores}
        rates = (f"{name} {_spread([each.providers[name] for each in on])}" for name in names)
        yield (
            f"{on[0].name}: {_number(len(ranks), 'rank')} ({listed(ranks)}) on "
            f"{_number(len(cpus), 'core')} ({listed(cpus)}); threads of each: "
            f"{_spread([report.threads for report in on])}; GFLOP/s: {', '.join(rates)}."
        )
        places = [_listed(report.addresses) for report in on]
        places += [f"GLOO_SOCKET_IFNAME={each.interface}" for each in on if each.interface]
        yield f"Addresses: {', '.join(dict.fromkeys(places))}."
        yield memory.sentence(on)
    if links:
        gbps, latencies = zip(*links.values(), strict=True)
        yield f"Links of hosts: {_spread(gbps, 2)} Gbit/s, latency {_spread(latencies)} us."


def _spread(values: Sequence[float], digits: int = 0) -> str:
    """The least and the largest of some numbers, or the one that all are."""
    ends = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return " to ".join(dict.fromkeys(ends))


def _setup() -> str:
    """The versions."""
    return ", ".join(f"{name} {version}" for name, version in versions().items()) + "."


def _stores(kinds: Sequence[str]) -> str:
    """The kinds of stores that ranks have selected by WEFT_STORES, usually one."""
    return f"Stores to memory: {', '.join(dict.fromkeys(kinds))} (WEFT_STORES)."


def _gloo(replaced: Sequence[bool]) -> str:
    """Whether process groups that programs ask for as gloo's are weft's, by rank."""
    groups, variable = "Process groups that programs ask for as gloo's", in_place_of_gloo.VARIABLE
    if all(replaced):
        return f"{groups} are weft's ({variable}=1)."
    if not any(replaced):
        return f"{groups} are gloo's; {variable}=1 makes them weft's."
    here = ", ".join(str(rank) for rank, weft in enumerate(replaced) if weft)
    return f"{groups} are weft's on rank(s) {here} alone: set {variable} alike on all ranks."


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _reach(rendezvous: StoreRendezvous) -> list[str]:
    """Descriptions of failed connections between ranks of different hosts, equal on all ranks.

    Every rank listens on a port that the system chooses, as gloo does, and tries to connect to all
    ranks of other hosts.
    """
    interface, here = named_interface(), addresses()
    with ThreadPoolExecutor() as pool, _listening(interface, here) as listener:
        own = Contact(
            socket.gethostname(), host_identity(), interface, here, *listener.getsockname()[:2]
        )
        with rendezvous.exchange(own, _STARTING) as everyone:
            remote = [peer for peer, other in enumerate(everyone) if other.host != own.host]
            errors = zip(
                remote, pool.map(lambda peer: _connect(everyone[peer]), remote), strict=True
            )
        own_errors = FailedConnections({peer: why for peer, why in errors if why})
        # the exchange ends when no rank needs the listener any longer
        with rendezvous.exchange(own_errors, _STARTING) as all_errors:
            return [*_unreachable(everyone, [failed for (failed,) in all_errors])]


def _listening(interface: str, here: Mapping[str, str]) -> socket.socket:
    """A socket that listens at the same address as gloo: `interface`'s, else that of this host's
    name, else the loopback address.
    """
    with contextlib.suppress(OSError):
        if host := here.get(interface) if interface else socket.gethostbyname(socket.gethostname()):
            return socket.create_server((host, 0), family=family_of(host))
    return socket.create_server(("127.0.0.1", 0))


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
            wrong = f"GLOO_SOCKET_IFNAME={contact.interface} is not an interface with an address"
            advice = "set it to one that the other hosts can reach"
        elif contact.address.startswith("127.") and len(hosts) > 1:
            name = (
                f"the interface {contact.interface}"
                if contact.interface
                else f"the name {contact.name}"
            )
            wrong = f"{name} has the address {contact.address}, which other hosts cannot reach"
            advice = "set GLOO_SOCKET_IFNAME to an interface that they can reach"
        else:
            continue
        excused.add(rank)
        yield f"rank {rank} on {contact.name}: {wrong}; {advice}: {others}"
    for rank, errors in enumerate(failed):
        for peer, why in errors.items():
            if peer not in excused:
                contact = everyone[peer]
                yield (
                    f"rank {rank} on {everyone[rank].name} cannot connect to rank {peer} on "
                    f"{contact.name} at {contact.address}, port "
                    f"{contact.port}: {why}. Is there a firewall? gloo and weft use any ports, so "
                    "all must be open between the hosts. Is the address on a network that both "
                    "hosts share? GLOO_SOCKET_IFNAME sets the interface to use: "
                    f"{_listed(contact.addresses)}"
                )


def _listed(addresses: Mapping[str, str]) -> str:
    return (
        ", ".join(f"{name} {address}" for name, address in addresses.items())
        or "no interface has an address"
    )


def _print_problems(problems: Sequence[str], console: Console) -> None:
    for problem in problems:
        console.print(f"[bold red]wrong:[/] {escape(problem)}")


def _report(world: World) -> RankReport:
    """The report of this rank."""
    try:
        world.empty(BULK, dtype=torch.uint8).fill_(1)
        shared = "works"
    except SymmetricMemoryError as error:
        shared = str(error)
    ran, waited = placement.time_of_thread()
    rates = {dtype_name(dtype): _gflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    later = placement.time_of_thread()
    ran, waited = later[0] - ran, later[1] - waited
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
        rates,
        placement.host_topology(),
        _native.team_size(),
        placement.cache_sizes(),
        memory.here(),
        cores.quotas(read_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup")),
        waited / max(1, ran + waited),
        os.getloadavg()[0],
    )


def _new_memory() -> str:
    """A sentence on the cost of writing to a large new tensor, whose memory the C library may take
    from earlier tensors or from the kernel.
    """
    old = torch.empty(NEW, dtype=torch.uint8, device="cpu")
    again = 1e3 * min(repeat(lambda: old.fill_(1), number=1, repeat=4))
    new = 1e3 * min(
        timeit(partial(torch.empty(NEW, dtype=torch.uint8, device="cpu").fill_, 1), number=1)
        for _ in range(4)
    )
    text = (
        f"Filling a tensor of {NEW >> 20} MiB takes {new:.1f} ms if it is new, {again:.1f} ms if "
        "not."
    )
    if new < 2 * again:
        return text
    return (
        f"{text} Calls that return new tensors can avoid this: see 'New results' in "
        "docs/performance.md."
    )


def _measurements() -> str:
    """A sentence on the choices that were measured on this host, and where they are kept."""
    file, count, busy = stored.kept()
    if not count:
        return "No choices of auto or of collectives are remembered on this host."
    again = f" {busy} of them, measured on busy cores, will be measured again." if busy else ""
    return (
        f"{count} choice(s) of auto and of collectives are remembered in {file}.{again} "
        "weft tune --clear forgets them."
    )


def _gflops(dtype: torch.dtype) -> float:
    """The rate of weft's product of square matrices, by the library that weft selects."""
    a, out = (
        torch.ones(PRODUCT, PRODUCT, dtype=dtype, device="cpu"),
        torch.empty(PRODUCT, PRODUCT, dtype=dtype, device="cpu"),
    )
    seconds = min(repeat(partial(multiply, a, pack(a), out), number=1, repeat=3))
    return 2 * PRODUCT**3 / seconds / 1e9


def _links(world: World) -> dict[tuple[int, int], tuple[float, float]]:
    """(Gbit/s, latency in microseconds) between every two ranks on different hosts, by puts with
    signals.
    """
    if not world.hosts.several:
        return {}
    found = list[Link]()
    source = torch.zeros(BULK, dtype=torch.uint8, device="cpu")
    inbox, arrived = world.empty(BULK, dtype=torch.uint8), world.signals(world.ranks)
    sizes = [PING] * ROUNDS + [BULK] * BULK_ROUNDS
    for one, other in itertools.combinations(range(world.ranks), 2):
        barrier(world)
        if world.hosts[one] == world.hosts[other] or world.rank not in (one, other):
            continue
        peer = one + other - world.rank
        seconds = [
            _round_trip(inbox[:size], source[:size], arrived, peer, number)
            for number, size in enumerate(sizes, 1)
        ]
        trip, bulk = min(seconds[:ROUNDS]), min(seconds[ROUNDS:])
        if world.rank == one:
            gbps = 2 * 8 * BULK / max(bulk - trip, 1e-9) / 1e9
            found.append(Link(one, other, gbps, 1e6 * trip / 2))
    return {
        (link.one, link.other): (link.gbps, link.latency)
        for links in all_gather_values(world, found, list[Link])
        for link in links
    }


def _round_trip(
    inbox: torch.Tensor, source: torch.Tensor, arrived: Signals, peer: int, number: int
) -> float:
    """Seconds in which message `number` of a pair reaches a peer and comes back.

    Of the two ranks only the lower one, which sends first, sees all of them: the other one may wait
    before.
    """
    rank, start = arrived.world.rank, _native.now()
    if rank < peer:
        put_notify(inbox, source, arrived, rank, peer)
    wait(arrived, peer, ">=", number)
    if rank > peer:
        put_notify(inbox, source, arrived, rank, peer)
    return (_native.now() - start) / 1e9


def _problems(
    everyone: Sequence[RankReport],
    links: dict[tuple[int, int], tuple[float, float]],
    offsets: Sequence[int],
) -> Iterator[str]:
    """Descriptions of problems."""
    for report in everyone:
        if report.shared != "works":
            yield f"{report.place} cannot allocate symmetric memory: {report.shared}"
        if report.threads > len(report.cores):
            yield (
                f"{report.place} computes with {report.threads} threads on {len(report.cores)} "
                "core(s): set OMP_NUM_THREADS"
            )
        if report.team < report.threads:
            few = "too few cores, or no OpenMP library in this torch"
            yield (
                f"{report.place} copies and adds with {report.team} of its {report.threads} "
                f"threads: {few}"
            )
    for on in _by_host(everyone):
        yield from cores.problems(on)
        yield from memory.problems(on)
    for report, offset in zip(everyone, offsets, strict=True):
        if abs(offset) > _CLOCK_ERROR * 1e9:
            sign = "ahead of" if offset > 0 else "behind"
            yield (
                f"the clock of {report.name} (rank {report.rank}) is {abs(offset) / 1e9:.1f} s "
                f"{sign} "
                f"that of {everyone[0].name}: synchronize both by NTP, or timestamps in logs will "
                "not match; weft itself is not affected"
            )
    best = max((gbps for gbps, _ in links.values()), default=0.0)
    for (one, other), (gbps, _) in links.items():
        if gbps < _UNEVEN * best:
            yield (
                f"ranks {one} and {other} have a link of {gbps:.2f} Gbit/s, others of {best:.2f}: "
                "the wrong interface? GLOO_SOCKET_IFNAME sets it"
            )
    throttled = {report.rank for on in _by_host(everyone) if cores.throttled(on) for report in on}
    for name in everyone[0].providers:
        fastest = max(report.providers[name] for report in everyone)
        for report in everyone:
            if report.rank in throttled:
                continue  # for that reason
            if (rate := report.providers[name]) < _UNEVEN * fastest:
                yield (
                    f"{report.place} multiplies {name} at {rate:.0f} GFLOP/s, another rank at "
                    f"{fastest:.0f}: does another program run there, or do ranks share a core?"
                )


def _notes(everyone: Sequence[RankReport]) -> Iterator[tuple[str, str]]:
    """Kinds and descriptions of what may harm other libraries, or these measurements."""
    for on in _by_host(everyone):
        for kind, texts in ("note", memory.notes(on)), ("busy", cores.busy(on)):
            for text in texts:
                yield kind, text


def _by_host(everyone: Sequence[RankReport]) -> list[list[RankReport]]:
    """The reports of each host."""
    hosts = dict.fromkeys(report.host for report in everyone)
    return [[report for report in everyone if report.host == host] for host in hosts]


def _thresholds(everyone: Sequence[RankReport], agreed: Thresholds, oversubscribed: bool) -> Table:
    """The thresholds of these ranks' world, and their sources."""

    def source(name: str) -> str:
        return " and ".join(
            dict.fromkeys(
                "sysfs" if name in report.cache_sizes else "default" for report in everyone
            )
        )

    first, second = (
        f"{level}-level cache of {size >> 10} KiB ({source(f'{level}_level')})"
        for level, size in (("first", agreed.first_level), ("second", agreed.second_level))
    )
    shown = table("threshold", "here", "from")
    shown.add_row("largest message sent eagerly", f"{agreed.eager_bytes >> 10} KiB", first)
    shown.add_row("most bytes staged at once", f"{agreed.staged_bytes >> 10} KiB", second)
    shown.add_row("a thread's bytes of larger ones", f"{agreed.slot_bytes >> 10} KiB", second)
    shown.add_row("smallest part put, not read", f"{agreed.pushed_bytes >> 10} KiB", second)
    latency, reason = (
        (OVERSUBSCRIBED_SIGNAL_LATENCY, "default, as ranks share cores")
        if oversubscribed
        else (SIGNAL_LATENCY, "default")
    )
    shown.add_row("what a level of ranks must save", f"{latency:.1f} notifies", reason)
    return shown


def _print_tables(
    everyone: Sequence[RankReport],
    links: Mapping[tuple[int, int], tuple[float, float]],
    console: Console,
) -> None:
    """Print a row for each rank, one for each cache, and one for each link."""
    hosts = [*dict.fromkeys(report.host for report in everyone)]
    rates = [f"{name} GFLOP/s" for name in everyone[0].providers]
    ranks = table("rank", "host", "pid", "cores", "threads", *rates)
    for report in everyone:
        ranks.add_row(
            str(report.rank),
            f"{hosts.index(report.host)}: {report.name}",
            str(report.pid),
            listed(report.cores),
            str(report.threads),
            *(f"{rate:.0f}" for rate in report.providers.values()),
        )
    console.print(ranks)
    for on in _by_host(everyone):
        console.print(cores.drawing(on))
    if links:
        shown = table("ranks", "Gbit/s", "latency us")
        for (one, other), (gbps, latency) in sorted(links.items()):
            shown.add_row(f"{one} - {other}", f"{gbps:.2f}", f"{latency:.0f}")
        console.print(shown)
