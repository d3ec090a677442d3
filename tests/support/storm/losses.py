"""Ranks that are killed, stopped, cut off, wrong, short of something, or gone."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from support.storm.judge import Scene
from support.storm.rank import Part

AFTER = 20  # calls after the fault, which a rank may survive

# Parts of the ranks


def calling(part: Part) -> None:
    """Endless calls, or a few if the fault comes as ranks leave."""
    with part.world() as world:
        for call in part.calls(3 if part.trial.phase == "close" else None):
            call(world)
        part.report("closing")


def calling_on(part: Part) -> None:
    """A fixed number of calls."""
    with part.world() as world:
        for call in part.calls(40):
            call(world)


def but(fault: Callable[[weft.World], Any], after: int | None = None) -> Callable[[Part], None]:
    """Calls, with a fault in place of one call of the victim; then `after` more calls, or endless
    ones.
    """

    def play(part: Part) -> None:
        with part.world() as world:
            for number, call in enumerate(
                part.calls(None if after is None else part.trial.call + after)
            ):
                if part.victim and number == part.trial.call:
                    part.fault()
                    fault(world)
                    if after is None:
                        return
                call(world)

    return play


def raises(world: weft.World) -> None:
    raise ValueError("a storm")


def exits(world: weft.World) -> None:
    os._exit(3)


def leaves(world: weft.World) -> None:
    # a group is left by the end of the block
    if not dist.is_initialized() or dist.get_backend() != "weft":
        world.close()


def mismatches(world: weft.World) -> None:
    weft.all_gather(torch.ones(world.rank + 7, 3, dtype=torch.float64), algorithm="push")


def lacks_memory(world: weft.World) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_bytes_of("self") + (1 << 20), -1))


def lacks_files(world: weft.World) -> None:
    os.close(free := os.dup(0))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def lacks_threads(part: Part) -> None:
    """Calls where no thread can be started any more; if an asynchronous call is refused, the call
    is made synchronously.
    """
    with part.world() as world:
        for number in range(12):
            if part.victim and number == part.trial.call:
                part.fault()
                _large_stacks()
            own = torch.full((5,), float((world.rank + 1) * 10**number))
            total = torch.full((5,), float(sum(range(1, world.ranks + 1)) * 10**number))
            weft.barrier()
            handle = None
            try:
                handle = weft.all_reduce_async(own)
            except weft.WeftError:
                raise
            except (RuntimeError, OSError, MemoryError):
                found = weft.all_reduce(own)
            else:
                found = handle.wait()
            assert torch.equal(found, total), (
                f"the sum is {found.tolist()}, where {total.tolist()} is right"
            )


def _large_stacks() -> None:
    """Let every thread ask for more address space for its stack than there is."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47))
    assert not libc.pthread_setattr_default_np(attributes)


def stopping_amid_copies(part: Part) -> None:
    """All-gathers of large symmetric tensors, which peers read or write in place; after an error
    the input is filled with 777.
    """
    with part.world() as world:
        own, rows = world.empty(1 << 23), world.ranks << 23
        found = world.empty(rows) if part.draw.random() < 0.3 else torch.empty(rows)
        own.fill_(float(world.rank))
        part.report("world")
        try:
            while True:
                weft.all_gather(own, out=found)
                # some elements of each page
                parts = [one[:: 1 << 10] for one in found.chunk(world.ranks)]
                wrong = [rank for rank, one in enumerate(parts) if not bool((one == rank).all())]
                assert not wrong, f"ranks {wrong} sent wrong rows, and there was no error"
        finally:
            own.fill_(777.0)


# Faults that the storm causes


@contextmanager
def killed(scene: Scene) -> Iterator[None]:
    scene.victim.kill(signal.SIGKILL)
    yield


@contextmanager
def stopped(scene: Scene) -> Iterator[None]:
    """A victim that is stopped until all other ranks have ended."""
    scene.victim.kill(signal.SIGSTOP)
    yield
    scene.victim.kill(signal.SIGCONT)


@contextmanager
def paused(scene: Scene) -> Iterator[None]:
    """A victim that is stopped several times, for less than the time limit."""
    for _ in range(3):
        scene.victim.kill(signal.SIGSTOP)
        time.sleep(min(scene.trial.delay, 0.3) + 0.05)
        scene.victim.kill(signal.SIGCONT)
        time.sleep(scene.trial.delay / 10)
    yield


@contextmanager
def cut_off(scene: Scene) -> Iterator[None]:
    assert scene.net is not None
    scene.net.cut_off(1)
    yield
    scene.net.reconnect(1)


@contextmanager
def without_files(scene: Scene) -> Iterator[None]:
    """A victim that can open no further file."""
    with _while_it_lives():
        most = max(map(int, os.listdir(f"/proc/{scene.victim.pid}/fd")))
        resource.prlimit(
            scene.victim.pid,
            resource.RLIMIT_NOFILE,
            (most + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        )
    yield


@contextmanager
def without_memory(scene: Scene) -> Iterator[None]:
    """A victim that can map hardly any further memory."""
    with _while_it_lives():
        resource.prlimit(
            scene.victim.pid, resource.RLIMIT_AS, (_bytes_of(scene.victim.pid) + (1 << 20), -1)
        )
    yield


@contextmanager
def _while_it_lives() -> Iterator[None]:
    try:
        yield
    except (ProcessLookupError, FileNotFoundError):
        return


def _bytes_of(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
