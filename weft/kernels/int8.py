"""The int8 product: rows are quantized when they are multiplied, each with a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import PreparedWeight, check_matrix, check_product
from weft.plan import Kernel
from weft.plan.kernel import Load, Rates, Run

_LARGEST = 127
_BLOCK = 256
"""Rows whose numbers and sums stay in the cache between their steps.

Measured on a 2-core Zen 4: blocks of 64 rows take 1.16 times as long, of 32 rows 1.41, and those of
512 to 2048 rows 0.98 to 1.02 (2048 x 1024 x 1024).
"""


class Int8Product(Kernel):
    """The product of quantized rows by an `Int8Weight`.

    Rounding makes it no linear function of its rows, so the proof knows it by the general `value`
    alone: the product of a sum of rows is not the sum of their products.
    """

    name = "int8_product"

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        numbers, scales = quantized(sources[0])
        wide: Tensor = numbers.double() @ weight.values.double() * scales * weight.scales
        return wide.to(sources[0].dtype)

    def check(self, sources: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        check_product(sources[0], weight, out)

    def prepare(self, sources: Sequence[Tensor], weight: Any, out: Tensor, rows: int) -> Run:
        product: Run = weight.prepare(sources[0], out, rows)
        return product

    def seconds(self, machine: Rates, load: Load) -> float:
        """That of reading the weight, or of a product of 16-bit numbers, whichever is longer."""
        k, n = load.columns
        return max(machine.reduce(k * n), machine.product(load.rows, k, n, "bfloat16", True))


INT8_PRODUCT = Int8Product()


class Int8Weight(PreparedWeight):
    """A weight (K, N) of int8 numbers, `values`, with a float32 scale for each column, `scales`;
    made by `quantize`.
    """

    kernel = INT8_PRODUCT
    words = "int8 with scales"
    rows_multiple = 16  # rows of a tile of AMX

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.values, self.scales = self.tensors = values, scales
        super().__init__(values.shape, dtype)

    def multiply(self, x: Tensor, out: Tensor, bias: Tensor | None, rows: int) -> None:
        """Sums in int32, which are exact, times both scales in float32, rounded once to `out`."""
        if not out.numel():
            return
        for start in range(0, len(x), _BLOCK):
            part = out[start : start + _BLOCK]
            numbers, scales = quantized(x[start : start + _BLOCK])
            product = torch._int_mm(numbers, self.values).float().mul_(scales).mul_(self.scales)
            part.copy_(product if bias is None else product.add_(bias))


def quantize(b: Tensor) -> Int8Weight:
    """Quantize a weight `b` (K, N) to int8, each column by its largest magnitude.

    Operators take the result in place of `b`, for rows of b's dtype. Each row is quantized alike
    when it is multiplied, so both factors have the relative error of a rounding to 8 bits. The
    weight takes a byte for each element. Torch's own operators quantize and multiply, so products
    are not always faster: on a processor with AMX 0.9 times as fast as packed bfloat16 for a row,
    0.5 times for 512. There is no gradient: a call that is recorded is a `ValueError`. Later writes
    to `b` have no effect.

    Raises `ValueError` or `TypeError` if b is no matrix on the CPU of a floating dtype.

    Examples:
        >>> weight = weft.quantize(torch.eye(16))
        >>> with weft.local_world(1) as local:
        ...     [y] = local.run(lambda: weft.all_gather_matmul(torch.ones(2, 16), weight))
        >>> torch.allclose(y, torch.ones(2, 16), rtol=0.01)
        True
    """
    check_matrix(b, "quantize")
    numbers, scales = quantized(b.detach().t())
    return Int8Weight(numbers.t(), scales.view(-1), b.dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 numbers, contiguous, and a float32 scale (rows, 1) for each: its largest
    magnitude divided by 127, or 1 for zeros.
    """
    if not rows.numel():
        return rows.to(torch.int8), torch.ones(
            len(rows), 1, device=rows.device, dtype=torch.float32
        )
    scales = rows.abs().amax(1, keepdim=True).float().div_(_LARGEST)
    scales.masked_fill_(scales == 0, 1.0)
    return (rows.float() / scales).round_().to(torch.int8).contiguous(), scales
