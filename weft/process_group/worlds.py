"""Which world belongs to a process group of torch.distributed, and how calls are made on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from weft.process_group.group import Group
from weft.world import World, init

_beside: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def beside(group: dist.ProcessGroup) -> World:
    """A world of the group's ranks for whoever makes all of their calls in one order, made at its
    first use; collective.
    """
    if group not in _beside or _beside[group].closed:
        _beside[group] = init(group)
    return _beside[group]


def of(group: dist.ProcessGroup) -> World | None:
    """The world that operators on the group are carried out on: its own, or else the one beside it;
    None if there is none.
    """
    world = group.world if isinstance(group, Group) else _beside.get(group)
    return None if world is None or world.closed else world


def in_turn(group: dist.ProcessGroup, call: Callable[[], Any]) -> Any:
    """The result of `call`, which is made on the group's world after all that was issued on the
    group before.
    """
    if not isinstance(group, Group):
        return call()
    made: list[Any] = []
    group.order.now(lambda: made.append(call()))
    return made[0]
