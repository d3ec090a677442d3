"""Busy neighbours: processes that compete with the ranks for their cores while a benchmark runs."""

from __future__ import annotations

import multiprocessing
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import WeftError
from weft.ops.barrier import barrier
from weft.world import World

_BUSY = """
import os, select, sys, threading

def end_with_the_bench():
    select.select([0, *map(int, sys.argv[2:])], [], [])
    os._exit(0)

os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
threading.Thread(target=end_with_the_bench).start()
os.write(1, b"1")
while True:
    pass
"""
_START = 60.0  # seconds


@contextmanager
def neighbours(world: World, count: int | None) -> Iterator[list[int]]:
    """`count` busy processes on each host during the ``with`` block, which may run on any core of
    the host's ranks; none for None. Collective. Yields the process ids of those that this rank
    started.

    The first rank of each host starts them, and they end with it, or with the process that launched
    it, however that ends. Raises `WeftError` if one does not start.
    """
    host = world.hosts[world.rank]
    local = [rank for rank in range(world.ranks) if world.hosts[rank] == host]
    cores = sorted(frozenset[int]().union(*(world.cores[rank] for rank in local)))
    with busy(cores, (count or 0) if world.rank == local[0] else 0) as started:
        if count:
            barrier(world)
        yield started


@contextmanager
def busy(cores: list[int], count: int) -> Iterator[list[int]]:
    """`count` busy processes on these cores during the ``with`` block; yields their process ids.

    They end with this process, however it ends. Raises `WeftError` if one does not start.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(_start(cores))
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _start(cores: list[int]) -> subprocess.Popen[bytes]:
    """A process that is busy by now."""
    launcher = multiprocessing.parent_process()
    pipes = [launcher.sentinel] if launcher else []  # closes when the launcher ends
    process = subprocess.Popen(
        [sys.executable, "-ISc", _BUSY, ",".join(map(str, cores)), *map(str, pipes)],
        stdin=subprocess.PIPE,  # closes when this rank ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ctrl-C reaches it, too
        pass_fds=pipes,
    )
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], _START)
    if not (ready and process.stdout.read(1)):
        process.kill()
        process.communicate()
        raise WeftError(f"a busy neighbour did not start: {sys.executable} ended, or took too long")
    return process
