"""Start local ranks, through torch's own elastic launcher."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    record,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.checks import check_call, check_ranks
from weft.errors import WeftError
from weft.host import placement
from weft.host.placement import threads_per_rank
from weft.launchers import hints, one_agent, reports, survivors
from weft.launchers.variables import launcher_variables

_LONG = 80
"""Characters from which on the last line of `run` does not repeat an exception."""
_LOST = re.compile(r"PeerLost|RuntimeError: \[\S+/gloo/\S+\] .*(by peer|Broken pipe)")
"""The beginning of a message on the end of another rank, in weft's words or in gloo's."""


def launch(
    fn: Callable[..., Any], ranks: int, *args: Any, threads: int | None = None, bind: bool = True
) -> list[Any]:
    """Call ``fn(*args)`` in `ranks` new processes on this host and return their results in rank
    order.

    `fn`, `args` and results must be picklable, and the calling script's main part under ``if
    __name__ == "__main__"``, as always with `multiprocessing`. Each rank has torchrun's variables,
    so `weft.init()` makes a world of them. `threads` is the number of compute threads per rank; by
    default one for each core of a rank's share, which is on one NUMA node if possible. Ranks are
    bound to their shares if the cores divide evenly, unless `bind` is false. If a rank fails the
    others are stopped, and `RuntimeError` names the first failed rank and its error. Ctrl-C is a
    `KeyboardInterrupt` once all have stopped. Raises `TypeError` if `fn` cannot take `args`, and
    `WeftError` on one of several ranks that a launcher started: each of them would start ranks of
    its own.

    Examples:
        >>> import math
        >>> weft.launch(math.factorial, 2, 5)  # factorial(5) in two new processes
        [120, 120]
    """
    check_ranks(ranks)
    _check_not_launched(ranks)
    # a rank imports the script that launches it
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(
            'weft.launch: put the main part of the script under  if __name__ == "__main__":',
            file=sys.stderr,
        )
        raise SystemExit(1)
    check_call("weft.launch", fn, args)
    _check_picklable(fn)
    _start_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="weft",
        rdzv_backend=one_agent.BACKEND,
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    try:
        with _quiet():
            results = elastic_launch(config, _rank)(
                threads or threads_per_rank(ranks), bind, fn, *args
            )
    except ChildFailedError as error:
        rank, failure = _first(error)
        raise RuntimeError(
            f"rank {rank} (pid {failure.pid}) {_how(failure)}{_callstack(failure)}"
        ) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    return [results[rank] for rank in range(ranks)]


def _check_not_launched(ranks: int) -> None:
    """Raise `WeftError` on one of several ranks that a launcher started."""
    variables = launcher_variables(os.environ) or {"WORLD_SIZE": "1"}
    if (started := int(variables["WORLD_SIZE"])) > 1:
        raise WeftError(
            f"this process is rank {variables['RANK']} of {started} that a launcher started, and "
            f"each would start {ranks} more: run the script by python, without weft run, torchrun "
            "or mpirun, or call weft.init() in place of weft.launch"
        )


def _start_server() -> None:
    """Start the server of new processes, if there is none, so that Ctrl-C does not reach it: it
    would end its imports with a traceback. Ranks inherit that, until `_rank`.
    """
    multiprocessing.set_forkserver_preload(["torch", "weft.world"])
    resource_tracker.ensure_running()  # which would let Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_picklable(fn: Callable[..., Any]) -> None:
    """Raise `TypeError` unless new processes can import `fn`."""
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"ranks are new processes that import fn, so define it at the top level of a module; "
            f"got {fn!r}: {error}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's launcher: the exception at the end has all there is to report."""
    names = [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))
    ]
    levels = {log: log.level for log in map(logging.getLogger, names)}
    for log in levels:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The first rank that failed by itself: others were stopped, or report a lost peer."""

    def blame(failed: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = failed[1]
        return (
            failure.exitcode == -signal.SIGTERM and not _message(failure),
            bool(_LOST.match(_message(failure))),
            failure.timestamp,
        )

    return min(error.failures.items(), key=blame)


def _message(failure: ProcessFailure) -> str:
    """The rank's exception, or "" if it recorded none."""
    return str(failure.message["message"]) if isinstance(failure.message, dict) else ""


def _callstack(failure: ProcessFailure) -> str:
    """The rank's traceback, or "" if it recorded none."""
    return (
        f"\n{failure.message.get('extraInfo', {}).get('py_callstack', '')}"
        if isinstance(failure.message, dict)
        else ""
    )


def _how(failure: ProcessFailure) -> str:
    """A phrase for how a rank ended."""
    if message := _message(failure):
        return f"failed: {message}"
    return survivors.how_ended(failure.exitcode)


def _summary(failure: ProcessFailure) -> str:
    """A phrase for how a rank ended that has printed its own exception."""
    how = _how(failure).partition("\n")[0]
    if (kind := re.match(r"failed: \w+", how)) and len(how) > _LONG:
        return f"{kind[0]}, see above"
    return how


def _rank(threads: int, bind: bool, fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn` in a launched process with its share of threads, and record its exception."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if bind:
        placement.bind(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), threads)
    os.environ[placement.OFF] = "0"  # `weft.init` must not bind again
    torch.set_num_threads(threads)

    def hinted() -> Any:
        try:
            return fn(*args)
        except Exception as error:
            hints.add(error, error.__traceback__)
            raise

    return record(hinted)()


def run(
    ranks: int,
    script: str,
    arguments: Sequence[str],
    bind: bool = True,
    module: bool = False,
    elastic: bool = False,
) -> int:
    """Run a Python script, or a module as ``python -m`` does, on `ranks` local ranks.

    The exit code is 0, or that of the rank that failed first; 128 and the number of the signal if
    one ended it, or this process. `weft.init` binds each rank to its share of the cores, unless
    `bind` is false. If `elastic` a rank that fails does not end the others, and the exit code is 0
    if the rank that ends last does so with 0.
    """
    from torch.distributed import run as torchrun

    if not bind:
        os.environ[placement.OFF] = "0"
    os.environ[reports.ON] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    if elastic:
        start = [sys.executable, *(["-m"] if module else []), script, *arguments]
        return survivors.run(ranks, start)
    try:
        with _quiet():
            command = [
                f"--rdzv-backend={one_agent.BACKEND}",
                "--rdzv-endpoint=localhost:0",  # torch warns without one
                f"--rdzv-id={uuid.uuid4()}",
                f"--nproc-per-node={ranks}",
                *(["--module"] if module else []),
                script,
                *arguments,
            ]
            torchrun.run(torchrun.parse_args(command))
    except ChildFailedError as error:
        rank, failure = _first(error)
        how = _summary(failure)
        print(
            f"weft run: first failure: rank {rank} (pid {failure.pid}) {how}",
            file=sys.stderr,
        )
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (SignalException, KeyboardInterrupt) as error:
        number = signal.Signals(getattr(error, "sigval", signal.SIGINT))
        print(f"weft run: stopped by {number.name}", file=sys.stderr)
        return 128 + number
    return 0
