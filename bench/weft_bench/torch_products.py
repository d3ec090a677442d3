"""How torch multiplies where it is measured: on a CPU in float32 where it has no fast product of a
dtype, as on processors without instructions for bfloat16; on a GPU with sums in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

_SLOW = 8.0
"""A product that takes this many times as long as in float32 is by no kernel made for its dtype."""
_ROWS, _WIDTH = 64, 512
_RUNS = 3  # after one that makes the kernel
_REDUCED = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which baselines multiply operands of `dtype`."""
    return torch.float32 if slowdown(dtype) > _SLOW else dtype


def sentence(dtype: torch.dtype) -> str:
    """Why baselines multiply in another dtype than theirs, "" if they do not."""
    if computed_in(dtype) == dtype:
        return ""
    name = str(dtype).removeprefix("torch.")
    return (
        f"torch has no fast {name} product on this processor: of {_ROWS} rows torch.mm takes "
        f"{slowdown(dtype):.0f} times as long as in float32. So the baselines multiply in float32."
    )


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """How many times as long as in float32 ``torch.mm`` takes for a product of few rows."""
    if dtype not in (torch.float16, torch.bfloat16):
        return 1.0
    return _seconds(dtype) / _seconds(torch.float32)


@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> float:
    x, b = (torch.randn(rows, _WIDTH, device="cpu").to(dtype) for rows in (_ROWS, _WIDTH))
    times = []
    for _ in range(1 + _RUNS):
        start = perf_counter()
        torch.mm(x, b)
        times.append(perf_counter() - start)
    return min(times[1:])


@contextmanager
def sums_in_float32(on: bool = True) -> Iterator[None]:
    """Products of half precision on GPUs add in float32 only, in all threads; if not `on`, partial
    sums may be rounded, as is torch's default.

    With rounded partial sums (cuBLAS may cut K in several) the error of a right product has no
    useful bound: results that are verified are therefore made without them, torch's and weft's,
    which multiplies by torch too.
    """
    settings = torch.backends.cuda.matmul
    before = [getattr(settings, name) for name in _REDUCED]
    for name in _REDUCED:
        setattr(settings, name, not on)
    try:
        yield
    finally:
        for name, value in zip(_REDUCED, before, strict=True):
            setattr(settings, name, value)
