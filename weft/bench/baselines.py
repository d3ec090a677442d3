"""Baselines: the same work as a user would write it with torch and gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.plan.binding import split

GLOO = "gloo+torch.mm"

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def gloo_all_gather_matmul(
    a: Tensor, b: Tensor, out: Tensor, rows: Sequence[int]
) -> Callable[[], None]:
    """``dist.all_gather_into_tensor`` on gloo, then ``torch.mm`` into `out`.

    Shards of different sizes are padded to the largest, since the collective takes equal ones, and
    are multiplied one by one.
    """
    shard = a if min(rows) == max(rows) else a.new_zeros(max(rows), a.shape[1])
    gathered = a.new_empty(max(rows) * len(rows), a.shape[1])
    gather = gloo_collective("all_gather", shard, gathered, "sum")
    multiply = products(_parts(gathered, out, rows), b)

    def call() -> None:
        if shard is not a:
            shard[: len(a)].copy_(a)
        gather()
        multiply()

    return call


def gloo_matmul_reduce_scatter(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], None]:
    """``torch.mm``, then ``dist.reduce_scatter_tensor`` on gloo into `out`.

    If rows do not divide evenly, the product is padded, since the collective takes equal shards.
    """
    rows = split(len(a), dist.get_world_size() if dist.is_initialized() else 1)
    product = out.new_zeros(max(rows) * len(rows), b.shape[1])
    shard = out if min(rows) == max(rows) else out.new_empty(max(rows), b.shape[1])
    multiply = products([(own, result) for result, own in _parts(product, a, rows)], b)
    scatter = gloo_collective("reduce_scatter", product, shard, "sum")

    def call() -> None:
        multiply()
        scatter()
        if shard is not out:
            out.copy_(shard[: len(out)])

    return call


def gloo_matmul_all_reduce(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], None]:
    """``torch.mm`` into `out`, then ``dist.all_reduce`` on gloo."""
    multiply, reduce = products([(a, out)], b), gloo_collective("all_reduce", out, out, "sum")

    def call() -> None:
        multiply()
        reduce()

    return call


def _parts(padded: Tensor, compact: Tensor, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The rows of each shard in a tensor of padded shards and in a compact one; a single pair of
    all rows if shards have equal sizes.
    """
    if min(rows) == max(rows):
        return [(padded, compact)]
    parts = zip(padded.split(max(rows)), compact.split(list(rows)), strict=True)
    return [(part[: len(own)], own) for part, own in parts]


def products(pieces: Sequence[tuple[Tensor, Tensor]], b: Tensor) -> Callable[[], None]:
    """A call that multiplies rows by `b` with ``torch.mm``, for pairs of rows and results. Operands
    are converted to the dtype of the results, `b` only once.
    """
    wide = b.to(pieces[0][1].dtype)

    def call() -> None:
        for rows, result in pieces:
            torch.mm(rows.to(result.dtype), wide, out=result)

    return call


def gloo_collective(operation: str, a: Tensor, out: Tensor, op: str) -> Callable[..., object]:
    """The call of ``torch.distributed`` for `operation` on gloo, from `a` to `out`; broadcasts are
    from rank 0.

    Without a process group, that is with a single rank, it is a copy.
    """
    if not dist.is_initialized():
        return partial(out.copy_, a)
    match operation:
        case "all_gather":  # renamed in torch 2.13, as is reduce_scatter
            return partial(
                getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor, out, a
            )
        case "reduce_scatter":
            return partial(
                getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
                out,
                a,
                op=_OPS[op],
            )
        case "all_reduce" if a.data_ptr() == out.data_ptr():
            return partial(dist.all_reduce, out, op=_OPS[op])
        case "all_reduce":  # torch.distributed has it only in place
            return lambda: dist.all_reduce(out.copy_(a), op=_OPS[op])
        case "broadcast":
            return partial(dist.broadcast, out, 0)
        case "all_to_all":
            return partial(dist.all_to_all_single, out, a)
        case _:
            raise ValueError(f"gloo is no baseline of {operation}")
