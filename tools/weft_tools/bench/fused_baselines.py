"""The baselines of fused operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.world import World
from weft_tools.bench import baselines, chunks, nccl
from weft_tools.bench.systems import SYSTEMS

_TORCH = ("all_gather_matmul", "matmul_reduce_scatter")


def rejection(name: str, operator: str, m: int, ranks: int) -> str:
    """Why this baseline does not have this operator with `m` rows; "" if it does."""
    if name == "torch" and operator not in _TORCH:
        return f"torch has no fused operator for {operator.replace('_', '-')}"
    system = SYSTEMS[name]
    if system.registered and operator != "matmul_all_reduce":
        return f"{name} reduces results in registered memory: use it with matmul-all-reduce"
    if (system.in_chunks or not system.backend) and m % ranks:
        return f"{name} takes equal shards, and {m} rows are not a multiple of {ranks} ranks"
    return ""


def call_of(
    name: str,
    operator: str,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Sequence[int],
    world: World,
    bias: Tensor | None = None,
) -> Callable[[], Tensor]:
    """The call of a baseline, which returns its result: `out`, or of torch's own operators and in
    registered memory another tensor; collective. `rows` are those of each rank's shard. Products of
    gathered rows add the bias; to sums, and to the results of torch's own operators, it is added at
    the end.
    """
    system = SYSTEMS[name]
    if not system.backend:
        return _plus(bias, _by_torch(operator, a, b, world))
    group = baselines.group_of(system.backend)
    if system.registered:
        assert group is not None, "a group of NCCL's"
        make = partial(torch.empty_like, out)
        out = nccl.in_registered_memory(world, group, make, f"--baseline {name}")
    match operator, system.in_chunks:
        case "all_gather_matmul", False:
            return baselines.all_gather_matmul(a, b, out, rows, group, bias)
        case "all_gather_matmul", True:
            return chunks.all_gather_matmul(a, b, out, world.ranks, group, bias)
        case "matmul_reduce_scatter", False:
            return _plus(bias, baselines.matmul_reduce_scatter(a, b, out, group))
        case "matmul_reduce_scatter", True:
            return _plus(bias, chunks.matmul_reduce_scatter(a, b, out, world.ranks, group))
        case "matmul_all_reduce", False:
            return _plus(bias, baselines.matmul_all_reduce(a, b, out, group))
        case "matmul_all_reduce", True:
            return _plus(bias, chunks.matmul_all_reduce(a, b, out, group))
        case _:
            raise ValueError(f"there is no baseline of {operator}")


def _plus(bias: Tensor | None, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A call that adds the bias to the result of another."""
    return call if bias is None else lambda: call().add_(bias)


def _by_torch(operator: str, a: Tensor, b: Tensor, world: World) -> Callable[[], Tensor]:
    """torch's own fused operator on symmetric memory."""
    import torch.distributed._symmetric_memory  # registers the operators

    group = world.backend.group
    assert group is not None
    fused: Any = torch.ops.symm_mem
    if operator == "all_gather_matmul":
        # without the gathered rows, so that it may multicast few rows (torch: up to 2,048)
        return lambda: fused.fused_all_gather_matmul(a, [b], 0, group, return_A=False)[1][0]
    return lambda: fused.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
