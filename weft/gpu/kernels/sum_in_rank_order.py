"""A sum of parts in their order, in float32, rounded once, in one pass over all parts.

The result is bitwise equal on every run, in any order of arrival, and on every rank that adds the
same parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BLOCK = 2048  # elements of the result that a program computes at once; measured by no GPU


class SumKernel:
    """``out = parts[0] + parts[1] + …``, or their average, for parts with fixed addresses; created
    once, called for every sum.
    """

    def __init__(self, parts: list[Tensor], average: bool, programs: int) -> None:
        self.parts = parts
        self.programs = programs
        steps = [(part.data_ptr() - parts[0].data_ptr()) // 16 for part in parts]
        self.steps = torch.tensor(steps, dtype=torch.int64, device="cpu").to(parts[0].device)
        self.options = {"PARTS": len(parts), "AVERAGE": average, "BLOCK": _BLOCK}

    @staticmethod
    def fits(parts: list[Tensor], out: torch.dtype) -> bool:
        """Whether the kernel can add these up: contiguous floats of one dtype, which begin at
        multiples of 16 bytes.
        """
        dtype = parts[0].dtype
        uniform = all(
            p.dtype == dtype and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in parts
        )
        return uniform and dtype in DTYPES and out in DTYPES

    def __call__(self, out: Tensor, idle: bool = False) -> None:
        """Put the sum into `out`, contiguous, on the current stream; an `idle` kernel is loaded and
        does nothing.
        """
        kernel: Any = sum_in_rank_order_kernel
        grid = (max(1, min(self.programs, triton.cdiv(out.numel(), _BLOCK))),)
        kernel[grid](self.parts[0], self.steps, out, out.numel(), int(idle), **self.options)


@triton.jit(do_not_specialize=["idle"])
def sum_in_rank_order_kernel(
    parts,  # address of the first part
    steps,  # int64 (PARTS,): offset of each part from the first, in units of 16 bytes
    out,
    size,
    idle,
    PARTS: tl.constexpr,
    AVERAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if idle != 0:
        return
    pointers = ()
    for part in tl.static_range(PARTS):
        pointers = pointers + (
            parts + tl.load(steps + part) * (128 // parts.dtype.element_ty.primitive_bitwidth),
        )
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        total = tl.load(pointers[0] + offsets, mask=inside).to(tl.float32)  # type: ignore[misc]
        for part in tl.static_range(1, PARTS):
            total += tl.load(pointers[part] + offsets, mask=inside).to(tl.float32)
        if AVERAGE:
            total = tl.div_rn(total, PARTS * 1.0)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK
