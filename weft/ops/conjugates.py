"""The conjugate pair identity and all-reduce, Megatron's f and g: each is the other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops import autograd
from weft.ops.all_reduce import all_reduce


def reduce_from_ranks(part: Tensor, world: Sequence[int]) -> Tensor:
    """Megatron's g: all-reduce `part`; the gradient is passed on unchanged, since all ranks compute
    the same loss. `world` is the name of a world.
    """
    y: Tensor = _ReduceFromRanks.apply(part, world)  # type: ignore[no-untyped-call]
    return y


def copy_to_ranks(x: Tensor, world: Sequence[int]) -> Tensor:
    """Megatron's f: `x` unchanged, equal on all ranks; its gradient is all-reduced. `world` is the
    name of a world.
    """
    # a compiled program has no gradients of its gradients
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x
    y: Tensor = _CopyToRanks.apply(x, world)  # type: ignore[no-untyped-call]
    return y


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, world: Sequence[int]) -> Tensor:
        ctx.world = world
        return all_reduce(part, world=autograd.recorded_world(world))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_ranks(grad, ctx.world), None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: Sequence[int]) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from_ranks(grad, ctx.world), None
