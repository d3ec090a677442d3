"""Matmul + all-reduce as an operator: ``sum over ranks of a @ b`` on every rank, added up while
products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import Weight, rows_multiple
from weft.ops import arguments, autograd, conjugates, dims, prologue
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Gradient, Gradients, Pattern, Recorded
from weft.ops.options import Operands, workload
from weft.ops.partial_sums import (
    ADDED_ROWS,
    SumCall,
    bias_gradients,
    check_sum,
    exchange_of_sum,
    save_factors,
    summed_products,
)
from weft.ops.records import MatmulAllReduce
from weft.plan.binding import split
from weft.schedules import matmul_all_reduce as schedule
from weft.schedules.workload import Request, Variant
from weft.world import World


def matmul_all_reduce(
    a: Tensor,
    b: Weight,
    *,
    op: str = "sum",
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply `a` by this rank's `b` and sum over all ranks, collectively; the results of all
    ranks are bitwise equal.

    The result is that of `torch.matmul` followed by `torch.distributed.all_reduce` (plus `bias`).
    Sums are computed as by `matmul_reduce_scatter` with equal shares of the rows: in rank order, in
    float32 (float64 for float64), rounded once, by every algorithm; for several hosts see
    `matmul_reduce_scatter`.

    Gradients follow Megatron's convention, not that of `torch.distributed.nn` and torch's
    functional collectives: all ranks are assumed to compute the same loss from the result, so its
    gradient is already complete on each rank, and the gradients of a, b and bias need no
    communication. They equal those of the same layer on one rank. (Torch sums the gradients of all
    ranks, with one loss each, so its gradients are larger by a factor of the number of ranks.)

    Arguments and errors are those of `matmul_reduce_scatter`, except:

    Args:
        out: contiguous (…, N), not overlapping an input. A push puts peers' sums where a symmetric
            `out` is, the same tensor on all ranks, and else copies them there.
        algorithm: ``one_shot`` (every rank adds up all products in place), ``two_shot`` (every rank
            adds up a part and copies the others), ``push`` (products and sums are put while others
            are computed), ``put`` (two_shot, with products computed in the memory of the rank that
            adds them up), ``ring`` (sums pass from rank to rank), ``sequential`` (one product, then
            the sums) or ``auto``; `explain` names the selection of auto.

    Returns:
        (…, N) of `out_dtype`.

    Examples:
        >>> def all_rows_of_the_sum():
        ...     return weft.matmul_all_reduce(torch.ones(2, 4), torch.ones(4, 3))
        >>> with weft.local_world(2) as local:
        ...     local.run(all_rows_of_the_sum)[0]
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
    """
    options = op, out_dtype, algorithm, chunk_rows, False
    made, _ = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout, (scale_a, scale_b))
    return made[0]


def check(world: World, operands: Operands, options: MatmulAllReduce) -> FusedCall:
    """A checked call, which computes the sum."""
    out_dtype = check_sum(world, operands, options)
    a, (b,), (bias,), (out,) = operands
    result = arguments.result(out, (*a.shape[:-1], b.shape[1]), out_dtype, (a, b, bias), world)
    return _ReduceCall(world, options, operands, result)


class _ReduceCall(SumCall):
    """Each rank adds up a share of the rows, or all."""

    def __init__(
        self, world: World, options: MatmulAllReduce, operands: Operands, result: Tensor
    ) -> None:
        a, (b,), (bias,), _ = operands
        self.result, x = result, dims.to_front(a, 0)
        rows = x.shape[0]
        sums = workload(
            "matmul_all_reduce",
            tuple(split(rows, world.ranks, rows_multiple([b]))),
            operands,
            result.dtype,
        )
        super().__init__(world, options, sums, x, b, result.view(rows, b.shape[1]), bias)

    def request(self, variant: Variant) -> Request:
        request = super().request(variant)
        pushed = variant.algorithm == "push" and self.world.is_symmetric(self.tensors["out"])
        return request._replace(symmetric_out=pushed)

    def overlapped(self) -> tuple[str, str]:
        world = self.world
        if world.hosts.several:
            return (
                "two_shot",
                "each rank adds up a part of the rows, for which each host sends it one sum",
            )
        if world.emulated_link:
            return (
                "push",
                "the emulated link is slower than memory, so products and sums are moved while "
                "others are computed",
            )
        if world.stream_ordered:
            return "push", "a stream moves products and sums while others are computed"
        if world.ranks == 2:
            return (
                "one_shot",
                "for two ranks adding everything costs no more than adding half and copying half",
            )
        return (
            "two_shot",
            "each rank adds up a part, so the work does not grow with the number of ranks",
        )

    def chunk_rows(self, algorithm: str) -> int:
        rows = sum(self.workload.rows)
        if algorithm == "put":
            return rows
        if algorithm == "push":
            return self.piece(max(self.workload.rows), self.pieces)
        if self.world.emulated_link or self.world.hosts.several:
            return self.piece(rows, 2 * self.pieces)
        # One_shot waits for all peers once per piece; with few and large pieces an occasional delay
        # of a rank costs nothing.
        return min(rows, ADDED_ROWS[self.workload.packed and algorithm == "two_shot"])


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank: the sum of all ranks' products."""
    return [summed_products(inputs, weights)] * len(inputs)


def _fake(call: Recorded) -> list[Tensor]:
    a, (b,), _, options, _, _ = call
    return [a.new_empty(*a.shape[:-1], b.shape[1], dtype=options.out_dtype or a.dtype)]


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """dy is complete on every rank: da = dy @ b^T and db = a^T @ dy without communication."""
    a, b = ctx.saved_tensors
    (grad,) = grads
    assert grad is not None
    wide = autograd.rows(grad)
    dy = conjugates.copy_to_ranks(wide.to(a.dtype), ctx.world)
    dy = dy / ctx.divisor if ctx.divisor > 1 else dy
    da = torch.ops.weft.product(dy, b.t()).view(a.shape) if ctx.for_a else None
    db = autograd.weight_gradient(autograd.rows(a), dy) if ctx.for_b else None
    return da, [db], bias_gradients(ctx, wide.sum(0))


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    MatmulAllReduce,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(save_factors, _backward),
    pattern=Pattern("all_reduce", "before", exchange_of_sum),
)
