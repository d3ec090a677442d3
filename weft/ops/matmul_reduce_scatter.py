"""Matmul + reduce-scatter as an operator: this rank's part of ``sum over ranks of a @ b``, added up
while products are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import Weight, as_tensor
from weft.ops import arguments, autograd, dims, prologue
from weft.ops.fused import FusedCall
from weft.ops.operator import FusedOperator, Gradient, Gradients, Pattern, Recorded
from weft.ops.options import Operands, workload
from weft.ops.partial_sums import (
    ADDED_ROWS,
    SumCall,
    accumulator,
    bias_gradients,
    check_sum,
    exchange_of_sum,
    save_factors,
    summed_products,
)
from weft.ops.records import AllGatherMatmul, MatmulReduceScatter
from weft.schedules import matmul_reduce_scatter as schedule
from weft.schedules.workload import Variant
from weft.world import World


def matmul_reduce_scatter(
    a: Tensor,
    b: Weight,
    *,
    op: str = "sum",
    dim: int = 0,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shard_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    chunk_rows: int | None = None,
    order: str | None = None,
    compress: str | None = None,
    world: World | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Multiply `a` by this rank's `b`, sum over all ranks and keep this rank's part along a
    dimension, collectively.

    The result is that of `torch.matmul` followed by `torch.distributed.reduce_scatter_tensor` (plus
    `bias`). Products are summed in rank order in float32 (float64 for float64) and rounded once, so
    equal inputs give bitwise equal results by one algorithm; other algorithms differ in the last
    bits where torch's products depend on the number of rows multiplied at a time, on processors
    with AMX (see `weft.ops.autotune`). The products themselves are in float32, except that products
    of bfloat16 for a bfloat16 result are in bfloat16, as `torch.mm` computes them. Several hosts
    are summed in the order of their first ranks; a host other than the owner's first sums its
    products, and sends the sum in the dtype of a product: bfloat16 for a bfloat16 result, unless
    `out_dtype` is float32.

    Gradients flow to a, b and bias. The gradients of a and b share one gather of the result's
    gradient, by `all_gather_matmul`; the gradient of bias is complete on every rank.

    Args:
        a: (…, K), this rank's columns of the left factor, at least two dimensions; float16,
            bfloat16, float32 or float64; any strides. K may differ between ranks.
        b: (K, N) of a's dtype, this rank's rows of the weight, any strides, or packed once by
            `weft.pack`.
        op: ``sum``, or ``avg``: the sum divided by the number of ranks.
        dim: the dimension of the product (…, N) that is scattered. For the last one the transposed
            product is computed and scattered by rows, and the plain weight is used.
        bias: (N,), the same on all ranks; added once, for any `op`.
        scale_a: of float8 inputs, as `all_gather_matmul` takes it.
        scale_b: the same.
        out: contiguous, of the shape of the result, not overlapping an input.
        out_dtype: a's dtype (default) or float32; for float8 bfloat16 (default), float16 or
            float32.
        shard_rows: the size of the scattered dimension that each rank keeps; zero is allowed.
            Without it the dimension must divide evenly, as
            `torch.distributed.reduce_scatter_tensor` demands.
        algorithm: ``direct`` (peers' products are added in place), ``push`` (products are copied to
            their owner), ``put`` (products are computed in the memory of their owner), ``ring``
            (running sums pass from rank to rank), ``sequential`` (one product, then the sums) or
            ``auto``; `explain` names the selection of auto.
        chunk_rows: the most rows (of the product as a matrix of N columns) that are added, or sent,
            together; sequential ignores it.
        order: of a push, which needs ``algorithm="push"``: ``peer`` (default), the products of one
            peer after the other, or ``interleaved``, the first piece of every peer, then the second
            ….
        compress: ``int8``: rows travel between hosts as blocks of 8-bit numbers with a common power
            of two (MXINT8), in 33/64 of the bytes of bfloat16. Each time that a host's sums go to
            another host, each number changes by at most 1/128 of the largest of the 32 in its
            block. Ranks of one host exchange rows as they are. For float16, bfloat16 and float32.
        world: by default the world made by ``weft.init()``.
        timeout: seconds any wait may take; by default the world's.

    Returns:
        (…, N) with this rank's part of the scattered dimension, of `out_dtype`.

    Raises:
        ValueError, TypeError: bad arguments, before anything is sent.
        MismatchError, PeerLost, PeerTimeout: the ranks do not make the same call, or one is lost or
            late; the world is closed.

    Examples:
        >>> def one_row_of_the_sum():
        ...     return weft.matmul_reduce_scatter(torch.ones(2, 4), torch.ones(4, 3))
        >>> with weft.local_world(2) as local:
        ...     local.run(one_row_of_the_sum)
        [tensor([[8., 8., 8.]]), tensor([[8., 8., 8.]])]
    """
    shards = None if shard_rows is None else arguments.as_key(shard_rows)
    options = op, dim, out_dtype, shards, algorithm, chunk_rows, order, compress, False
    made, _ = prologue.call(OPERATOR, a, b, bias, out, options, world, timeout, (scale_a, scale_b))
    return made[0]


def check(world: World, operands: Operands, options: MatmulReduceScatter) -> FusedCall:
    """A checked call, which computes this rank's part of the sum."""
    out_dtype = check_sum(world, operands, options)
    a, (b,), (bias,), (out,) = operands
    dim = dims.normal(options.dim, a.dim())
    shape = (*a.shape[:-1], b.shape[1])
    parts = arguments.check_parts(shape[dim], options.shard_rows, world)
    transposed = dim == a.dim() - 1
    if transposed:
        as_tensor(b)  # it is the rows that are multiplied: reject a weight that is no tensor
    result = arguments.result(
        out, dims.resized(shape, dim, parts[world.rank]), out_dtype, (a, b, bias), world
    )
    options = options._replace(dim=dim)
    return (_ColumnsCall if transposed else _RowsCall)(world, options, operands, parts, result)


class _ScatterCall(SumCall):
    """The common part of sums of rows and of columns."""

    def overlapped(self) -> tuple[str, str]:
        world = self.world
        if world.hosts.several:
            return (
                "push",
                "each host sends the sums of its products while it computes others",
            )
        if world.emulated_link:
            return (
                "push",
                "the emulated link is slower than memory, so products are moved while others are "
                "computed",
            )
        if world.stream_ordered:
            return "push", "a stream moves products while others are computed"
        return "direct", "peers' products can be added in place at the speed of own memory"

    def chunk_rows(self, algorithm: str) -> int:
        rows = max(self.workload.rows)
        if algorithm == "direct":
            return min(rows, ADDED_ROWS[self.workload.packed])
        return rows if algorithm == "put" else self.piece(rows, self.pieces)


class _RowsCall(_ScatterCall):
    """Any dimension but the last is scattered."""

    def __init__(
        self,
        world: World,
        options: MatmulReduceScatter,
        operands: Operands,
        parts: Sequence[int],
        result: Tensor,
    ) -> None:
        a, (b,), (bias,), _ = operands
        dim, inner = options.dim, dims.inner(a.shape, options.dim)
        rows = tuple(part * inner for part in parts)
        self.result, self.front = result, dims.front(result, dim)
        kept = self.front.view(rows[world.rank], b.shape[1])
        sums = workload("matmul_reduce_scatter", rows, operands, result.dtype)
        super().__init__(world, options, sums, dims.to_front(a, dim), b, kept, bias)

    def finish(self) -> list[Tensor]:
        return [dims.back(self.front, self.options.dim, self.result)]


class _ColumnsCall(_ScatterCall):
    """The last dimension is scattered: the transposed product is scattered by rows. Each rank adds
    its part of the bias at the end.
    """

    def __init__(
        self,
        world: World,
        options: MatmulReduceScatter,
        operands: Operands,
        parts: Sequence[int],
        result: Tensor,
    ) -> None:
        a, (b,), (self.bias,), _ = operands
        self.result, matrix = result, dims.to_front(a, 0)
        dtype = result.dtype if self.bias is None else accumulator(result.dtype)
        self.summed = matrix.new_empty(parts[world.rank], len(matrix), dtype=dtype)
        sums = workload("matmul_reduce_scatter", tuple(parts), operands, dtype)._replace(
            n=len(matrix), packed=False
        )
        super().__init__(
            world, options, sums, dims.to_front(as_tensor(b).t(), 0), matrix.t(), self.summed, None
        )

    def describe(self, variant: Variant) -> str:
        return "; the transposed product is scattered by rows"

    def finish(self) -> list[Tensor]:
        own, summed = sum(self.workload.rows[: self.world.rank]), self.summed
        if self.bias is not None:
            summed = summed + self.bias[own : own + len(summed), None]
        return [self.result.copy_(summed.t().reshape(self.result.shape))]


def reference(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[int]
) -> list[Tensor]:
    """The result of each rank: its shard of the sum of all ranks' products."""
    return [*summed_products(inputs, weights).split([*kept])]


def _fake(call: Recorded) -> list[Tensor]:
    a, (b,), _, options, _, (_, rank, ranks) = call
    dim, shape = dims.normal(options.dim, a.dim()), (*a.shape[:-1], b.shape[1])
    shards = options.shard_rows
    part = shape[dim] // ranks if shards is None else shards[rank]
    return [a.new_empty(dims.resized(shape, dim, part), dtype=options.out_dtype or a.dtype)]


def _save(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    save_factors(ctx, call, results)
    options = call.options
    gather = AllGatherMatmul(
        dim=dims.normal(options.dim, call.a.dim()),
        keep=True,
        shard_rows=options.shard_rows,
        compress=options.compress,
    )
    ctx.arguments = *gather, call.timeout, call.world


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Gradients:
    """With g = all_gather(dy): da = g @ b^T and db = a^T @ g share one gather, and dbias is the sum
    of the rows of g.
    """
    a, b = ctx.saved_tensors
    (dy,) = grads
    assert dy is not None
    da, g = torch.ops.weft.all_gather_matmul(dy.to(a.dtype), [b.t()], [], *ctx.arguments)
    db = autograd.weight_gradient(autograd.rows(a), autograd.rows(g)) if ctx.for_b else None
    dbias = autograd.rows(g).sum(0)
    if ctx.divisor > 1:
        da, db = da / ctx.divisor, None if db is None else db / ctx.divisor
    return da if ctx.for_a else None, [db], bias_gradients(ctx, dbias)


OPERATOR = FusedOperator(
    schedule.OPERATOR,
    MatmulReduceScatter,
    check,
    reference,
    fake=_fake,
    gradient=Gradient(_save, _backward),
    pattern=Pattern("reduce_scatter_tensor", "before", exchange_of_sum, any_dim=True),
)
