"""The product of float16 or bfloat16 matrices by weft's own kernel, computed in float32.

Most processors multiply no 16-bit numbers themselves. The kernel widens them in registers, so few
rows take as long as reading 2 bytes of each element of the weight, and many as long as in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

import weft._native as _native
from weft.checks import name

COLUMNS = _native.panel_columns()
"""The columns of a panel of a packed weight on this processor; 0 if it lacks the instructions."""


def panels(b: Tensor) -> Tensor:
    """A weight (K, N) in panels of `COLUMNS` columns, each with its K rows one after the other."""
    k, n = b.shape
    packed = torch.empty(-(-n // COLUMNS) * k, COLUMNS, dtype=b.dtype, device=b.device)
    _native.pack_panels(b.resolve_neg(), packed)
    return packed


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, packed: bool) -> None:
    """``out = x @ weight (+ bias)``; a `packed` weight consists of `panels`."""
    x = (x if x.stride(1) == 1 else x.contiguous()).resolve_neg()
    added = None if bias is None else bias.float().contiguous().resolve_neg()
    _native.half_product(
        x,
        weight,
        out,
        0 if added is None else added.data_ptr(),
        _DTYPES[x.dtype],
        _DTYPES[out.dtype],
        packed,
    )


_DTYPES = {
    dtype: getattr(_native.Dtype, name(dtype))
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
