"""The methods to compute experts on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import weft._native as _native
from weft.checks import name
from weft.experts.routing import by_expert
from weft.kernels import products
from weft.kernels.packed import PackedWeight, pack
from weft.kernels.weights import Weight

if TYPE_CHECKING:
    from weft.experts.weights import Experts

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""The activations of a gate by name; the native core uses the same names."""

NATIVE = (torch.float16, torch.bfloat16, torch.float32)


class Shape(NamedTuple):
    """`number` experts for tokens of `width` numbers, with `inner` between the products."""

    number: int
    width: int
    inner: int


class Method(NamedTuple):
    """A method: ``run(packed(experts), experts, x, chosen, scores, out)``."""

    packed: Callable[[Experts], Any]
    run: Callable[[Any, Experts, Tensor, Tensor, Tensor, Tensor], None]


def each(
    weights: Callable[[int], tuple[Weight, Weight]],
    experts: Experts,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    out: Tensor,
) -> None:
    """One expert after another, with two products each: any dtype, and unpacked weights, (K, 2 I)
    and (I, K) for each expert.
    """
    activation = ACTIVATIONS[experts.activation]
    _, width, inner = experts.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.zeros(len(x), width, dtype=wide, device=x.device)
    factors = scores.reshape(-1, 1)
    for number, tokens, at in by_expert(experts, chosen):
        gate_up, down = weights(number)
        both = x.new_empty(len(tokens), 2 * inner)
        products.multiply(x.index_select(0, tokens), gate_up, both)
        between = activation(both[:, :inner]).mul_(both[:, inner:])
        result = sums.new_empty(len(tokens), width)
        products.multiply(between, down, result)
        sums.index_add_(0, tokens, result.mul_(factors.index_select(0, at)))
    out.copy_(sums)


def _packed_each(experts: Experts) -> Callable[[int], tuple[PackedWeight, PackedWeight]]:
    made = [
        (pack(gate_up.t()), pack(down.t()))
        for gate_up, down in zip(experts.gate_up.detach(), experts.down.detach(), strict=True)
    ]
    for weight in [weight for both in made for weight in both]:
        weight.watched = True  # as parts of the experts
    return made.__getitem__


def _packed_natively(experts: Experts) -> _native.PackedExperts:
    return _native.PackedExperts(
        experts.gate_up.detach(),
        experts.down.detach(),
        getattr(_native.Dtype, name(experts.dtype)),
        getattr(_native.Activation, experts.activation),
        experts.first,
    )


def _natively(
    packed: _native.PackedExperts,
    experts: Experts,
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    out: Tensor,
) -> None:
    packed.sums(x, chosen, scores, out, _DTYPES[out.dtype])


_DTYPES = {dtype: getattr(_native.Dtype, name(dtype)) for dtype in NATIVE}

METHODS = {"native": Method(_packed_natively, _natively), "each": Method(_packed_each, each)}
"""The methods by name: ``native``, one call for all experts in one pass over their weights, and
``each``, the fastest packed product (`weft.pack`) of each expert after the other.
"""
