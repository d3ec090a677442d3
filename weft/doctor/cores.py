"""Where the ranks of a host are among its cores, drawn, and in words what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table

from weft.world.topology import Core, Topology, listed, usable


class RankReport(NamedTuple):
    """What one rank sees of its place."""

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
    team: int  # threads that share what is copied and added
    cache_sizes: Mapping[str, int]  # from which its thresholds follow

    @property
    def place(self) -> str:
        """The rank and its host, as troubles begin."""
        return f"rank {self.rank} on {self.name}"


def drawing(here: Sequence[RankReport]) -> Table:
    """A line for each last-level cache of a host, with the ranks that may run on its cores."""
    topology = here[0].topology
    threads = {cpu for core in topology.cores for cpu in core.cpus}
    title = f"{here[0].name}: {len(topology.cores)} cores"
    if len(threads) > len(topology.cores):
        title += f" with {len(threads)} hardware threads"
    if topology.cpuset < threads:
        title += f", of which the control group allows {listed(topology.cpuset)}"
    table = Table(
        "package",
        "node",
        "cores that share a cache",
        "siblings",
        "ranks",
        title=title,
        title_justify="left",
    )
    for (package, node, _), several in groupby(
        topology.cores, lambda core: (core.package, core.node, core.cache)
    ):
        cores = list(several)
        slow = [core.cpus[0] for core in cores if not core.fast]
        ranks = [f"{seen.rank} on {listed(on)}" for seen in here if (on := _on(seen, cores))]
        table.add_row(
            str(package),
            str(node),
            listed(core.cpus[0] for core in cores) + (f" (slow: {listed(slow)})" if slow else ""),
            listed(cpu for core in cores for cpu in core.cpus[1:]) or "none",
            ", ".join(ranks) or "none",
        )
    for node in topology.memory_nodes:
        table.add_row("", str(node), "none: only memory", "", "")
    return table


def troubles(here: Sequence[RankReport]) -> Iterator[str]:
    """What is wrong with where the ranks of a host are."""
    topology = here[0].topology
    all_threads = sum(seen.threads for seen in here)
    far = []
    for seen in here:
        cores = [core for core in topology.cores if _on(seen, [core])]
        if len(here) > 1 and len({core.node for core in cores}) > 1:
            far.append(seen.rank)
        if len(cores) < seen.threads <= len(seen.cores):
            yield _siblings(
                f"{seen.place} computes with {seen.threads} threads", len(cores), seen.threads
            )
    if far:
        yield (
            f"rank(s) {listed(far)} on {here[0].name} run on several NUMA nodes, so part of their "
            "memory is far: let weft bind "
            "each to one (WEFT_BIND is not 0), and start as many ranks as there are nodes, or a "
            "multiple"
        )
    allowed = {cpu for seen in here for cpu in seen.cores}
    _, cores = usable(topology, allowed)
    if len(cores) < all_threads <= len(allowed) and all(
        seen.threads <= len(cores) for seen in here
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
            f"({listed(topology.cpuset)}), and {all_threads} threads are to run there: give it "
            "more, or start fewer ranks"
        )
    if all_threads > len(allowed):
        yield (
            f"{here[0].name} is over-subscribed: {len(here)} rank(s) with {all_threads} threads in "
            f"all on {len(allowed)} core(s); "
            "start fewer ranks or set OMP_NUM_THREADS"
        )


def _on(seen: RankReport, cores: Sequence[Core]) -> set[int]:
    """On which hardware threads of these cores a rank may run."""
    return {cpu for core in cores for cpu in core.cpus}.intersection(seen.cores)


def _siblings(who: str, cores: int, threads: int) -> str:
    return (
        f"{who} on {cores} core(s), which have {threads} hardware threads or more: two that share "
        "a core multiply no "
        "faster than one; set OMP_NUM_THREADS"
    )
