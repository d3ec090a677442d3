"""Start local ranks, through torch's own elastic launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.world import placement
from weft.world.placement import threads_per_rank


def launch(fn: Callable[..., Any], ranks: int, *args: Any, threads: int | None = None, bind: bool = True) -> list[Any]:
    """Call ``fn(*args)`` in `ranks` new processes on this host and return their results in rank order.

    `fn`, `args` and results must be picklable, and the calling script's main part under ``if __name__ == "__main__"``, as always
    with `multiprocessing`. Each rank finds torchrun's variables, so `weft.init()` joins them. `threads` is the number of compute
    threads per rank; by default one for each core of a rank's share, which is on one NUMA node if it can be. Ranks are bound to
    their shares where the cores go round evenly, unless `bind` is false. If a rank fails the others are stopped, and `RuntimeError`
    tells which failed and why.
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
        results = elastic_launch(config, _rank)(threads or threads_per_rank(ranks), bind, fn, *args)
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


def _rank(threads: int, bind: bool, fn: Callable[..., Any], *args: Any) -> Any:
    """What a launched process runs: `fn` with its share of threads, and a report of what went wrong."""
    if bind:
        placement.bind(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), threads)
    os.environ[placement.OFF] = "0"  # `weft.init` need not do it
    torch.set_num_threads(threads)
    return record(fn)(*args)


def run(ranks: int, script: str, arguments: Sequence[str], bind: bool = True) -> int:
    """Run a Python script on `ranks` local ranks; the exit code of the first that fails, or 0.

    `weft.init` binds each to its share of the cores, unless `bind` is false.
    """
    from torch.distributed.run import main

    if not bind:
        os.environ[placement.OFF] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    try:
        main(["--standalone", f"--nproc-per-node={ranks}", script, *arguments])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return error.get_first_failure()[1].exitcode
    return 0
