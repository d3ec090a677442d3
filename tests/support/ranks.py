"""Real ranks for tests: processes that may fail or die without taking the others along."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weft
from weft.engines import use_reference
from weft.world import init_by_store

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
    "weft_tools.bench.plots",
    "support.ranks",
]


class Outcome(NamedTuple):
    """A rank's result, or its exception with the traceback; None in its place stands for a rank
    that died.
    """

    result: Any
    error: BaseException | None = None
    trace: str = ""
    printed: str = ""
    """What all ranks wrote to standard output and error."""


def serve(modules: Sequence[str] = ()) -> None:
    """Start the process from which ranks, and processes that weft launches here, are forked; it
    imports `modules` and the modules that every rank needs.
    """
    _context.set_forkserver_preload([*_LOADED, *modules, "support.warm"])
    forkserver.ensure_running()


def collect_less_often() -> None:
    """Exempt existing objects from garbage collection, in this process and its forks, where a
    traversal would copy their pages, and collect rarely while a compiler allocates: collections
    took a tenth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def world() -> contextlib.AbstractContextManager[Any]:
    """The default world, in which ranks run unless a test passes another context."""
    return weft.init(timeout=20)


@contextlib.contextmanager
def group(
    backend: str | None = "weft", timeout: float = 20.0, **options: Any
) -> Iterator[dist.ProcessGroup]:
    """The default process group of torch.distributed, with further options of torch's."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def beside_gloo() -> Iterator[weft.World]:
    """The default world, and the default process group, of gloo, for groups of some ranks."""
    with group("gloo"), weft.init(timeout=20) as made:
        yield made


@contextlib.contextmanager
def stream_world() -> Iterator[weft.World]:
    """The default world of ranks whose plans run as on a GPU: each lane on a thread."""
    with weft.init(timeout=20, streams=True) as made:
        yield made


@contextlib.contextmanager
def reference_world() -> Iterator[weft.World]:
    """The default world of ranks that each execute the plans of all ranks."""
    with weft.init(timeout=20) as made:
        use_reference(made)
        yield made


@contextlib.contextmanager
def shared_store() -> Iterator[tuple[dist.Store, int]]:
    """A store that all ranks reach, for worlds of their own, and the number of this rank."""
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    store = dist.TCPStore(address, int(port), is_master=rank == "0", wait_for_workers=False)
    yield store, int(rank)


_PORTS = 500  # of a process


@functools.cache
def _own_ports() -> tuple[Iterator[int], socket.socket]:
    """Ports below those that the kernel gives to connections, which other processes of tests leave
    alone as long as this one has the socket.
    """
    for first in range(10_000, 30_000, _PORTS):
        mine = socket.socket(socket.AF_UNIX)
        try:
            mine.bind(f"\0weft-test-ports-{first}")
        except OSError:
            mine.close()
        else:
            return itertools.cycle(range(first, first + _PORTS)), mine
    raise RuntimeError("too many processes run tests")


def free_port() -> int:
    """A port for a rendezvous that no other process is likely to take before a rank listens there."""
    ports, _ = _own_ports()
    while True:
        port = next(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def start(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    limit: float = 60.0,
    context: Callable[[], Any] = world,
) -> list[Outcome | None]:
    """Call ``fn(world, *args)`` on `ranks` ranks and return the outcome of each; `context` makes
    the world or process group that a rank passes to `fn`.
    """
    with tempfile.NamedTemporaryFile("r", prefix="weft-test-", errors="replace") as printed:
        outcomes = _start(fn, ranks, args, limit, context, printed.name)
        text = printed.read()
    return [outcome and outcome._replace(printed=text) for outcome in outcomes]


def _start(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    limit: float,
    context: Callable[[], Any],
    printed: str,
) -> list[Outcome | None]:
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _context.Process(
            target=_main,
            args=(fn, context, rank, ranks, port, args, pipes[rank][1], printed),
            daemon=True,
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
    context: Callable[[], Any] = world,
) -> list[Any]:
    """The results of ``fn(world, *args)`` in rank order; the errors of all ranks are raised, since
    one may follow from another.
    """
    outcomes = start(fn, ranks, *args, limit=limit, context=context)
    failures = [
        f"rank {rank} failed:\n{outcome.trace or outcome.error}" if outcome else f"rank {rank} died"
        for rank, outcome in enumerate(outcomes)
        if outcome is None or outcome.error is not None
    ]
    if failures:
        printed = next((f"\nranks printed:\n{each.printed}" for each in outcomes if each), "")
        raise AssertionError("\n".join(failures) + printed)
    return [outcome.result for outcome in outcomes if outcome]


_uses = itertools.count()


@functools.cache
def _common_store() -> dist.Store:
    """The store at the address in the variables of the ranks."""
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    return dist.TCPStore(
        address, int(port), is_master=rank == "0", wait_for_workers=False, multi_tenant=True
    )


def store_of_all() -> dist.Store:
    """A new store, which all ranks reach that have called this as often."""
    return dist.PrefixStore(f"use {next(_uses)}", _common_store())


def another_world(world: weft.World) -> weft.World:
    """A further world of the same ranks, which is not the default."""
    return init_by_store(store_of_all(), world.rank, world.ranks, 20.0)


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, of any shapes, in rank order, by a store, not by what is tested."""
    store, rank, ranks = store_of_all(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # the elements of a view alone, not the tensor that it views
    own = tensor.detach().clone()
    store.set(str(rank), pickle.dumps(own))
    found = [own if peer == rank else pickle.loads(store.get(str(peer))) for peer in range(ranks)]
    # rank 0 has the store: it may not end before all have read
    if rank:
        store.set(f"{rank} has read", b"")
    else:
        store.wait([f"{peer} has read" for peer in range(1, ranks)])
    return found


def meet() -> None:
    """Return once all ranks have called this; a barrier by a store, not by what is tested."""
    everyones(torch.empty(0))


def sockets() -> set[str]:
    """The abstract sockets of weft on this machine."""
    with open("/proc/net/unix") as file:
        return {line.split("@")[1].strip() for line in file if "@weft-" in line}


def named_memory() -> set[str]:
    """The names in /dev/shm, without the semaphores of multiprocessing, which tests that run at the
    same time create and remove.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def none_left(before: set[str]) -> bool:
    """Whether all sockets made since `before` are gone, or go within some seconds, as the sockets
    of concurrent runs do.
    """
    deadline = time.monotonic() + 10
    while sockets() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    return not sockets() - before


def die() -> None:
    """Kill this process at once, without a goodbye to its peers."""
    os.kill(os.getpid(), 9)


def _main(
    fn: Callable[..., Any],
    context: Callable[[], Any],
    rank: int,
    ranks: int,
    port: int,
    args: tuple[Any, ...],
    end: Any,
    printed: str,
) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    torch.set_num_threads(1)
    # torch.manual_seed prepares accelerators, too, which takes milliseconds
    torch.default_generator.manual_seed(rank)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # torch asks for the name of each address that connects, and some name servers lose requests
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    try:
        # the server of new processes ignores modules that it cannot import
        assert "support.warm" in sys.modules, "ranks must start with support.warm imported"
        with context() as world_or_group:
            outcome = Outcome(fn(world_or_group, *args))
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
