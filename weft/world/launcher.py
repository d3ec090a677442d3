"""Start local ranks, through torch's own elastic launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def threads_per_rank(ranks: int) -> int:
    """Compute threads that each of `ranks` local ranks gets: the cores are shared out, at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def launch(fn: Callable[..., Any], ranks: int, *args: Any, threads: int | None = None) -> list[Any]:
    """Call ``fn(*args)`` in `ranks` new processes on this host and return their results in rank order.

    `fn`, `args` and results must be picklable, and the calling script's main part under ``if __name__ == "__main__"``, as always
    with `multiprocessing`. Each rank finds torchrun's variables, so `weft.init()` joins them. `threads` is the number of compute
    threads per rank; by default the cores are shared out. Ranks are bound to cores of their own where these go round evenly. If a
    rank fails the others are stopped, and `RuntimeError` tells which failed and why.
    """
    if ranks < 1:
        raise ValueError(f"at least one rank is needed; got {ranks}")
    multiprocessing.set_forkserver_preload(["torch", "weft.world"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="weft",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the exception below says it all
    try:
        results = elastic_launch(config, _Rank(threads or threads_per_rank(ranks)))(fn, *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RuntimeError(f"rank {rank} (pid {failure.pid}) failed: {_story(failure)}") from None
    finally:
        log.setLevel(level)
    return [results[rank] for rank in range(ranks)]


def _story(failure: ProcessFailure) -> str:
    """The rank's exception, and its traceback if it could leave one."""
    message = failure.message
    if not isinstance(message, dict):
        return message
    return f"{message['message']}\n{message.get('extraInfo', {}).get('py_callstack', '')}"


def _bind(rank: int, threads: int) -> None:
    """Spread the ranks evenly over the cores, if that can be: a scheduler that moves two ranks to one core makes both wait."""
    cores, wanted = sorted(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"]) * threads
    if wanted <= len(cores) or wanted % len(cores) == 0:
        os.sched_setaffinity(0, {cores[(rank * threads + i) % len(cores)] for i in range(threads)})


class _Rank:
    """What a launched process runs: `fn` with its share of threads, and a report of what went wrong."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.__name__ = self.__qualname__ = "rank"

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        import torch
        from torch.distributed.elastic.multiprocessing.errors import record

        _bind(int(os.environ["LOCAL_RANK"]), self.threads)
        torch.set_num_threads(self.threads)
        return record(fn)(*args)


def run(ranks: int, script: str, arguments: Sequence[str]) -> int:
    """Run a Python script on `ranks` local ranks; the exit code of the first that fails, or 0."""
    from torch.distributed.run import main

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    try:
        main(["--standalone", f"--nproc-per-node={ranks}", script, *arguments])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return error.get_first_failure()[1].exitcode
    return 0
