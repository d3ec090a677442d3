"""What ranks tell each other about their data for checks, be they processes, by gloo, or threads of
one; not by the operators that are measured.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from weft.bootstrap.shared_store import launched
from weft.launchers.variables import translated
from weft.measure import timing
from weft.measure.timing import TIMEOUT, in_threads
from weft.world import World, registry
from weft.world.registry import of_thread
from weft.world.values import all_gather_values

Own = TypeVar("Own")

_lent = dict[int, Any]()
_numbers = itertools.count()


@contextmanager
def session(threads: int | None, one_host: str = "", **place: Any) -> Iterator[World]:
    """The world of `weft.measure.timing.session`, and of its ranks torch's default process group,
    of gloo, with which weft is compared.
    """
    with _gloo(), timing.session(threads, one_host, **place) as world:
        yield world


@contextmanager
def _gloo() -> Iterator[None]:
    """The default process group of ranks that a launcher started, unless there is one."""
    if of_thread() is not None or dist.is_initialized() or not translated(os.environ):
        yield
        return
    store, rank, ranks = launched(TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("gloo", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    if number_of_ranks() > 1:
        dist.all_reduce(total)
    return total.to(tensor.device)


def number_of_ranks() -> int:
    """The number of ranks that `sum_over_ranks` adds up."""
    world = of_thread() or registry.default
    return 1 if world is None else world.ranks


@contextmanager
def _of_threads(world: World, own: Own) -> Iterator[list[Own]]:
    """The values of all ranks that are threads, none of which continues before all have left the
    context.
    """
    number = next(_numbers)
    _lent[number] = own
    try:
        yield [_lent[each] for each in all_gather_values(world, number, int)]
        all_gather_values(world, number, int)
    finally:
        del _lent[number]


def _complete(tensor: Tensor) -> None:
    """Wait until a tensor is computed, since other threads have other streams."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
