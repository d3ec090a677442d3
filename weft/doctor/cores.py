"""The cores that each rank of a host may use, as a table, and problems with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from weft.doctor.memory import Memory
from weft.doctor.tables import table
from weft.host import control_groups
from weft.host.topology import Core, Topology, listed, read_text, usable

BUSY = 0.1
"""Part of its time for which a thread waits for a core, from which on the machine is busy."""


class RankReport(NamedTuple):
    """One rank's report on itself and its host."""

    rank: int
    pid: int
    name: str
    host: str
    interface: str
    addresses: dict[str, str]
    cores: tuple[int, ...]  # the hardware threads that it may run on
    threads: int
    shared: str
    providers: dict[str, float]
    topology: Topology
    team: int  # threads that share copies and sums
    cache_sizes: Mapping[str, int]  # the thresholds are derived from them
    memory: Memory
    quotas: Mapping[str, float]  # as of the function `quotas`
    waited: float = 0.0  # the part of the time of its products for which it waited for a core
    load: float = 0.0  # of the host, averaged over a minute

    @property
    def place(self) -> str:
        """The rank and its host, the subject of descriptions of problems."""
        return f"rank {self.rank} on {self.name}"


def quotas(groups: str, root: Path) -> dict[str, float]:
    """The number of CPUs whose time each control group grants its processes, of those of this one
    that limit it; by the number of the group's folder, which containers see alike. Arguments are
    those of `control_groups.folders`.
    """
    found = {}
    for folder, first_version in control_groups.folders(groups, root, "cpu"):
        if first_version:
            time = read_text(folder / "cpu.cfs_quota_us")
            period = read_text(folder / "cpu.cfs_period_us")
        else:
            time, _, period = read_text(folder / "cpu.max").partition(" ")
        if time.isdigit() and period.isdigit():  # not "max" or -1
            found[str(folder.stat().st_ino)] = int(time) / int(period)
    return found


def drawing(here: Sequence[RankReport]) -> Table:
    """A table with a row for each last-level cache of a host: its cores, and the ranks that may run
    on them.
    """
    topology = here[0].topology
    threads = {cpu for core in topology.cores for cpu in core.cpus}
    title = f"{here[0].name}: {len(topology.cores)} cores"
    if len(threads) > len(topology.cores):
        title += f" with {len(threads)} hardware threads"
    if topology.cpuset < threads:
        title += f", of which the control group allows {listed(topology.cpuset)}"
    drawn = table("package", "node", "cores that share a cache", "siblings", "ranks", title=title)
    for (package, node, _), several in groupby(
        topology.cores, lambda core: (core.package, core.node, core.cache)
    ):
        cores = list(several)
        slow = [core.cpus[0] for core in cores if not core.fast]
        ranks = [f"{report.rank} on {listed(on)}" for report in here if (on := _on(report, cores))]
        drawn.add_row(
            str(package),
            str(node),
            listed(core.cpus[0] for core in cores) + (f" (slow: {listed(slow)})" if slow else ""),
            listed(cpu for core in cores for cpu in core.cpus[1:]) or "none",
            ", ".join(ranks) or "none",
        )
    for node in topology.memory_nodes:
        drawn.add_row("", str(node), "none: only memory", "", "")
    return drawn


def problems(here: Sequence[RankReport]) -> Iterator[str]:
    """Descriptions of problems with the cores of a host's ranks."""
    topology = here[0].topology
    all_threads = sum(report.threads for report in here)
    far = []
    for report in here:
        cores = [core for core in topology.cores if _on(report, [core])]
        if len(here) > 1 and len({core.node for core in cores}) > 1:
            far.append(report.rank)
        if len(cores) < report.threads <= len(report.cores):
            yield _siblings(
                f"{report.place} computes with {report.threads} threads", len(cores), report.threads
            )
    if far:
        yield (
            f"rank(s) {listed(far)} on {here[0].name} run on several NUMA nodes, so part of their "
            "memory is remote: let weft bind each to one node (WEFT_BIND must not be 0), and start "
            "one rank for each node, or a multiple"
        )
    allowed = {cpu for report in here for cpu in report.cores}
    _, cores = usable(topology, allowed)
    if len(cores) < all_threads <= len(allowed) and all(
        report.threads <= len(cores) for report in here
    ):
        yield _siblings(
            f"{len(here)} rank(s) on {here[0].name} compute with {all_threads} threads in all",
            len(cores),
            all_threads,
        )
    _, granted = usable(topology, topology.cpuset)
    if len(granted) < min(all_threads, len(topology.cores)):
        yield (
            f"the control group of {here[0].name} allows {len(granted)} of its "
            f"{len(topology.cores)} cores "
            f"({listed(topology.cpuset)}) for {all_threads} threads: allow more, or start fewer "
            "ranks"
        )
    if stopped := throttled(here):
        cpus, ranks = stopped
        yield (
            f"the control group of {here[0].name} grants the time of {cpus:.3g} CPU(s) to "
            f"{sum(report.threads for report in ranks)} threads of rank(s) "
            f"{listed(report.rank for report in ranks)}, and stops them when it is used up: grant "
            "more (docker run --cpus, resources.limits.cpu in Kubernetes), start fewer ranks or "
            "set OMP_NUM_THREADS"
        )
    if all_threads > len(allowed):
        yield (
            f"{here[0].name} is oversubscribed: {len(here)} rank(s) with {all_threads} threads in "
            f"all on {len(allowed)} core(s); "
            "start fewer ranks or set OMP_NUM_THREADS"
        )


def throttled(here: Sequence[RankReport]) -> tuple[float, list[RankReport]] | None:
    """The CPUs whose time a control group grants, and the ranks in it, of those on a host that have
    more threads; of several groups that which stops its ranks the most.
    """

    def share(found: tuple[float, list[RankReport]]) -> float:
        cpus, ranks = found
        return cpus / sum(report.threads for report in ranks)

    groups = {group: cpus for report in here for group, cpus in report.quotas.items()}
    found = (
        (cpus, [report for report in here if group in report.quotas])
        for group, cpus in groups.items()
    )
    return min((each for each in found if share(each) < 1), key=share, default=None)


def busy(here: Sequence[RankReport]) -> Iterator[str]:
    """A description of other programs on the cores of a host's ranks, if there are any."""
    worst = max(here, key=lambda report: report.waited)
    cores = {cpu for report in here for cpu in report.cores}
    shared = sum(report.threads for report in here) > len(cores)
    a_problem = shared or throttled(here)  # of its own
    if worst.waited >= BUSY and not a_problem:
        yield (
            f"{worst.place} waited for a core in {worst.waited:.0%} of the time of its products, "
            f"at a load of {worst.load:.1f} on {len(cores)} core(s): other programs are running, "
            "so times measured here now are longer than they could be, and noisy"
        )


def _on(report: RankReport, cores: Sequence[Core]) -> set[int]:
    """The hardware threads of these cores on which a rank may run."""
    return {cpu for core in cores for cpu in core.cpus}.intersection(report.cores)


def _siblings(subject: str, cores: int, threads: int) -> str:
    return (
        f"{subject} on {cores} core(s) with {threads} hardware threads or more: two threads on one "
        "core multiply no faster than one; set OMP_NUM_THREADS"
    )
