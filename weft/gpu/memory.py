"""Symmetric memory on GPUs: between processes torch's own, within a process plain tensors that all
ranks can access.

A segment is one allocation, with every rank's part as a tensor. It lives as long as its world.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import weft._native as _native
from weft.bootstrap.rendezvous import StoreRendezvous
from weft.checks import name as dtype_name
from weft.world import World, memory

_parts: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Parts of the ranks of this process, by address."""


def allocate(
    world: World, shape: Sequence[int], dtype: torch.dtype, call: str | None = None
) -> torch.Tensor:
    """A tensor of zeros in a new segment on the world's device, see `World.empty`; `call` is the
    name of the call in errors.
    """
    size = math.prod(shape) * dtype.itemsize
    call = call or f"empty({tuple(shape)}, {dtype_name(dtype)})"
    compiled = _native.Compiled(call, 0, [], world.ranks)
    world.executor.begin(compiled, world.timeout)
    parts = (
        _in_this_process(world, size, compiled, call)
        if world.backend.group is None
        else _between_processes(world, size)
    )
    world.executor.end(compiled)
    segment = memory.DeviceSegment(parts, world.number, world.executor.calls)
    world.keepalive.append(segment)
    memory.segments[segment.base(world.rank)] = segment
    memory.on_devices[segment.base(world.rank)] = segment
    return parts[world.rank][:size].view(dtype).view(tuple(shape))


def _in_this_process(
    world: World, size: int, compiled: _native.Compiled, call: str
) -> list[torch.Tensor]:
    own = torch.zeros(max(size, 1), dtype=torch.uint8, device=world.device)
    drain(world.device)  # zeros are written before any peer gets the address
    _parts[own.data_ptr()] = own
    parts = [own] * world.ranks
    for peer, address, _ in memory.exchange(world, compiled, call, str(own.data_ptr())):
        parts[peer] = _parts[int(address)]
    return parts


def _between_processes(world: World, size: int) -> list[torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _SymmetricMemory

    group: Any = world.backend.group
    # A separate allocation: torch's `empty` takes part of a pooled block, and the buffers that
    # peers get are of the whole block.
    make: Any = _SymmetricMemory.empty_strided_p2p
    own: torch.Tensor = make((max(size, 1),), (1,), torch.uint8, world.device).zero_()
    drain(world.device)
    handle: Any = symmetric_memory.rendezvous(own, group)
    return [
        own if rank == world.rank else handle.get_buffer(rank, own.shape, own.dtype)
        for rank in range(world.ranks)
    ]


def named_group(meeting: StoreRendezvous) -> tuple[str, dist.ProcessGroup]:
    """A process group of ranks that meet, and the name by which torch finds it as long as it is
    kept. It has a store and no backend: symmetric memory needs no more.
    """
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    first = meeting.store.compare_set("name of the group", "", uuid4().hex)
    name: Any = f"weft {first.decode()}"
    store = PrefixStore("symmetric memory", meeting.store)
    group = dist.ProcessGroup(store, meeting.rank, meeting.ranks)
    _register_process_group(name, group)
    # as torch does at the first use of one of its groups
    _SymmetricMemory.set_group_info(name, meeting.rank, meeting.ranks, store)
    symmetric_memory._group_name_to_store[name] = store
    return name, group


def drain(device: torch.device) -> None:
    """Wait for the current stream only: other streams may hold kernels that wait for this rank."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
