"""Real ranks for tests: processes that may fail or die without taking the others along."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weft
from weft.world import default_here, init_by_store

_context = multiprocessing.get_context("forkserver")
_COMPILER = [
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
]
_LIBRARIES = [
    *_COMPILER,
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.serialization",
    "pytest",
    "hypothesis",
]
_LOADED = [
    *_LIBRARIES,
    "weft.ops",
    "weft.nn",
    "weft.compiler",
    "weft.cli",
    "weft.bench.plots",
    "support.ranks",
]


class Outcome(NamedTuple):
    """What became of a rank: its result, or its exception with the traceback; None stands for a
    rank that died.
    """

    result: Any
    error: BaseException | None = None
    trace: str = ""


def serve(modules: Sequence[str] = ()) -> None:
    """Start the process that ranks, and those that weft launches here, are forked from: it imports
    `modules` and what all need.
    """
    _context.set_forkserver_preload([*_LOADED, *modules, "support.warm"])
    forkserver.ensure_running()


def look_through_less() -> None:
    """Leave to Python's collector what is new alone, in this process and its forks, which would
    copy the rest by looking through it; and that not again and again while a compiler makes it:
    which took a tenth of the suite.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def world() -> contextlib.AbstractContextManager[Any]:
    """What ranks are given unless a test wants another thing: the default world."""
    return weft.init(timeout=20)


@contextlib.contextmanager
def group(backend: str = "weft", timeout: float = 20.0) -> Iterator[dist.ProcessGroup]:
    """The default process group of torch.distributed."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def stream_world() -> Iterator[weft.World]:
    """The default world of ranks whose plans run as on a GPU: each lane on a thread."""
    with group("gloo"):
        store = dist.PrefixStore("streams", dist.distributed_c10d._get_default_store())
        ranks = dist.get_rank(), dist.get_world_size()
        with init_by_store(store, *ranks, timeout=20, streams=True) as made:
            default_here(made)
            yield made


def start(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    limit: float = 60.0,
    given: Callable[[], Any] = world,
) -> list[Outcome | None]:
    """Call ``fn(world, *args)`` on `ranks` ranks, each with what is `given` there, and return what
    became of each.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [_context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _context.Process(
            target=_main, args=(fn, given, rank, ranks, port, args, pipes[rank][1]), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    deadline = time.monotonic() + limit
    outcomes: list[Outcome | None] = []
    for end, _ in pipes:
        outcome = None
        with contextlib.suppress(EOFError):
            if end.poll(max(0.0, deadline - time.monotonic())):
                outcome = pickle.loads(end.recv_bytes())
            else:
                outcome = Outcome(None, AssertionError("this rank hangs"))
        outcomes.append(outcome)
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


def on_ranks(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    limit: float = 60.0,
    given: Callable[[], Any] = world,
) -> list[Any]:
    """The results of ``fn(world, *args)`` in rank order; the first error is raised."""
    outcomes = start(fn, ranks, *args, limit=limit, given=given)
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} died"
        if outcome.error is not None:
            raise AssertionError(f"rank {rank} failed:\n{outcome.trace}") from outcome.error
    return [outcome.result for outcome in outcomes if outcome]


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, of any shapes, in rank order, by way of torch."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        found, tensor.detach().clone()
    )  # a view alone, not all that it is a view of
    return found


def sockets() -> set[str]:
    """The abstract sockets of weft on this machine."""
    with open("/proc/net/unix") as file:
        return {line.split("@")[1].strip() for line in file if "@weft-" in line}


def named_memory() -> set[str]:
    """The names in /dev/shm, but for the semaphores of multiprocessing: tests that run beside this
    one come and go with theirs.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def none_left(before: set[str]) -> bool:
    """Whether all sockets made since `before` are gone, or go within some seconds, as those of
    other runs beside this one do.
    """
    deadline = time.monotonic() + 10
    while sockets() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    return not sockets() - before


def die() -> None:
    """End this process at once, without any farewell."""
    os.kill(os.getpid(), 9)


def _main(
    fn: Callable[..., Any],
    given: Callable[[], Any],
    rank: int,
    ranks: int,
    port: int,
    args: tuple[Any, ...],
    end: Any,
) -> None:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(
        rank
    )  # torch.manual_seed prepares accelerators, too, which takes milliseconds
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with given() as found:
            outcome = Outcome(fn(found, *args))
    except BaseException as error:
        outcome = Outcome(None, error, traceback.format_exc())
    end.send_bytes(_pickled(outcome))
    end.close()


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception:  # pytest's own exceptions cannot be pickled
        return pickle.dumps(
            Outcome(
                None,
                AssertionError(f"{type(outcome.error).__name__}: {outcome.error}"),
                outcome.trace,
            )
        )
