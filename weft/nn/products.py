"""Differentiable operations of layers in addition to the fused operators: a local product, and a
gather of its columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.checks import tracing_modes
from weft.kernels.products import multiply
from weft.kernels.weights import Weight
from weft.nn.layout import chunk_sizes
from weft.ops import autograd, conjugates, dims
from weft.ops.all_gather import all_gather
from weft.ops.matmul_all_reduce import matmul_all_reduce
from weft.world import World


class _ColumnProduct(torch.autograd.Function):
    """``x @ weight + bias`` with an x that is equal on all ranks and a weight that differs, so that
    the gradient of x is a sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, world: World) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.world = world
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dy = autograd.rows(grad)
        rows = autograd.rows(conjugates.copy_to_ranks(x, ctx.world.name))
        return (
            matmul_all_reduce(grad, weight.t(), world=ctx.world) if for_x else None,
            autograd.weight_gradient(rows, dy) if for_weight else None,
            dy.sum(0) if for_bias else None,
            None,
        )


def column_product(x: Tensor, weight: Weight, bias: Tensor | None, world: World) -> Tensor:
    if x.dim() == 1:
        return column_product(x[None], weight, bias, world)[0]
    if not isinstance(weight, Tensor) or not torch.is_grad_enabled():
        return product(x, weight, bias)
    y: Tensor = _ColumnProduct.apply(x, weight, bias, world)  # type: ignore[no-untyped-call]
    return y


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """This rank's ``x @ weight + bias``."""
    if torch.compiler.is_compiling() or tracing_modes():
        y: Tensor = torch.ops.weft.product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias
    y = x.new_empty(*x.shape[:-1], weight.shape[1])
    multiply(dims.to_front(x, 0), weight, y.view(math.prod(x.shape[:-1]), weight.shape[1]), bias)
    return y


class _AllColumns(torch.autograd.Function):
    """A gather of all ranks' parts of the last dimension. All ranks must compute the same from the
    result: a rank's gradient is its part of the result's, without a sum.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: list[int], world: World) -> Tensor:
        ctx.own = sum(sizes[: world.rank]), sizes[world.rank]
        ctx.world = world.name
        return all_gather(y, dim=-1, shard_rows=sizes, world=world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return conjugates.copy_to_ranks(grad, ctx.world).narrow(-1, *ctx.own), None, None


def all_columns(y: Tensor, columns: int, world: World) -> Tensor:
    gathered: Tensor = _AllColumns.apply(y, chunk_sizes(columns, world.ranks), world)  # type: ignore[no-untyped-call]
    return gathered
