"""Caches of measurements of tests' own."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.kernels import fastest


def own_cache(folder: str | Path, *dtypes: torch.dtype) -> None:
    """Store measurements in `folder` from now on, but those of products of float32, and of other
    `dtypes` with results of the same and of float32, in the cache of all tests: they take seconds.
    """
    for dtype in (torch.float32, *dtypes):
        for out_dtype in (dtype, torch.float32):
            fastest.method(dtype, out_dtype, "plain", 1, 1)
    os.environ["WEFT_CACHE"] = str(folder)
