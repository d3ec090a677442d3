"""Weights that are functions: any callable that multiplies rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.kernels.weights import DTYPES, PreparedWeight


class FunctionWeight(PreparedWeight):
    """A weight (K, N) that is multiplied by a function; made by `weight`."""

    words = "a function"

    def __init__(
        self,
        product: Callable[..., object],
        shape: Sequence[int],
        dtype: torch.dtype,
        rows_multiple: int,
    ) -> None:
        self.product, self.rows_multiple = product, rows_multiple
        super().__init__(shape, dtype)

    def multiply(
        self, sources: Sequence[Tensor], out: Tensor, bias: Tensor | None, rows: int
    ) -> None:
        if out.numel():
            self.product(*sources, out)
            if bias is not None:
                out.add_(bias)


def weight(
    product: Callable[[Tensor, Tensor], object],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    rows_multiple: int = 1,
) -> FunctionWeight:
    """A weight (K, N) of which only the product is known: that of a quantised linear layer, of a
    third party's kernel, or of any function in Python. Operators take it in place of `b`.

    Args:
        product: ``product(rows, out)`` writes the products of `rows` (n, K) of `dtype` to `out`
            (n, N), of the result's dtype or of the dtype in which it is summed (float32); its
            result is ignored. It gets some of a's rows at a time, n ≥ 1, so each row of `out` must
            depend on the same row of `rows` alone. The columns of a row are contiguous, rows may
            have gaps between them. It is called on the caller's thread, in the middle of a
            collective: an exception closes the world. A bias of the call is added to `out`.
        shape: (K, N).
        dtype: of the rows of a: float16, bfloat16, float32 or float64.
        rows_multiple: a hint: rows are passed in multiples of this number as far as rows of a rank
            divide. All ranks must give the same number.

    There is no gradient: a call that is recorded is a `ValueError`. Raises `ValueError` or
    `TypeError` for invalid arguments.

    Examples:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> def product(rows, out):
        ...     out.copy_(layer(rows))
        >>> linear = weft.weight(product, (8, 4), torch.float32)
        >>> with torch.no_grad(), weft.local_world(1) as local:
        ...     [y] = local.run(lambda: weft.all_gather_matmul(torch.ones(2, 8), linear))
        >>> y.shape
        torch.Size([2, 4])
    """
    if not callable(product):
        raise TypeError(
            f"product must be a function product(rows, out); got {type(product).__name__}"
        )
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"shape must be (K, N); got {tuple(shape)}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64; got {dtype}")
    if rows_multiple < 1:
        raise ValueError(f"rows_multiple must be at least 1; got {rows_multiple}")
    return FunctionWeight(product, shape, dtype, rows_multiple)
