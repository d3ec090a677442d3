"""The int8 product: rows are quantized when they are multiplied, each with its own scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.weights import PreparedWeight, WeightKernel, check_matrix
from weft.plan.kernel import Load, Rates

_LARGEST = 127
_EXACT = (2**31 - 1) // _LARGEST**2
"""Columns whose products have a sum in int32, however large they are."""
_LEAST = 2.0**-126
"""The least scale, float32's smallest normal number: below it numbers divided by their scale are
beyond 127."""
_GREATEST = 2.0**90
"""Scales up to which an int32 sum times both has no infinite float32 as an intermediate."""
_BLOCK = 256
"""Rows whose numbers and sums stay in the cache between their steps.

Measured on a 2-core Zen 4: blocks of 64 rows take 1.16 times as long, of 32 rows 1.41, and those of
512 to 2048 rows 0.98 to 1.02 (2048 x 1024 x 1024).
"""


class Int8Product(WeightKernel):
    """The product of quantized rows by an `Int8Weight`.

    Rounding makes it no linear function of its rows, so the proof knows it by the general `value`
    alone: the product of a sum of rows is not the sum of their products.
    """

    name = "int8_product"

    def compute(self, sources: Sequence[Tensor], weight: Any) -> Tensor:
        numbers, scales = quantized(sources[0])
        wide: Tensor = numbers.double() @ weight.values.double() * scales * weight.scales
        return wide.to(sources[0].dtype)

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

    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        """Exact sums times both scales in float32, or in float64 if intermediates might be
        infinite, rounded once to `out`.
        """
        if not out.numel():
            return
        (x,) = sources
        for start in range(0, len(x), _BLOCK):
            part = out[start : start + _BLOCK]
            numbers, scales = quantized(x[start : start + _BLOCK])
            product = exact_sums(numbers, self.values)
            if product.dtype == torch.int32 and scales.max().item() <= _GREATEST:
                product = product.float().mul_(scales).mul_(self.scales)
            else:
                product = product.double().mul_(scales).mul_(self.scales)
            part.copy_(product if bias is None else product.add_(bias))


def exact_sums(x: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of numbers from -127 to 127, exact: in int32, or in float64 if x
    has more columns than int32 has sums for.
    """
    product = _int32_product()
    if x.shape[1] <= _EXACT:
        return product(_laid_out(x), _laid_out(b))
    parts = zip(x.split(_EXACT, 1), b.split(_EXACT, 0), strict=True)
    sums = torch.zeros(len(x), b.shape[1], dtype=torch.float64, device=x.device)
    for own, other in parts:
        sums.add_(product(_laid_out(own.contiguous()), _laid_out(other)))
    return sums


def _laid_out(matrix: Tensor) -> Tensor:
    """A matrix whose strides are those of its layout. A dimension of size 1 may have any, but torch
    takes them for the distance of rows or columns: where that is less than a row, `torch._int_mm`
    writes nothing.
    """
    if 1 not in matrix.shape or matrix.stride() == (matrix.shape[1], 1):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _in_halves(x: Tensor, b: Tensor) -> Tensor:
    """A product of int8 numbers as that of the negative ones less that of the negated others.

    Without instructions for it oneDNN multiplies bytes as ``x + 128``, and adds up two products in
    16 bits, which saturate: these of numbers up to 0 do not.
    """
    return torch._int_mm(x.clamp(max=0), b).sub_(torch._int_mm(x.neg().clamp_(max=0), b))


def _in_float64(x: Tensor, b: Tensor) -> Tensor:
    return (x.double() @ b.double()).int()


@functools.cache
def _int32_product() -> Callable[[Tensor, Tensor], Tensor]:
    """The fastest exact product of int8 numbers on this processor: torch's own is not where it
    saturates.
    """
    signs = torch.tensor([[1], [-1]], dtype=torch.int8, device="cpu")
    rows = torch.full((2, 256), _LARGEST, dtype=torch.int8, device="cpu") * signs
    columns = rows.repeat(8, 1).t()
    factors = (
        (rows, columns),
        (rows, columns.contiguous()),
        (_laid_out(rows[:, :1]), _laid_out(columns[:1])),
    )
    return next(
        product
        for product in (torch._int_mm, _in_halves, _in_float64)
        if all(product(x, b).equal(_in_float64(x, b)) for x, b in factors)
    )


def quantize(b: Tensor) -> Int8Weight:
    """Quantize a weight `b` (K, N) to int8, each column by its largest magnitude.

    Operators take the result in place of `b`, for rows of b's dtype. Each row is quantized alike
    when it is multiplied, so both factors have the relative error of a rounding to 8 bits, or are
    within 2^-127 of the original. A row, or a column of `b`, with an infinity or a NaN is NaN. Sums
    are exact, however many columns a row has. The weight takes a byte for each element. Torch's own
    operators quantize and multiply, so products are not always faster: on a processor with AMX 0.9
    times as fast as packed bfloat16 for a row, 0.5 times for 512. There is no gradient: a call that
    is recorded is a `ValueError`. Later writes to `b` have no effect.

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
    return Int8Weight(_laid_out(numbers.t()), scales.view(-1), b.dtype)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8 numbers, laid out one after another, and a float32 scale (rows, 1) for each: its
    largest magnitude divided by 127, but at least float32's smallest normal number. The scale of a
    row with an infinity or a NaN, in float32, is NaN.
    """
    if not rows.numel():
        return rows.to(torch.int8), torch.ones(
            len(rows), 1, device=rows.device, dtype=torch.float32
        )
    scales = rows.abs().amax(1, keepdim=True).float().div_(_LARGEST).clamp_(min=_LEAST)
    scales.add_(scales, alpha=0)  # zero times an infinity is NaN
    return torch.empty_like(rows, dtype=torch.int8, memory_format=torch.contiguous_format).copy_(
        (rows.float() / scales).round_()
    ), scales
