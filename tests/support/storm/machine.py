"""The surroundings of a trial: times that processes wait for cores, processes that keep the cores
busy, and processes left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def starved(pid: int) -> float:
    """Seconds for which the threads of a process have waited for a core, which no rank can help."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            total += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
    return total / 1e9


def main_thread_starved(pid: int) -> float:
    """Seconds for which the main thread of a process has waited for a core, also of a process that
    has ended, until it is reaped.
    """
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@contextlib.contextmanager
def busy_cores(busy: bool) -> Iterator[None]:
    """Processes that keep all cores busy while the block runs."""
    pids = [forked(_burn) for _ in range(len(os.sched_getaffinity(0)) + 1 if busy else 0)]
    try:
        yield
    finally:
        for pid in pids:
            end(pid)


def forked(call, *args) -> int:
    """The process of a fork that makes one call and ends."""
    pid = os.fork()
    if not pid:
        try:
            call(*args)
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> None:
    """Kill a child and wait for its end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def children() -> set[int]:
    """The living children of this process, adopted ones too; ended children are reaped."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        for pid in map(int, Path(f"/proc/self/task/{task}/children").read_text().split()):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    found.add(pid)
    return found


def _burn() -> None:
    while True:
        sum(range(100_000))
