"""Baselines: the same work as a user would write it with torch and gloo, or on GPUs NCCL.

A baseline of a fused operator is a call that returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.kernels.methods import on_device
from weft.plan.binding import split
from weft.world import World
from weft_tools.bench.torch_products import computed_in

Group = dist.ProcessGroup | None
"""A process group, or None for the default one."""

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def group_of(backend: str) -> Group:
    """The group of all ranks by ``gloo``, which is the default one, or ``nccl``; collective."""
    return None if backend == "gloo" else dist.new_group(backend=backend)


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    rows: Sequence[int],
    group: Group = None,
    bias: Tensor | None = None,
) -> Callable[[], Tensor]:
    """``dist.all_gather_into_tensor``, then ``torch.mm``, or ``torch.addmm`` with a bias, into
    `out`.

    Shards of different sizes are padded to the largest, since the collective takes equal ones, and
    are multiplied one by one.
    """
    shard = a if min(rows) == max(rows) else a.new_zeros(max(rows), a.shape[1])
    gathered = a.new_empty(max(rows) * len(rows), a.shape[1])
    gather = collective("all_gather", shard, gathered, group=group)
    multiply = products(_parts(gathered, out, rows), b, bias)

    def call() -> Tensor:
        if shard is not a:
            shard[: len(a)].copy_(a)
        gather()
        multiply()
        return out

    return call


def matmul_reduce_scatter(
    a: Tensor, b: Tensor, out: Tensor, group: Group = None
) -> Callable[[], Tensor]:
    """``torch.mm``, then ``dist.reduce_scatter_tensor`` into `out`.

    If rows do not divide evenly, the product is padded, since the collective takes equal shards.
    """
    rows = split(len(a), dist.get_world_size() if dist.is_initialized() else 1)
    product = out.new_zeros(max(rows) * len(rows), b.shape[1])
    shard = out if min(rows) == max(rows) else out.new_empty(max(rows), b.shape[1])
    multiply = products([(own, result) for result, own in _parts(product, a, rows)], b)
    scatter = collective("reduce_scatter", product, shard, group=group)

    def call() -> Tensor:
        multiply()
        scatter()
        if shard is not out:
            out.copy_(shard[: len(out)])
        return out

    return call


def matmul_all_reduce(
    a: Tensor, b: Tensor, out: Tensor, group: Group = None
) -> Callable[[], Tensor]:
    """``torch.mm`` into `out`, then ``dist.all_reduce``."""
    multiply, reduce = products([(a, out)], b), collective("all_reduce", out, out, group=group)

    def call() -> Tensor:
        multiply()
        reduce()
        return out

    return call


def _parts(padded: Tensor, compact: Tensor, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The rows of each shard in a tensor of padded shards and in a compact one; a single pair of
    all rows if shards have equal sizes.
    """
    if min(rows) == max(rows):
        return [(padded, compact)]
    parts = zip(padded.split(max(rows)), compact.split(list(rows)), strict=True)
    return [(part[: len(own)], own) for part, own in parts]


def products(
    pieces: Sequence[tuple[Tensor, Tensor]], b: Tensor, bias: Tensor | None = None
) -> Callable[[], None]:
    """A call that multiplies rows by `b` with ``torch.mm``, or ``torch.addmm`` with a bias, for
    pairs of rows and results. On a CPU operands are converted to the dtype of the results, or to
    float32 if torch has no fast product of that; `b` and the bias only once. A GPU's products do
    so themselves.
    """

    def on_gpu() -> None:
        for rows, result in pieces:
            on_device(rows, b, result, bias)

    if b.is_cuda:
        return on_gpu
    dtype = computed_in(pieces[0][1].dtype)
    wide, added = b.to(dtype), None if bias is None else bias.to(dtype)

    def multiply(rows: Tensor, out: Tensor | None) -> Tensor:
        if added is None:
            return torch.mm(rows.to(dtype), wide, out=out)
        return torch.addmm(added, rows.to(dtype), wide, out=out)

    def call() -> None:
        for rows, result in pieces:
            if result.dtype == dtype:
                multiply(rows, result)
            else:
                result.copy_(multiply(rows, None))

    return call


def symmetric_gather(a: Tensor, world: World) -> Callable[[], Tensor]:
    """torch's all-gather of `a`, which is in symmetric memory; its result is a new tensor, made on
    a stream of torch's own, which the caller's stream waits for.
    """
    import torch.distributed._symmetric_memory  # registers the operator

    group = world.backend.group
    assert group is not None
    gather: Any = torch.ops.symm_mem._low_contention_all_gather

    def call() -> Tensor:
        gathered: Tensor = torch.ops._c10d_functional.wait_tensor(gather(a, group))
        return gathered

    return call


def collective(
    operation: str,
    a: Tensor,
    out: Tensor,
    op: str = "sum",
    group: Group = None,
    background: bool = False,
) -> Callable[..., object]:
    """The call of ``torch.distributed`` for `operation` on a group, from `a` to `out`; broadcasts
    are from rank 0. In the background it returns a work to wait for.

    Without a process group, that is with a single rank, it is a copy.
    """
    if not dist.is_initialized():
        return partial(out.copy_, a)
    how: dict[str, Any] = {"group": group, "async_op": background}
    match operation:
        case "all_gather":  # renamed in torch 2.13, as is reduce_scatter
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return partial(gather, out, a, **how)
        case "reduce_scatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return partial(scatter, out, a, op=_OPS[op], **how)
        case "all_reduce" if a.data_ptr() == out.data_ptr():
            return partial(dist.all_reduce, out, op=_OPS[op], **how)
        case "all_reduce":  # torch.distributed has it only in place
            return lambda: dist.all_reduce(out.copy_(a), op=_OPS[op], **how)
        case "broadcast":
            return partial(dist.broadcast, out, 0, **how)
        case "all_to_all":
            return partial(dist.all_to_all_single, out, a, **how)
        case _:
            raise ValueError(f"torch.distributed has no {operation}")
