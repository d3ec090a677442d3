"""Gradients and compilation: the fused operators as custom operators of torch, in
``torch.ops.weft``.

The public functions call the custom operators if torch records the call. The backward formulas
consist of overlapped operators, too, so they can also be compiled, and differentiated again.

Torch keeps compiled graphs on disk, for processes of other worlds and for other ranks, and
distinguishes them by the arguments of their operators alone. So shapes and formulas depend on
arguments only: operands, the fields of the record of options, the time limit, and the world by its
name, ``(number, rank, ranks)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.checks import check_timeout
from weft.errors import WeftError
from weft.kernels.products import multiply
from weft.kernels.weights import Weight, source, transposed
from weft.ops import arguments, dims, driver
from weft.ops.operator import FusedOperator, Recorded
from weft.ops.options import Operands
from weft.ops.options import schema as schema_of
from weft.world import World, by_number, current


def register(operator: FusedOperator) -> None:
    """Define ``torch.ops.weft.NAME``, which returns the results of one call, beginning with one for
    each weight.
    """
    if operator.fake is None:
        return
    fake, gradient, record = operator.fake, operator.gradient, operator.options

    def recorded(inputs: tuple[Any, ...]) -> Recorded:
        a, weights, biases, *options, timeout, world = inputs
        return Recorded(a, weights, biases, record(*options), timeout, world)

    def run(*inputs: Any) -> list[Tensor]:
        a, weights, biases, options, timeout, world = recorded(inputs)
        none = [None] * len(weights)
        operands = Operands(a, weights, [x if x.numel() else None for x in biases] or none, none)
        own = recorded_world(world)
        with own.failure.report_rejection:  # of a backward pass, or a compiled graph
            check_timeout(timeout)
            options = operator.exchanged(own, operands, options, timeout)
            return driver.call(operator, own, operands, options, timeout)

    schema = (
        f"(Tensor a, Tensor[] weights, Tensor[] biases, {schema_of(record)}, float? timeout, "
        "SymInt[] world) -> Tensor[]"
    )
    made = torch.library.custom_op(f"weft::{operator.name}", run, mutates_args=(), schema=schema)
    made.register_fake(lambda *inputs: fake(recorded(inputs)))
    if gradient is None:
        return

    def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        # of options and the world; torch takes an empty list of numbers for one of tensors
        ctx.no_gradients = [
            [] if isinstance(each, list) and not each else None for each in inputs[3:]
        ]
        gradient.save(ctx, recorded(inputs), output)

    def backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        for_a, for_weights, for_biases = gradient.backward(ctx, grads)
        return for_a, [*for_weights], [*for_biases], *ctx.no_gradients

    made.register_autograd(backward, setup_context=save)


def call(
    operator: Any,
    a: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    out: object,
    options: Any,
    timeout: float | None,
    world: World,
) -> list[Tensor]:
    """The results of a call that torch records, by a custom operator."""
    arguments.check_recorded(a, weights, biases, out, options, world)
    encoded = [a.new_empty(0) if x is None else x for x in biases]
    encoded = encoded if any(x is not None for x in biases) else []
    sources = [source(b) for b in weights]
    results: list[Tensor] = operator(a, sources, encoded, *options, timeout, world.name)
    return results


def recorded_world(name: Sequence[int]) -> World:
    """The world of a recorded call; `WeftError` if it no longer exists, or this is another rank of
    it.
    """
    number, *position = name
    world = by_number(number)
    if world is None:
        raise WeftError(
            "the world of this recorded call no longer exists: keep it until backward has run"
        )
    if position != [world.rank, world.ranks]:
        raise WeftError(
            f"this call was recorded by rank {position[0]} of {position[1]} and cannot run on rank "
            f"{world.rank} of {world.ranks}: compile it on each rank"
        )
    return current(world)


def rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix whose columns are its last dimension."""
    return tensor.flatten(0, -2)


def weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """``x^T @ dy``, with the strides of the transpose of a linear layer's weight, to whose gradient
    it is usually added.
    """
    gradient: Tensor = torch.ops.weft.product(dy.t(), x)
    return gradient.t()


@torch.library.custom_op("weft::product", mutates_args=())
def product(x: Tensor, b: Tensor) -> Tensor:
    """The local product of two matrices of one dtype, by the fastest kernel."""
    out = x.new_empty(x.shape[0], b.shape[1])
    multiply(x if transposed(x) else dims.to_front(x, 0), b, out)
    return out


@product.register_fake
def _(x: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], b.shape[1])


def _save_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, b = ctx.saved_tensors
    return torch.ops.weft.product(grad, b.t()), torch.ops.weft.product(x.t(), grad)


product.register_autograd(_product_backward, setup_context=_save_product)
