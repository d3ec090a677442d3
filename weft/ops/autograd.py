"""Gradients and compilation: the fused operators as custom operators of torch, with their shapes
and backward formulas.

``torch.ops.weft`` holds them; the public functions call these where torch records the call. The
backward formulas use the overlapped operators themselves, so they can be compiled, and
differentiated again, like these.

Torch keeps compiled graphs on disk, for processes of other worlds and for other ranks, and tells
them apart by the arguments of their operators alone. So shapes and formulas go by arguments only:
operands, the fields of `Options`, and the world by its name, ``(number, rank, ranks)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.kernels.products import multiply
from weft.kernels.weights import transposed
from weft.ops import dims, fused
from weft.ops.call import Given, Options
from weft.world import World, by_number, current

_ops = torch.ops.weft

_OPTIONS = (
    "SymInt dim, str op, ScalarType? out_dtype, bool keep, SymInt[]? shard_rows, "
    "str algorithm, SymInt? chunk_rows, float? timeout, bool own_bias, SymInt[] world"
)
_GATHER = f"(Tensor a, Tensor[] weights, Tensor[] biases, {_OPTIONS}) -> Tensor[]"
_SUM = f"(Tensor a, Tensor b, Tensor? bias, {_OPTIONS}) -> Tensor"
_WITHOUT = [None] * 10  # gradients of what comes after the operands


def _world(name: Sequence[int]) -> World:
    number, *place = name
    world = by_number(number)
    if world is None:
        raise WeftError("the world of this call is gone")
    if place != [world.rank, world.ranks]:
        raise WeftError(
            f"this call was recorded by rank {place[0]} of {place[1]}; this is rank {world.rank} "
            f"of {world.ranks}"
        )
    return current(world)


def _run(operator: str, given: Given, *asked: Any) -> Any:
    *options, world = asked
    return fused.run(fused.check(operator, _world(world), given, Options(*options)))


@torch.library.custom_op("weft::all_gather_matmul", mutates_args=(), schema=_GATHER)
def all_gather_matmul(*inputs: Any) -> list[Tensor]:
    """`weft.all_gather_matmul`: the results, followed by the gathered a if it is to be kept.

    There is a bias for each weight, of which those that are empty stand for none, or no bias at
    all.
    """
    a, weights, biases, *asked = inputs
    none = [None] * len(weights)
    given = Given(a, weights, [bias if bias.numel() else None for bias in biases] or none, none)
    results, gathered = _run("all_gather_matmul", given, *asked)
    return results if gathered is None else [*results, gathered]


@all_gather_matmul.register_fake
def _(*inputs: Any) -> Any:
    a, weights, _, dim, _, out_dtype, keep, shard_rows, *_, world = inputs
    dim = dims.normal(dim, a.dim())
    whole = dims.resized(
        a.shape, dim, a.shape[dim] * world[2] if shard_rows is None else sum(shard_rows)
    )
    results = [a.new_empty(*whole[:-1], b.shape[1], dtype=out_dtype or a.dtype) for b in weights]
    return [*results, a.new_empty(whole)] if keep else results


def _keep_all_gather_matmul(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a, weights, biases, dim, _, _, keep, shard_rows, _, _, timeout, _, world = inputs
    dim = dims.normal(dim, a.dim())
    parts = shard_rows or [a.shape[dim]] * world[2]
    ctx.asked = *Options(dim, shard_rows=parts, timeout=timeout), world
    ctx.for_a, ctx.for_weights = a.requires_grad, [b.requires_grad for b in weights]
    ctx.for_biases = [bias.requires_grad for bias in biases]
    ctx.dtype, ctx.weights = a.dtype, len(weights)
    if any(ctx.for_weights) and not keep:
        raise ValueError("the gradient of a weight needs the gathered a: keep it")
    ctx.save_for_backward(*weights, *(output[-1:] if any(ctx.for_weights) else []))


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """``x^T @ dy``, laid out as the transpose of a linear layer's weight, to whose gradient it is
    mostly added.
    """
    product: Tensor = _ops.product(dy.t(), x)
    return product.t()


def _all_gather_matmul_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """da = reduce_scatter(dy @ b^T), db = gathered^T @ dy; the gradients of several weights are
    summed by one product.
    """
    weights, gathered = ctx.saved_tensors[: ctx.weights], ctx.saved_tensors[ctx.weights :]
    dys = [None if grad is None else grad.to(ctx.dtype) for grad in grads]
    for_a = None
    if ctx.for_a:
        pairs = [(dy, b.t()) for dy, b in zip(dys, weights, strict=False) if dy is not None]
        if len(dys) > ctx.weights and dys[-1] is not None:  # the gradient of the gathered a itself
            pairs.append((dys[-1], torch.eye(dys[-1].shape[-1], dtype=ctx.dtype)))
        dy, b = (
            (torch.cat([pair[0] for pair in pairs], -1), torch.cat([pair[1] for pair in pairs]))
            if len(pairs) > 1
            else pairs[0]
        )
        for_a = _ops.matmul_reduce_scatter(dy, b, None, *ctx.asked)
    for_weights = [
        _weight_gradient(_rows(gathered[0]), _rows(dy)) if wanted and dy is not None else None
        for wanted, dy in zip(ctx.for_weights, dys, strict=False)
    ]
    for_biases = [
        _rows(dy).sum(0) if wanted and dy is not None else None
        for wanted, dy in zip(ctx.for_biases, dys, strict=False)
    ]
    return for_a, for_weights, for_biases, *_WITHOUT


def _sum(operator: str, a: Tensor, b: Tensor, bias: Tensor | None, *asked: Any) -> Tensor:
    result: Tensor = _run(operator, Given(a, [b], [bias], [None]), *asked)
    return result


@torch.library.custom_op("weft::matmul_reduce_scatter", mutates_args=(), schema=_SUM)
def matmul_reduce_scatter(*inputs: Any) -> Tensor:
    """`weft.matmul_reduce_scatter`."""
    return _sum("matmul_reduce_scatter", *inputs)


@matmul_reduce_scatter.register_fake
def _(*inputs: Any) -> Any:
    a, b, _, dim, _, out_dtype, _, shard_rows, *_, (_, rank, ranks) = inputs
    dim, whole = dims.normal(dim, a.dim()), (*a.shape[:-1], b.shape[1])
    part = whole[dim] // ranks if shard_rows is None else shard_rows[rank]
    return a.new_empty(dims.resized(whole, dim, part), dtype=out_dtype or a.dtype)


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the backward formulas of both sums need."""
    a, b, bias, dim, op, _, _, shard_rows, _, _, timeout, _, world = inputs
    ctx.asked = (
        *Options(dims.normal(dim, a.dim()), keep=True, shard_rows=shard_rows, timeout=timeout),
        world,
    )
    ctx.divisor, ctx.bias_dtype = (
        world[2] if op == "avg" else 1,
        None if bias is None else bias.dtype,
    )
    ctx.wanted = a.requires_grad, b.requires_grad, bias is not None and bias.requires_grad
    ctx.save_for_backward(a, b)


def _matmul_reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """With g = all_gather(dy): da = g @ b^T and db = a^T @ g share one gather, and dbias is the sum
    of the rows of g.
    """
    a, b = ctx.saved_tensors
    for_a, for_b, for_bias = ctx.wanted
    da, g = _ops.all_gather_matmul(grad.to(a.dtype), [b.t()], [], *ctx.asked)
    db = _weight_gradient(_rows(a), _rows(g)) if for_b else None
    dbias = _rows(g).sum(0).to(ctx.bias_dtype) if for_bias else None
    if ctx.divisor > 1:
        da, db = da / ctx.divisor, None if db is None else db / ctx.divisor
    return da if for_a else None, db, dbias, *_WITHOUT


@torch.library.custom_op("weft::matmul_all_reduce", mutates_args=(), schema=_SUM)
def matmul_all_reduce(*inputs: Any) -> Tensor:
    """`weft.matmul_all_reduce`."""
    return _sum("matmul_all_reduce", *inputs)


@matmul_all_reduce.register_fake
def _(*inputs: Any) -> Any:
    a, b, _, _, _, out_dtype, *_ = inputs
    return a.new_empty(*a.shape[:-1], b.shape[1], dtype=out_dtype or a.dtype)


def _matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """dy is complete on every rank: da = dy @ b^T and db = a^T @ dy without communication."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "matmul_all_reduce has no second derivatives: leave out create_graph=True"
        )
    a, b = ctx.saved_tensors
    for_a, for_b, for_bias = ctx.wanted
    dy = _rows(grad.to(a.dtype) / ctx.divisor if ctx.divisor > 1 else grad.to(a.dtype))
    da = _ops.product(dy, b.t()).view(a.shape) if for_a else None
    db = _weight_gradient(_rows(a), dy) if for_b else None
    dbias = _rows(grad).sum(0).to(ctx.bias_dtype) if for_bias else None
    return da, db, dbias, *_WITHOUT


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


all_gather_matmul.register_autograd(
    _all_gather_matmul_backward, setup_context=_keep_all_gather_matmul
)
matmul_reduce_scatter.register_autograd(
    _matmul_reduce_scatter_backward, setup_context=_keep_factors
)
matmul_all_reduce.register_autograd(_matmul_all_reduce_backward, setup_context=_keep_factors)
product.register_autograd(_product_backward, setup_context=_keep_product)
