"""The methods to compute experts on a CPU, and the fastest of them, timed once and stored."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import weft._native as _native
import weft.cache as cache
from weft.checks import name
from weft.experts.routing import by_expert
from weft.kernels import half, products
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
"""The activations of a gate by name, which is also that of the native one."""

_NATIVE = (torch.float16, torch.bfloat16, torch.float32)
_ROWS = (1, 4, 16, 64)
"""Rows of each expert at which the methods are timed."""
_WIDTHS = {"small": 256, "large": 1024}
"""Widths of the timed experts, both of tokens and between the products."""
_LARGE = 512 * 512
"""Elements of a matrix from which on an expert counts as large."""
_TIMED = 4  # experts
_ROUNDS = 6  # of timing, one of which warms up
_WORTH = 1.25
"""How many times as fast as ``native`` another method must be: it has other bits for other numbers
of rows.
"""


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
    """One expert after another, by two products each: any dtype, and weights as they are, (K, 2 I)
    and (I, K) for each number.
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


_DTYPES = {dtype: getattr(_native.Dtype, name(dtype)) for dtype in _NATIVE}

METHODS = {"native": Method(_packed_natively, _natively), "each": Method(_packed_each, each)}
"""The methods by name: ``native``, one call for all experts in one pass over their weights, and
``each``, the fastest packed product (`weft.pack`) of each expert after the other.
"""


def fastest(experts: Experts) -> str:
    """The name of the fastest method for packed experts. It depends neither on the number of rows
    nor on what the router has chosen, so with ``native`` the bits of a token do not, either.
    """
    if experts.dtype not in _NATIVE or not half.COLUMNS:
        return "each"
    _, width, inner = experts.shape
    size = "large" if width * inner >= _LARGE else "small"
    pack: Any = type(experts)
    return _table(pack, experts.dtype, torch.get_num_threads())[size]


@functools.cache
def _table(pack: Any, dtype: torch.dtype, threads: int) -> dict[str, str]:
    """The fastest method by the size of an expert, for those that `pack` makes."""
    software = f"torch {torch.__version__} {threads} threads"

    def fits(found: dict[str, str]) -> bool:
        return all(found[size] in METHODS for size in _WIDTHS)

    table: dict[str, str] = cache.once(
        cache.of_this_machine(f"experts-{name(dtype)}", software),
        lambda: _measure(pack, dtype),
        fits,
    )
    return table


@torch.inference_mode(False)
def _measure(pack: Callable[[Tensor, Tensor], Experts], dtype: torch.dtype) -> dict[str, str]:
    def timed(width: int) -> str:
        experts = pack(
            torch.randn(_TIMED, 2 * width, width, dtype=dtype, device="cpu"),
            torch.randn(_TIMED, width, width, dtype=dtype, device="cpu"),
        )
        return _fastest([_times(experts, rows) for rows in _ROWS])

    with torch.no_grad():
        return {size: timed(width) for size, width in _WIDTHS.items()}


def _fastest(seconds: Sequence[dict[str, float]]) -> str:
    """The method for all numbers of rows, of which the times are given: by the mean, over these, of
    how many times as fast as ``native`` it is.
    """

    def gain(method: str) -> float:
        return statistics.geometric_mean(timed["native"] / timed[method] for timed in seconds)

    best = max(METHODS, key=gain)
    return best if gain(best) >= _WORTH else "native"


def _times(experts: Any, rows: int) -> dict[str, float]:
    """The least time of each method for so many rows of each expert."""
    tokens = rows * experts.shape.number
    x = torch.randn(tokens, experts.shape.width, dtype=experts.dtype, device="cpu")
    chosen = (torch.arange(tokens, device="cpu") % experts.shape.number).unsqueeze(1)
    scores, out = torch.ones(tokens, 1, device="cpu"), torch.empty_like(x)
    least = dict.fromkeys(METHODS, float("inf"))
    for number in range(_ROUNDS):
        for method, (_, run) in METHODS.items():
            form = experts.form(method)
            start = time.perf_counter()
            run(form, experts, x, chosen, scores, out)
            if number:
                least[method] = min(least[method], time.perf_counter() - start)
    return least
