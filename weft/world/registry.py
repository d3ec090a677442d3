"""The worlds of this process: all that are alive, its default, and those of its threads."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

import weft._native as _native
import weft.log

if TYPE_CHECKING:
    from weft.world.world import World

default: World | None = None
alive: weakref.WeakValueDictionary[int, World] = weakref.WeakValueDictionary()  # by number


class _Thread(threading.local):
    """State of a thread: its default world, if the thread is a rank."""

    world: World | None = None


_thread = _Thread()


def make_default(world: World) -> None:
    """Make `world` the default of this process."""
    global default
    default = world
    _native.set_default_world(world, of_thread=False)


def default_here(world: World) -> None:
    """Make `world` the default of this thread."""
    _thread.world = world
    _native.set_default_world(world, of_thread=True)


def of_thread() -> World | None:
    """The world of which this thread is a rank, None if it is no thread of a local world."""
    return _thread.world


def by_number(number: int) -> World | None:
    """The world with this number in this process, or None if it no longer exists."""
    return default if default is not None and default.number == number else alive.get(number)


def _rank_here() -> int | None:
    """The rank of this thread in its job, for the log."""
    if _thread.world is not None:
        return _thread.world.rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    world = default or next(iter(alive.values()), None)
    return None if world is None else world.rank


weft.log.rank_here = _rank_here


@atexit.register
def _leave_all() -> None:
    for world in list(alive.values()):
        world.close()


def _disown_all() -> None:
    for world in list(alive.values()):
        world.disown()


os.register_at_fork(after_in_child=_disown_all)
