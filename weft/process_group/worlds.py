"""The operations and the world of a process group of torch.distributed, and calls on it in the
group's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from weft.process_group import compiled
from weft.process_group.operations import Operations
from weft.world import World, init

_made: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()
_backends: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
_CPU = torch.device("cpu")


def operations_of(group: object) -> Operations | None:
    """The operations of a process group of torch.distributed; None of one that is not weft's."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    if group not in _backends:
        _backends[group] = _backend(group)
    backend = _backends[group]
    # asked again at each call, since a group may be reconfigured
    found: Operations | None = backend and compiled.backend().operations_of(backend)
    return found


def _backend(group: dist.ProcessGroup) -> Any:
    """The group's backend if that is weft's."""
    if _CPU not in group._device_types or group._get_backend(_CPU).name() != "weft":
        return None
    backend: Any = group._get_backend(_CPU)
    # that of TORCH_DISTRIBUTED_DEBUG=DETAIL contains another
    return getattr(backend, "wrapped_pg", backend)


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
    own = operations_of(group)
    world = _made.get(group) if own is None else own.world
    return None if world is None or world.closed else world


def run_in_order(group: dist.ProcessGroup, call: Callable[[], Any]) -> Any:
    """The result of `call`, made on the group's world after all earlier operations of the group."""
    own = operations_of(group)
    if own is None:
        return call()
    made: list[Any] = []
    own.queue.run(lambda: made.append(call()))
    return made[0]
