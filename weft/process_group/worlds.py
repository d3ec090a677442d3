"""The world of a process group of torch.distributed, and calls on it in the group's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.process_group.group import Group
from weft.world import World, init

_made: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def make(group: dist.ProcessGroup) -> World:
    """A world of the group's ranks in addition to the group's own, made at the first call;
    collective. The caller makes all calls on it in one order.
    """
    if group not in _made or _made[group].closed:
        _made[group] = init(group)
    return _made[group]


def find(group: dist.ProcessGroup) -> World | None:
    """The world for operators on the group: its own, or else the one that `make` made; None without
    either.
    """
    world = group.world if isinstance(group, Group) else _made.get(group)
    return None if world is None or world.closed else world


def run_in_order(group: dist.ProcessGroup, call: Callable[[], Any]) -> Any:
    """The result of `call`, made on the group's world after all earlier operations of the group."""
    if not isinstance(group, Group):
        return call()
    made: list[Any] = []
    group.queue.run(lambda: made.append(call()))
    return made[0]
