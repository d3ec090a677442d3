"""What ranks tell each other about their data for checks, be they processes or threads of one; not
by the operators that are measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from weft.measure.timing import in_threads, of_threads
from weft.world import World
from weft.world.registry import of_thread

Own = TypeVar("Own")

_lent = dict[int, Any]()
_numbers = itertools.count()


def everyones(world: World, own: Own) -> list[Own]:
    """The values of all ranks, in rank order; collective. Ranks that are threads share the values
    themselves.
    """
    if in_threads(world):
        with _of_threads(world, own) as every:
            return every
    every = [own] * world.ranks
    if world.ranks > 1:
        dist.all_gather_object(every, own)
    return every


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over ranks: of processes by ``torch.distributed`` on the CPU, of threads on the
    tensors' device; collective.
    """
    world = of_thread()
    if world is not None and in_threads(world):
        _complete(tensor)
        with _of_threads(world, tensor) as every:
            total = every[0].clone()
            for other in every[1:]:
                total += other
            _complete(total)
        return total
    total = tensor.to("cpu", copy=True)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.to(tensor.device)


def number_of_ranks() -> int:
    """The number of ranks that `sum_over_ranks` adds up."""
    if world := of_thread():
        return world.ranks
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def _of_threads(world: World, own: Own) -> Iterator[list[Own]]:
    """The values of all ranks that are threads, none of which goes on before all have left the
    context.
    """
    number = next(_numbers)
    _lent[number] = own
    try:
        numbers = of_threads(world, torch.tensor([number], device="cpu"))
        yield [_lent[each] for each in numbers[:, 0].tolist()]
        of_threads(world, torch.zeros(1, device="cpu"))
    finally:
        del _lent[number]


def _complete(tensor: Tensor) -> None:
    """Wait until a tensor is computed, since other threads have other streams."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
