"""The baselines of fused operators by the names that ``--baseline`` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.world import World
from weft_bench import baselines, chunks

LABELS = {
    "gloo": "gloo+torch.mm",
    "gloo-chunks": "gloo-chunks",
    "nccl": "nccl+torch.mm",
    "nccl-chunks": "nccl-chunks",
    "torch": "torch symmetric",
}
"""The names of baselines in results."""

_TORCH = ("all_gather_matmul", "matmul_reduce_scatter")


def refusal(name: str, operator: str, m: int, ranks: int) -> str:
    """Why this baseline does not have this operator with `m` rows; "" if it does."""
    if name == "torch" and operator not in _TORCH:
        return f"torch has no fused operator for {operator.replace('_', '-')}"
    if name not in ("gloo", "nccl") and m % ranks:
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
    """The call of a baseline, which returns its result: `out`, or of torch's own operators a new
    tensor; collective. `rows` are those of each rank's shard. Products of gathered rows add the
    bias; to sums, and to the results of torch's own operators, it is added at the end.
    """
    if name != "torch" and operator == "all_gather_matmul":
        group, chunked = baselines.group_of(name.partition("-")[0]), "-" in name
        if chunked:
            return chunks.all_gather_matmul(a, b, out, world.ranks, group, bias)
        return baselines.all_gather_matmul(a, b, out, rows, group, bias)
    call = _without_bias(name, operator, a, b, out, world)
    return call if bias is None else lambda: call().add_(bias)


def _without_bias(
    name: str, operator: str, a: Tensor, b: Tensor, out: Tensor, world: World
) -> Callable[[], Tensor]:
    if name == "torch":
        return _by_torch(operator, a, b, world)
    backend, _, chunked = name.partition("-")
    group = baselines.group_of(backend)
    if chunked:
        return getattr(chunks, operator)(a, b, out, world.ranks, group)  # type: ignore[no-any-return]
    return getattr(baselines, operator)(a, b, out, group)  # type: ignore[no-any-return]


def _by_torch(operator: str, a: Tensor, b: Tensor, world: World) -> Callable[[], Tensor]:
    """torch's own fused operator on symmetric memory."""
    import torch.distributed._symmetric_memory  # registers the operators

    assert world.group is not None
    fused: Any = torch.ops.symm_mem
    group: str = world.group.group_name
    if operator == "all_gather_matmul":
        return lambda: fused.fused_all_gather_matmul(a, [b], 0, group)[1][0]
    return lambda: fused.fused_matmul_reduce_scatter(a, b, "sum", 0, group)
