"""The numbers that rows have after they have travelled compressed, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.checks import name
from weft.plan.compression import BLOCK

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of rows that may travel compressed."""


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `TypeError` unless rows of this dtype may travel compressed."""
    if dtype not in DTYPES:
        raise TypeError(
            f"rows of {', '.join(map(name, DTYPES))} can be compressed; these are {name(dtype)}: "
            "omit compress"
        )


_DIGITS = 6  # a step is 2^-6 of the power of two that is next below the largest number of a block
_LEAST = -126  # the exponent of the smallest step


def rounded(rows: Tensor) -> Tensor:
    """The rows (rows, columns) as they arrive if they travel as ``int8``: in each block of 32
    numbers of a row, and in the rest of it, a number is rounded to a multiple of the block's step,
    to the nearest or, halfway, the even one, and to at most 127 steps. The step is a power of two,
    1/64 of the one that is next below the largest number. A block with an infinity or a NaN is NaN.

    Numbers that were rounded before are the same.
    """
    count, columns = rows.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(rows.float(), (0, blocks * BLOCK - columns))
    padded = padded.view(count, blocks, BLOCK)
    largest = padded.abs().amax(2, keepdim=True)
    _, exponent = torch.frexp(largest)  # of a number in [1/2, 1) times the power of two
    step = torch.ldexp(torch.ones_like(largest), (exponent - 1 - _DIGITS).clamp(min=_LEAST))
    steps = (padded / step).round().clamp(-127, 127)
    made = torch.where(largest.isfinite(), steps * step, torch.nan)
    return made.view(count, blocks * BLOCK)[:, :columns].to(rows.dtype)
