"""torch's own operators on symmetric memory beside weft's; ranks are processes here, as torch needs, and take turns on one GPU."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # its operators
from torch import Tensor

from weft.bench.gpu import milliseconds
from weft.ops.all_gather import all_gather
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.barrier import barrier
from weft.world import World, init


def gathers(sizes: Sequence[int], warmup: int, iterations: int) -> dict[int, dict[str, tuple[list[float], int]]]:
    """All-gathers of `sizes` bytes gathered: of each implementation the milliseconds on this rank, and the wrong elements."""
    with _sharing() as world:
        found = {}
        for size in sizes:
            words = size // world.ranks // 4
            shards = [_random(world, r, words).mul(2**31).to(torch.int32) for r in range(world.ranks)]
            own = world.empty(words, dtype=torch.int32).copy_(shards[world.rank])
            gathered = world.empty(world.ranks * words, dtype=torch.int32)
            views: dict[str, Callable[[], Tensor]] = {
                "torch, processes": lambda own=own: _gathered_by_torch(own, world),  # type: ignore[misc]
                "copy engine, processes": lambda own=own, gathered=gathered: all_gather(own, out=gathered),  # type: ignore[misc]
            }
            right = torch.cat(shards)
            found[size] = {
                name: (times, int((result() != right).sum())) for name, (times, result) in _timed(views, warmup, iterations).items()
            }
    dist.destroy_process_group()
    return found


def fused(m: int, k: int, n: int, dtype: torch.dtype, warmup: int, iterations: int) -> dict[str, float]:
    """Median milliseconds of the slowest rank for (m, k) gathered @ (k, n / ranks). A wrong result is an `AssertionError`."""
    with _sharing() as world:
        a = world.empty(m // world.ranks, k, dtype=dtype).copy_(_random(world, world.rank, m // world.ranks, k))
        b = (_random(world, world.ranks + world.rank, k, n // world.ranks) / k**0.5).to(dtype)
        out = torch.empty(m, n // world.ranks, dtype=dtype, device=world.device)

        def weft(algorithm: str) -> Tensor:
            all_gather_matmul(a, b, out=out, algorithm=algorithm)
            return out

        by_torch = torch.ops.symm_mem.fused_all_gather_matmul
        views: dict[str, Callable[[], Tensor]] = {
            "torch fused_all_gather_matmul": lambda: by_torch(a, [b], 0, _name(world), return_A=False)[1][0],
            "weft pull": lambda: weft("pull"),
            "weft direct": lambda: weft("direct"),
            "sequential": lambda: torch.mm(all_gather(a), b, out=out),
        }
        timed = _timed(views, warmup, iterations)
        right = all_gather(a).float() @ b.float()
        every: list[dict[str, list[float]]] = [{}] * world.ranks
        for _, result in timed.values():
            torch.testing.assert_close(result().float(), right, rtol=2e-2, atol=2e-2)
        dist.all_gather_object(every, {name: times for name, (times, _) in timed.items()})
    dist.destroy_process_group()
    return {name: statistics.median(map(max, zip(*(times[name] for times in every), strict=True))) for name in views}


def _gathered_by_torch(own: Tensor, world: World) -> Tensor:
    """It works on a stream of torch's own, which the caller's only follows when it waits for the tensor."""
    gathered = torch.ops.symm_mem._low_contention_all_gather(own, _name(world))
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return waited


def _sharing() -> World:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return init(device="cuda", timeout=60)


def _name(world: World) -> str:
    assert world.group is not None
    name: str = world.group.group_name
    return name


def _random(world: World, seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, device=world.device, generator=torch.Generator(device=world.device).manual_seed(seed))


def _timed(
    views: Mapping[str, Callable[[], Tensor]], warmup: int, iterations: int
) -> dict[str, tuple[list[float], Callable[[], Tensor]]]:
    """Of each view its times on this rank, taken one view after the other, and the view."""
    found = {}
    for name, view in views.items():
        barrier()
        found[name] = milliseconds(view, warmup, iterations), view
    return found
