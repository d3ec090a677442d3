"""Gradients and compilation: the fused operators as custom operators of torch, with their shapes and backward formulas.

``torch.ops.weft`` holds them; the public functions call these where torch records the call. The backward formulas use the
overlapped operators themselves, so they can be compiled, and differentiated again, like these.

Torch keeps compiled graphs on disk, for processes of other worlds and for other ranks, and tells them apart by the arguments of
their operators alone. So shapes and formulas go by arguments only: the world travels as its name, ``(number, rank, ranks)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engines.matmul import multiply
from weft.engines.weights import transposed
from weft.errors import WeftError
from weft.ops import dims, fused
from weft.ops.call import Given, Options
from weft.world import World, current, numbered

_ops = torch.ops.weft

_LAST = "SymInt[] world, str algorithm, SymInt? chunk_rows, float? timeout"
_SUM = "Tensor a, Tensor b, Tensor? bias, str op"
_GATHER = "Tensor a, Tensor[] weights, Tensor[] biases, SymInt dim, ScalarType? out_dtype, bool keep, SymInt[]? shard_rows"
_SCHEMAS = {
    "all_gather_matmul": f"({_GATHER}, {_LAST}) -> Tensor[]",
    "matmul_reduce_scatter": f"({_SUM}, SymInt dim, ScalarType? out_dtype, SymInt[]? shard_rows, {_LAST}) -> Tensor",
    "matmul_all_reduce": f"({_SUM}, ScalarType? out_dtype, {_LAST}) -> Tensor",
}
"""What the operators take, in torch's words; all on which shapes do not depend comes after the world."""


def _world(name: Sequence[int]) -> World:
    number, *place = name
    world = numbered(number)
    if world is None:
        raise WeftError("the world of this call is gone")
    if place != [world.rank, world.ranks]:
        raise WeftError(f"this call was recorded by rank {place[0]} of {place[1]}; this is rank {world.rank} of {world.ranks}")
    return current(world)


@torch.library.custom_op("weft::all_gather_matmul", mutates_args=(), schema=_SCHEMAS["all_gather_matmul"])
def all_gather_matmul(*inputs: Any) -> list[Tensor]:
    """`weft.all_gather_matmul`: the results, followed by the gathered a if it is to be kept.

    There is a bias for each weight, of which those that are empty stand for none, or no bias at all.
    """
    a, weights, biases, dim, out_dtype, keep, shard_rows, world, algorithm, chunk_rows, timeout = inputs
    given = [bias if bias.numel() else None for bias in biases] or [None] * len(weights)
    asked = Options(dim, "sum", out_dtype, keep, shard_rows, algorithm, chunk_rows, timeout)
    call = fused.check("all_gather_matmul", _world(world), Given(a, weights, given, [None] * len(weights)), asked)
    results, gathered = fused.run(call)
    return results if gathered is None else [*results, gathered]


@all_gather_matmul.register_fake
def _(*inputs: Any) -> Any:
    a, weights, _, dim, out_dtype, keep, shard_rows, world, *_ = inputs
    dim = dims.normal(dim, a.dim())
    size = a.shape[dim] * world[2] if shard_rows is None else sum(shard_rows)
    whole = (*a.shape[:dim], size, *a.shape[dim + 1 :])
    results = [a.new_empty(*whole[:-1], b.shape[1], dtype=out_dtype or a.dtype) for b in weights]
    return [*results, a.new_empty(whole)] if keep else results


def _keep_all_gather_matmul(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, weights, biases, dim, _, keep, shard_rows, world, *_, timeout = inputs
    ctx.dim = dims.normal(dim, a.dim())
    ctx.options = shard_rows or [a.shape[ctx.dim]] * world[2], world, timeout
    ctx.for_a, ctx.for_weights = a.requires_grad, [b.requires_grad for b in weights]
    ctx.for_biases = [bias.requires_grad for bias in biases]
    ctx.dtype, ctx.weights = a.dtype, len(weights)
    if any(ctx.for_weights) and not keep:
        raise ValueError("the gradient of a weight needs the gathered a: keep it")
    ctx.save_for_backward(*weights, *(output[-1:] if any(ctx.for_weights) else []))


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """``x^T @ dy``, laid out as the transpose of a linear layer's weight, to whose gradient it is mostly added."""
    product: Tensor = _ops.product(dy.t(), x)
    return product.t()


def _all_gather_matmul_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """da = reduce_scatter(dy @ b^T), db = gathered^T @ dy; the gradients of several weights are summed by one product."""
    weights, gathered = ctx.saved_tensors[: ctx.weights], ctx.saved_tensors[ctx.weights :]
    shard_rows, world, timeout = ctx.options
    dys = [None if grad is None else grad.to(ctx.dtype) for grad in grads]
    for_a = None
    if ctx.for_a:
        pairs = [(dy, b.t()) for dy, b in zip(dys, weights, strict=False) if dy is not None]
        if len(dys) > ctx.weights and dys[-1] is not None:  # the gradient of the gathered a itself
            pairs.append((dys[-1], torch.eye(dys[-1].shape[-1], dtype=ctx.dtype)))
        dy, b = (torch.cat([pair[0] for pair in pairs], -1), torch.cat([pair[1] for pair in pairs])) if len(pairs) > 1 else pairs[0]
        for_a = _ops.matmul_reduce_scatter(dy, b, None, "sum", ctx.dim, None, shard_rows, world, "auto", None, timeout)
    for_weights = [
        _weight_gradient(_rows(gathered[0]), _rows(dy)) if wanted and dy is not None else None
        for wanted, dy in zip(ctx.for_weights, dys, strict=False)
    ]
    for_biases = [_rows(dy).sum(0) if wanted and dy is not None else None for wanted, dy in zip(ctx.for_biases, dys, strict=False)]
    return for_a, for_weights, for_biases, *[None] * 8


@torch.library.custom_op("weft::matmul_reduce_scatter", mutates_args=(), schema=_SCHEMAS["matmul_reduce_scatter"])
def matmul_reduce_scatter(*inputs: Any) -> Tensor:
    """`weft.matmul_reduce_scatter`."""
    a, b, bias, op, dim, out_dtype, shard_rows, world, algorithm, chunk_rows, timeout = inputs
    asked = Options(dim, op, out_dtype, False, shard_rows, algorithm, chunk_rows, timeout)
    result: Tensor = fused.run(fused.check("matmul_reduce_scatter", _world(world), Given(a, [b], [bias], [None]), asked))
    return result


@matmul_reduce_scatter.register_fake
def _(*inputs: Any) -> Any:
    a, b, _, _, dim, out_dtype, shard_rows, world, *_ = inputs
    dim = dims.normal(dim, a.dim())
    whole, (rank, ranks) = (*a.shape[:-1], b.shape[1]), world[1:]
    part = whole[dim] // ranks if shard_rows is None else shard_rows[rank]
    return a.new_empty(*whole[:dim], part, *whole[dim + 1 :], dtype=out_dtype or a.dtype)


def _keep_factors(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, divisor: int) -> None:
    ctx.divisor, ctx.bias_dtype = divisor, None if bias is None else bias.dtype
    ctx.wanted = a.requires_grad, b.requires_grad, bias is not None and bias.requires_grad
    ctx.save_for_backward(a, b)


def _keep_matmul_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, op, dim, _, shard_rows, world, *_, timeout = inputs
    ctx.dim = dims.normal(dim, a.dim())
    ctx.options = shard_rows, world, timeout
    _keep_factors(ctx, a, b, bias, world[2] if op == "avg" else 1)


def _matmul_reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """With g = all_gather(dy): da = g @ b^T and db = a^T @ g share one gather, and dbias is the sum of the rows of g."""
    a, b = ctx.saved_tensors
    shard_rows, world, timeout = ctx.options
    for_a, for_b, for_bias = ctx.wanted
    options = ctx.dim, None, True, shard_rows, world, "auto", None, timeout
    da, g = _ops.all_gather_matmul(grad.to(a.dtype), [b.t()], [], *options)
    db = _weight_gradient(_rows(a), _rows(g)) if for_b else None
    dbias = _rows(g).sum(0).to(ctx.bias_dtype) if for_bias else None
    if ctx.divisor > 1:
        da, db = da / ctx.divisor, None if db is None else db / ctx.divisor
    return da if for_a else None, db, dbias, *[None] * 8


@torch.library.custom_op("weft::matmul_all_reduce", mutates_args=(), schema=_SCHEMAS["matmul_all_reduce"])
def matmul_all_reduce(*inputs: Any) -> Tensor:
    """`weft.matmul_all_reduce`."""
    a, b, bias, op, out_dtype, world, algorithm, chunk_rows, timeout = inputs
    asked = Options(op=op, out_dtype=out_dtype, algorithm=algorithm, chunk_rows=chunk_rows, timeout=timeout)
    result: Tensor = fused.run(fused.check("matmul_all_reduce", _world(world), Given(a, [b], [bias], [None]), asked))
    return result


@matmul_all_reduce.register_fake
def _(*inputs: Any) -> Any:
    a, b, _, _, out_dtype, *_ = inputs
    return a.new_empty(*a.shape[:-1], b.shape[1], dtype=out_dtype or a.dtype)


def _keep_matmul_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, op, _, world, *_ = inputs
    _keep_factors(ctx, a, b, bias, world[2] if op == "avg" else 1)


def _matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """dy is complete on every rank: da = dy @ b^T and db = a^T @ dy without communication."""
    if torch.is_grad_enabled():
        raise NotImplementedError("matmul_all_reduce has no second derivatives: leave out create_graph=True")
    a, b = ctx.saved_tensors
    for_a, for_b, for_bias = ctx.wanted
    dy = _rows(grad.to(a.dtype) / ctx.divisor if ctx.divisor > 1 else grad.to(a.dtype))
    da = _ops.product(dy, b.t()).view(a.shape) if for_a else None
    db = _weight_gradient(_rows(a), dy) if for_b else None
    dbias = _rows(grad).sum(0).to(ctx.bias_dtype) if for_bias else None
    return da, db, dbias, *[None] * 6


@torch.library.custom_op("weft::product", mutates_args=())
def product(x: Tensor, b: Tensor) -> Tensor:
    """The local product of two matrices of one dtype, the fastest way there is."""
    out = x.new_empty(x.shape[0], b.shape[1])
    multiply(x if transposed(x) else dims.to_front(x, 0), b, out)
    return out


@product.register_fake
def _(x: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], b.shape[1])


def _keep_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, b = ctx.saved_tensors
    return _ops.product(grad, b.t()), _ops.product(x.t(), grad)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of its last dimension."""
    return tensor.flatten(0, -2)


all_gather_matmul.register_autograd(_all_gather_matmul_backward, setup_context=_keep_all_gather_matmul)
matmul_reduce_scatter.register_autograd(_matmul_reduce_scatter_backward, setup_context=_keep_matmul_reduce_scatter)
matmul_all_reduce.register_autograd(_matmul_all_reduce_backward, setup_context=_keep_matmul_all_reduce)
product.register_autograd(_product_backward, setup_context=_keep_product)
