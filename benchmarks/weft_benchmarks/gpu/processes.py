"""torch's own operators on symmetric memory and weft's; ranks are processes here, as torch needs,
and share the time of one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers torch's operators
from torch import Tensor

from weft.ops.all_gather import all_gather
from weft.ops.barrier import barrier
from weft.world import World, init
from weft_benchmarks.gpu import milliseconds


def gathers(
    sizes: Sequence[int], warmup: int, iterations: int
) -> dict[int, dict[str, tuple[list[float], int]]]:
    """All-gathers of `sizes` gathered bytes: of each implementation the milliseconds on this rank,
    and the wrong elements.
    """
    with sharing() as world:
        found = {}
        for size in sizes:
            words = size // world.ranks // 4
            shards = [
                random(world, r, words).mul(2**31).to(torch.int32) for r in range(world.ranks)
            ]
            own = world.empty(words, dtype=torch.int32).copy_(shards[world.rank])
            gathered = world.empty(world.ranks * words, dtype=torch.int32)
            views: dict[str, Callable[[], Tensor]] = {
                "torch, processes": partial(_gathered_by_torch, own, world),
                "copy engine, processes": partial(all_gather, own, out=gathered),
            }
            right, results = torch.cat(shards), timed(views, warmup, iterations)
            found[size] = {
                name: (times, int((view() != right).sum()))
                for name, (times, view) in results.items()
            }
    dist.destroy_process_group()
    return found


def _gathered_by_torch(own: Tensor, world: World) -> Tensor:
    """torch's all-gather; its result is on a stream of torch's own, and waiting for it orders the
    caller's stream after it.
    """
    gathered = torch.ops.symm_mem._low_contention_all_gather(own, group_name(world))
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return waited


def sharing() -> World:
    """A world of processes that share this GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return init(device="cuda", timeout=60)


def group_name(world: World) -> str:
    """The name by which torch's operators find the world's ranks."""
    assert world.group is not None
    name: str = world.group.group_name
    return name


def random(world: World, seed: int, *shape: int) -> Tensor:
    return torch.rand(
        *shape,
        device=world.device,
        generator=torch.Generator(device=world.device).manual_seed(seed),
    )


def timed(
    views: Mapping[str, Callable[[], Tensor]], warmup: int, iterations: int
) -> dict[str, tuple[list[float], Callable[[], Tensor]]]:
    """For each view its times on this rank, one view after the other, and the view."""
    found = {}
    for name, view in views.items():
        barrier()
        found[name] = milliseconds(view, warmup, iterations), view
    return found
