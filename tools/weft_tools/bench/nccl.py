"""NCCL's channels, each of which takes an SM, and memory that is registered with it, in which its
collectives take fewer of them, or none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from weft.errors import WeftError
from weft.world import World

Made = TypeVar("Made")

MOST = "NCCL_MAX_NCHANNELS"
"""The variable that limits the channels, of RCCL too."""


def channels() -> int | None:
    """The most channels of a call in this process, None where NCCL selects them."""
    limit = os.environ.get(MOST)
    return int(limit) if limit else None


def named(name: str) -> str:
    """The name of a baseline by NCCL in results, with the channels if they are limited."""
    limit = channels()
    return name if limit is None else f"{name}, {limit} channel{'s' if limit > 1 else ''}"


def in_registered_memory(
    world: World, group: dist.ProcessGroup, make: Callable[[], Made], asked: str
) -> Made:
    """What `make` makes, its tensors in symmetric memory of a group of NCCL's; collective. `asked`
    is the option that an error names.
    """
    backend: Any = group._get_backend(world.device)
    backend.eager_connect_single_device(world.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        made = make()
    try:
        backend.register_mem_pool(pool, symm=True)
    except TypeError:
        raise WeftError(
            f"{asked} needs a torch that registers symmetric memory: leave it out"
        ) from None
    world.keepalive.append(pool)
    return made
