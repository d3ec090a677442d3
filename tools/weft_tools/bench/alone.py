"""The baseline of one process: rank 0 with the cores and threads of all ranks, while the others
sleep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from weft.host import placement
from weft.world import World

ALONE = "one process"


@contextmanager
def all_cores(world: World) -> Iterator[None]:
    """Give rank 0 the cores and threads of all ranks, and the other ranks nothing, during the
    ``with`` block. The additional threads sleep at the end.
    """
    if world.rank:
        yield
        return
    threads, own = torch.get_num_threads(), os.sched_getaffinity(0)
    placement.bind_threads(frozenset[int]().union(*world.cores))
    torch.set_num_threads(threads * world.ranks)
    # starts the threads before the timed calls
    torch.zeros(threads * world.ranks << 15, device="cpu").add_(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        placement.bind_threads(own)
        _wait_for_idle_threads()


def of_all_ranks(tensor: Tensor, dim: int) -> Tensor:
    """The tensors of all ranks, of one shape, concatenated along `dim`; collective over the default
    process group.
    """
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim)


def _wait_for_idle_threads() -> None:
    """Wait until this process's other threads sleep: OpenMP's threads poll for work for some
    milliseconds after their last task.
    """
    while True:
        before = process_time()
        sleep(1e-3)
        if process_time() - before < 5e-4:
            return
