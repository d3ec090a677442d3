"""The local matrix product on a CPU: ``out = x @ weight (+ bias)``, by the fastest of several
methods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels import fastest
from weft.kernels.methods import METHODS, mm
from weft.kernels.weights import Product, Weight, transposed

_SMALL = 1 << 18
"""Multiply-adds up to which float32 goes to `torch.mm`, whose call takes the least time.

Measured on a 2-core Zen 4: one row by 256 x 256 takes 5 us, by oneDNN 26; by 512 x 512, which is
the limit, 22 and 62.
"""


def multiply(
    x: Tensor, weight: Weight, out: Tensor, bias: Tensor | None = None, rows: int | None = None
) -> None:
    """``out = x @ weight (+ bias)`` for x (n, K), weight (K, N), bias (N,) and out (n, N).

    If x is a part of a call of more `rows`, all its parts use one method, so the number of parts
    does not matter.

    The rows of `x` or its columns are contiguous. `x` and `weight` have one dtype; `out` has it
    too, or is float32. Sums are accumulated in float32 (float64 for float64) and rounded once to
    the dtype of `out`. The result depends on nothing but the arguments and the machine. A
    `PreparedWeight` multiplies as it documents.
    """
    prepare(x, weight, out, rows)(x, weight, out, bias)


def prepare(x: Tensor, weight: Weight, out: Tensor, rows: int | None = None) -> Product:
    """The product of operands with these layouts, as `multiply` computes it."""
    rows = rows or x.shape[0]
    if not isinstance(weight, Tensor):
        return weight.prepare([x], out, rows)
    layout = "transposed" if transposed(weight) else "plain"
    method = METHODS[select(x, weight.shape, out, rows, layout)]
    if method.run is mm:
        return mm
    form, run = method.form, method.run
    return lambda x, weight, out, bias: run(x, form(weight), out, bias, False)


def select(x: Tensor, shape: tuple[int, ...], out: Tensor, rows: int, layout: str) -> str:
    """The name of the fastest method; `layout` is that of the weight."""
    (n, k), columns = x.shape, shape[1]
    if not (n and k and columns):
        return "empty"
    if rows * k * columns <= _SMALL and x.dtype is out.dtype is torch.float32:
        # torch 2.9 takes a column of bfloat16 for one without gaps
        return "mm" if columns > 1 else "mm column"
    # a transposed x, as for the gradient of a weight, decides whatever the layout of the weight
    name = fastest.method(
        x.dtype, out.dtype, "columns" if transposed(x) else layout, rows, k * columns
    )
    return "mm column" if name == "mm" and columns == 1 else name
