"""The topology of a host's cores, read from sysfs, and the share of them for each rank: pure
functions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Core:
    """A physical core: its hardware threads (siblings), package, NUMA node and cache."""

    cpus: tuple[int, ...]  # as the kernel numbers hardware threads
    package: int
    node: int  # the NUMA node of its local memory
    cache: int  # the lowest hardware thread that shares its last-level cache
    fast: bool = True  # not a slower core of a processor that has two kinds
    # bytes of its first and second data cache, divided by the cores that share it; 0 if unknown
    caches: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Topology:
    """A host's cores, in the order of packages, nodes, caches and numbers."""

    cores: tuple[Core, ...]
    memory_nodes: tuple[int, ...] = ()  # NUMA nodes with memory and no cores
    cpuset: frozenset[int] = frozenset()  # hardware threads of this process's control group

    @property
    def nodes(self) -> list[int]:
        """The NUMA nodes with cores."""
        return sorted({core.node for core in self.cores})


def numbers(text: str) -> frozenset[int]:
    """The numbers in a list of the kernel's: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def listed(cpus: Iterable[int]) -> str:
    """The kernel's list of some numbers, the inverse of `numbers`."""
    runs = groupby(enumerate(sorted(cpus)), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def read(sysfs: Path = Path("/sys"), groups: str = "") -> Topology:
    """The topology of the host with this `sysfs`; `groups` is the text of ``/proc/self/cgroup``."""
    devices = sysfs / "devices/system"
    # without sysfs, as in some sandboxes, all are alike
    online = numbers(read_text(devices / "cpu/online")) or frozenset(range(os.cpu_count() or 1))
    node_of = dict.fromkeys(online, 0)
    memory_nodes = []
    for node in sorted(numbers(read_text(devices / "node/online", "0"))):
        cpus = numbers(read_text(devices / f"node/node{node}/cpulist")) & online
        node_of |= dict.fromkeys(cpus, node)
        if not cpus and node in numbers(read_text(devices / "node/has_memory")):
            memory_nodes.append(node)
    slow = numbers(read_text(sysfs / "devices/cpu_atom/cpus"))
    capacity = {cpu: int(read_text(devices / f"cpu/cpu{cpu}/cpu_capacity", "0")) for cpu in online}
    slow |= {cpu for cpu in online if capacity[cpu] < max(capacity.values())}
    cores = []
    seen = set[int]()
    for cpu in sorted(online):
        if cpu in seen:
            continue
        about = devices / f"cpu/cpu{cpu}"
        siblings = numbers(read_text(about / "topology/thread_siblings_list", str(cpu))) & online
        package = int(read_text(about / "topology/physical_package_id", "0"))
        caches = _data_caches(about, len(siblings))
        last = _last_cache(about, cpu)
        cores.append(
            Core(tuple(sorted(siblings)), package, node_of[cpu], last, cpu not in slow, caches)
        )
        seen |= siblings
    cores.sort(key=lambda core: (core.package, core.node, core.cache, core.cpus))
    return Topology(
        tuple(cores), tuple(memory_nodes), _cpuset(sysfs / "fs/cgroup", groups) & online or online
    )


def usable(topology: Topology, allowed: Collection[int]) -> tuple[list[Core], list[Core]]:
    """The fast cores, if there are any, and all cores, each reduced to the hardware threads that a
    process is `allowed` to use.
    """
    cores = [
        replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in allowed))
        for core in topology.cores
    ]
    cores = [core for core in cores if core.cpus]
    return [core for core in cores if core.fast] or cores, cores


def threads_for(topology: Topology, allowed: Collection[int], ranks: int) -> int:
    """The number of compute threads for each of `ranks` ranks: one for each core of its share,
    which is on one NUMA node.
    """
    cores, _ = usable(topology, allowed)
    threads = max(1, len(cores) // ranks)
    nodes = _grouped(cores, "node")
    while (
        threads > 1 and ranks >= len(nodes) and sum(len(node) // threads for node in nodes) < ranks
    ):
        threads -= 1
    return threads


def assign(
    topology: Topology, allowed: Collection[int], ranks: int, threads: int = 1
) -> list[frozenset[int]] | None:
    """For each of `ranks` ranks a share of the `allowed` hardware threads, one of each core; None
    if these cannot be divided evenly.

    A share has `threads` hardware threads, if possible on one package, NUMA node and last-level
    cache. Ranks are spread evenly over these, consecutive ranks next to each other. Slow cores are
    used only if there are too few fast ones. With too few cores, siblings count as cores; with too
    few siblings, shares overlap if all hardware threads get the same number of ranks.
    """
    for cores in usable(topology, allowed):
        if ranks * threads <= len(cores):
            shares = _share(cores, ranks, threads, ("package", "node", "cache"))
            return [frozenset(core.cpus[0] for core in share) for share in shares]
    cpus = [cpu for core in cores for cpu in core.cpus]
    if ranks * threads <= len(cpus) or ranks * threads % len(cpus) == 0:
        return [
            frozenset(cpus[(rank * threads + i) % len(cpus)] for i in range(threads))
            for rank in range(ranks)
        ]
    return None


def locality(topology: Topology, cpus: Collection[int]) -> tuple[int, ...]:
    """The package, NUMA node and last-level cache that contain all these hardware threads; shorter
    if they are in several.
    """
    localities = [
        (core.package, core.node, core.cache)
        for core in topology.cores
        if not {*core.cpus}.isdisjoint(cpus)
    ]
    return tuple(
        level[0]
        for level in takewhile(lambda level: len({*level}) == 1, zip(*localities, strict=True))
    )


def data_caches(topology: Topology, cpus: Collection[int]) -> tuple[int, int]:
    """The smallest `Core.caches` of the cores with these hardware threads."""
    found = [core.caches for core in topology.cores if not {*core.cpus}.isdisjoint(cpus)]
    return min((first for first, _ in found), default=0), min(
        (second for _, second in found), default=0
    )


def _share(
    cores: Sequence[Core], ranks: int, threads: int, levels: Sequence[str]
) -> list[Sequence[Core]]:
    """The cores of each rank; a share should be within one group of each of the `levels`."""
    if levels:
        groups = _grouped(cores, levels[0])
        if levels[0] == "cache" and ranks < len(groups):
            # each rank gets several whole caches: leaving any unused gains nothing
            groups = [[core for group in part for core in group] for part in _parts(groups, ranks)]
        capacities = [len(group) // threads for group in groups]
        if sum(capacities) >= ranks:
            counts = [0] * len(groups)
            for _ in range(ranks):
                counts[max(range(len(groups)), key=lambda at: capacities[at] - counts[at])] += 1
            shares = (
                _share(group, count, threads, levels[1:])
                for group, count in zip(groups, counts, strict=True)
                if count
            )
            return [share for several in shares for share in several]
    return _parts(cores, ranks)


def _parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """The items in `count` parts, as even as possible."""
    return [
        items[len(items) * part // count : len(items) * (part + 1) // count]
        for part in range(count)
    ]


def _grouped(cores: Sequence[Core], level: str) -> list[list[Core]]:
    return [list(group) for _, group in groupby(cores, key=attrgetter(level))]


def _last_cache(about: Path, cpu: int) -> int:
    """The lowest hardware thread that shares the last-level cache of `cpu`, or `cpu` if sysfs lacks
    the caches.
    """
    levels = {
        int(read_text(index / "level", "0")): index
        for index in sorted((about / "cache").glob("index*"))
    }
    return (
        min(numbers(read_text(levels[max(levels)] / "shared_cpu_list")) or {cpu}) if levels else 0
    )


def _data_caches(about: Path, siblings: int) -> tuple[int, int]:
    """The `Core.caches` of a core with `siblings` hardware threads."""
    found = dict[str, int]()
    for index in (about / "cache").glob("index*"):
        if read_text(index / "type") != "Instruction":
            cores = max(1, len(numbers(read_text(index / "shared_cpu_list"))) // siblings)
            found[read_text(index / "level")] = (
                int(read_text(index / "size", "0K").removesuffix("K")) << 10
            ) // cores
    return found.get("1", 0), found.get("2", 0)


def _cpuset(folder: Path, groups: str) -> frozenset[int]:
    """The hardware threads of a process's control group, of version 2, else of version 1; empty if
    neither limits them.
    """
    of = {
        controllers: path.lstrip("/")
        for _, controllers, path in (line.split(":", 2) for line in groups.splitlines())
    }
    candidates = [
        folder / of.get("", "") / "cpuset.cpus.effective",
        folder / "cpuset.cpus.effective",
    ]
    candidates += [
        folder / "cpuset" / of.get("cpuset", "") / "cpuset.effective_cpus",
        folder / "cpuset/cpuset.effective_cpus",
    ]
    return next((found for found in map(numbers, map(read_text, candidates)) if found), frozenset())


def read_text(path: Path, otherwise: str = "") -> str:
    """The text of a file of the kernel's; `otherwise` if it is empty or cannot be read."""
    try:
        return path.read_text().strip() or otherwise
    except OSError:
        return otherwise
