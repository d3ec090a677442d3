"""The common part of the operators that sum products over ranks: the dtype of sums, and the bias,
which is added once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.checks import name
from weft.kernels.weights import Weight
from weft.ops import arguments
from weft.ops.fused import FusedCall
from weft.ops.operator import Exchange, Recorded
from weft.ops.options import Operands
from weft.ops.records import MatmulAllReduce, MatmulReduceScatter
from weft.schedules import workload as pure
from weft.schedules.workload import Workload
from weft.world import World

ADDED_ROWS = {True: 256, False: 1024}
"""Rows of a piece by whether b is packed: few enough to be in the cache when they are added up, or
enough to make it worthwhile that the product packs b.
"""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of a dtype are accumulated."""
    found: torch.dtype = getattr(torch, pure.accumulator(name(dtype)))
    return found


OPS = ("sum", "avg")
"""The reductions of products."""


def exchange_of_sum(rows: Any, op: str, *divided: Any) -> Exchange | None:
    """The arguments of torch's functional reduce-scatter or, without a number of ranks,
    all-reduce.
    """
    *ranks, group = divided
    return Exchange(rows, group, ranks[0] if ranks else None, op) if op in OPS else None


Sum = MatmulReduceScatter | MatmulAllReduce


def check_sum(world: World, operands: Operands, options: Sum) -> torch.dtype:
    """Check the arguments that both operators have; returns the dtype of the result."""
    a, (b,), (bias,), _ = operands
    arguments.check_matrix(a, world)
    arguments.check_weight(a, b, world)
    arguments.check_bias(bias, b.shape[1], world)
    if options.op not in OPS:
        raise ValueError(f"op must be sum or avg; got {options.op!r}")
    return arguments.check_out_dtype(a.dtype, options.out_dtype)


class SumCall(FusedCall):
    """Multiplies the matrix `x` (rows, K) by `weight` (K, N), and sums over ranks into `out`, which
    has N columns and the rows that this rank keeps.

    Rank 0 adds the bias to its product, so that it is added once, unless each rank has its own.
    """

    result: Tensor

    @property
    def shared(self) -> Workload:
        workload = self.workload
        return workload._replace(k=0, out_dtype=workload.dtype, packed=True, symmetric=True)

    def __init__(
        self,
        world: World,
        options: Sum,
        sums: Workload,
        x: Tensor,
        weight: Weight,
        out: Tensor,
        bias: Tensor | None,
    ) -> None:
        super().__init__(world, options, sums)
        self.results = [self.result]
        self.tensors = {"a": x, "out": out}
        self.weights = (weight,)
        self.request_fields = {"op": options.op}
        if bias is not None and options.own_bias:
            self.biases = (bias,)
        elif bias is not None and world.rank == 0:
            self.biases = (
                bias.to(accumulator(x.dtype)) * world.ranks if options.op == "avg" else bias,
            )


def summed_products(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' products, by definition."""
    return torch.stack([a @ b for a, b in zip(inputs, weights, strict=True)]).sum(0)


def save_factors(ctx: Any, call: Recorded, results: Sequence[Tensor]) -> None:
    """Keep the operands that the backward formulas of both sums need."""
    a, (b,), biases, options, _, world = call
    ctx.world = world
    ctx.divisor = world[2] if options.op == "avg" else 1
    ctx.for_a, ctx.for_b = a.requires_grad, b.requires_grad
    ctx.biases = [(bias.requires_grad, bias.dtype) for bias in biases]
    ctx.save_for_backward(a, b)


def bias_gradients(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradient of the bias, if there is a bias that needs it."""
    return [gradient.to(dtype) if wanted else None for wanted, dtype in ctx.biases]
