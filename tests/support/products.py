"""The allowed distance of products, and of their sums over ranks, from the exact values: rounding
errors alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support.ranks import everyones

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def assert_product(y: Tensor, x: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """``x @ b (+ bias)``, within the error of one rounding of each product sum: see `weft_tools.bench`
    for the bound.
    """
    exact = x.double() @ b.double() + (0 if bias is None else bias.double())
    unit = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    bound = (x.shape[-1] + 2) * unit * (x.double().abs() @ b.double().abs() + 1) + torch.finfo(
        y.dtype
    ).eps * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all(), (
        f"largest error {(y.double() - exact).abs().max()}"
    )


def assert_sum(
    y: Tensor,
    a: Tensor,
    b: Tensor,
    take: Callable[[Tensor], Tensor],
    *,
    op: str = "sum",
    bias: Tensor | None = None,
) -> None:
    """The part `take` of the sum of all ranks' ``a @ b``, averaged for `op` avg, and `bias`.

    Within the error of one rounding of each product, of each partial product of bfloat16, and of
    the sum.
    """
    pairs = [(x.double(), w.double()) for x, w in zip(everyones(a), everyones(b), strict=True)]
    divisor = len(pairs) if op == "avg" else 1
    added = torch.zeros(()) if bias is None else bias.double()
    exact = take(sum(x @ w for x, w in pairs)) / divisor + added
    size = take(sum(x.abs() @ w.abs() for x, w in pairs)) + added.abs() + 1
    k = sum(x.shape[-1] for x, _ in pairs)
    unit = torch.finfo(torch.float64 if y.dtype == torch.float64 else torch.float32).eps
    rounding = torch.finfo(torch.bfloat16).eps if y.dtype == torch.bfloat16 else 0.0
    bound = (k + 8) * unit * size + rounding * size + torch.finfo(y.dtype).eps * exact.abs()
    error = (y.double() - exact).abs()
    assert (error <= bound).all(), f"largest error {error.max()}"
