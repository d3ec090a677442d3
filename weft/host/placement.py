"""Binding of ranks to their own cores, before they allocate memory, which is then on their NUMA
node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch

from weft import variables
from weft.host import topology
from weft.host.topology import Topology
from weft.schedules.thresholds import Thresholds

OFF = "WEFT_BIND"  # the variable that disables binding if it is 0


@lru_cache(1)
def host_topology() -> Topology:
    """The topology of this host's cores."""
    return topology.read(groups=topology.read_text(Path("/proc/self/cgroup")))


def cache_sizes() -> dict[str, int]:
    """The fields of this process's `Thresholds` that the kernel reports."""
    first, second = topology.data_caches(host_topology(), os.sched_getaffinity(0))
    sizes = {"first_level": first, "second_level": second}
    return {name: size for name, size in sizes.items() if size}


def thresholds() -> Thresholds:
    """The thresholds of this process; defaults for cache sizes that the kernel does not report."""
    return Thresholds(**cache_sizes())


def threads_per_rank(ranks: int) -> int:
    """Compute threads for each of `ranks` local ranks: one for each core of its share."""
    return topology.threads_for(host_topology(), os.sched_getaffinity(0), ranks)


def waited_for_core() -> int:
    """Nanoseconds for which this thread has waited for a core; 0 where the kernel does not tell."""
    return time_of_thread()[1]


def time_of_thread() -> tuple[int, int]:
    """Nanoseconds for which this thread has run, and for which it has waited for a core; 0 where
    the kernel does not tell.
    """
    try:
        ran, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return ran, waited


def bind(rank: int, ranks: int, threads: int) -> None:
    """Bind this process to the share of local rank `rank`, if the cores divide evenly among `ranks`
    ranks with `threads` threads each.
    """
    shares = topology.assign(host_topology(), os.sched_getaffinity(0), ranks, threads)
    if shares is not None:
        bind_threads(shares[rank])


def bind_threads(cores: Iterable[int]) -> None:
    """Bind every thread of this process to these cores."""
    for thread in map(int, os.listdir("/proc/self/task")):
        # it has ended, or a sandbox forbids it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(thread, cores)


def bind_as_launched() -> None:
    """Bind this process to its rank's share, unless its launcher bound it, it is the only rank, or
    WEFT_BIND is 0.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", -1))
    if variables.value(OFF) == "0" or ranks < 2 or not 0 <= rank < ranks:
        return
    with contextlib.suppress(ProcessLookupError):  # its launcher has ended
        if os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid()):
            bind(rank, ranks, torch.get_num_threads())
