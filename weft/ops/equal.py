"""The conjugate pair identity and all-reduce, Megatron's f and g: each is the other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops import autograd
from weft.ops.all_reduce import all_reduce


def total(part: Tensor, world: Sequence[int]) -> Tensor:
    """The sum of all ranks' `part`, of which all ranks compute the same; `world` is the name of a
    world.
    """
    y: Tensor = _Total.apply(part, world)  # type: ignore[no-untyped-call]
    return y


def apart(x: Tensor, world: Sequence[int]) -> Tensor:
    """`x`, equal on all ranks, to compute something else on each: its gradient is the sum over
    ranks. `world` is the name of a world.
    """
    # a compiled program has no gradients of its gradients
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x
    y: Tensor = _Apart.apply(x, world)  # type: ignore[no-untyped-call]
    return y


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, world: Sequence[int]) -> Tensor:
        ctx.world = world
        return all_reduce(part, world=autograd.recorded_world(world))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return apart(grad, ctx.world), None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: Sequence[int]) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return total(grad, ctx.world), None
