"""How torch multiplies where it is measured: on a CPU in float32, there and back, where that is
faster than its own product of a dtype, as on processors without instructions for bfloat16; on a GPU
with sums in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

_SLOWER = 1.2  # times as long as by float32: less is noise
_ROWS, _WIDTH = 64, 512
_RUNS = 3  # after one that makes the kernel
_REDUCED = "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"


_chosen: torch.dtype | None = None


@contextmanager
def multiplying_in(dtype: torch.dtype) -> Iterator[None]:
    """Baselines that are made in this context multiply in `dtype`."""
    global _chosen
    _chosen = dtype
    try:
        yield
    finally:
        _chosen = None


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which baselines multiply operands of `dtype`: the chosen one, or the faster."""
    return _chosen or faster(dtype, slowdown(dtype))


def faster(dtype: torch.dtype, slowdown: float) -> torch.dtype:
    """`dtype`, or float32 if that is faster."""
    return torch.float32 if slowdown > _SLOWER else dtype


def sentence(dtype: torch.dtype, slowdown: float) -> str:
    """Why baselines multiply in float32."""
    name = str(dtype).removeprefix("torch.")
    return (
        f"torch has no fast {name} product on this processor: of {_ROWS} rows torch.mm takes "
        f"{slowdown:.1f} times as long as a conversion to float32, torch.mm and a conversion back. "
        "Ratios are to baselines that do that, the fastest that torch has."
    )


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """How many times as long as by float32, there and back, ``torch.mm`` takes for a product of few
    rows.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return 1.0
    return _seconds(dtype, dtype) / _seconds(dtype, torch.float32)


@torch.inference_mode()
def _seconds(dtype: torch.dtype, multiplied_in: torch.dtype) -> float:
    """The time of a product of operands of `dtype`, of which the weight is converted ahead."""
    x, b = (torch.randn(rows, _WIDTH, device="cpu").to(dtype) for rows in (_ROWS, _WIDTH))
    wide, times = b.to(multiplied_in), list[float]()
    for _ in range(1 + _RUNS):
        start = perf_counter()
        torch.mm(x.to(multiplied_in), wide).to(dtype)
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
