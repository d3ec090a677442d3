"""Copies of rows by a kernel, on a number of SMs that the caller sets: puts and gets, between any
two addresses that this rank may access.

The copy engine is free for other copies meanwhile, and rows may have any strides; the SMs that
copy are missed by products. A unit is the widest word that divides the rows, their strides and both
addresses: 16, 8, 4, 2 or 1 byte. A thread moves several units before it needs the first, and rows
without gaps are one row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SMS = 16
"""The default number of programs, each on its own SM; measured by no GPU."""

TILE = 2048
"""Units that a program loads at once, by 8 warps: eight a thread, 32 KiB in units of 16 bytes. It
has no more in flight.
"""

_WORDS = {16: tl.int32, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""The types of the words of units of these bytes; a unit of 16 bytes is four words."""


class RowsInMemory(NamedTuple):
    """`number` rows of `size` bytes, and the bytes from the beginning of one to that of the next,
    in the target and in the source.
    """

    number: int
    size: int
    dst_stride: int
    src_stride: int


def copy_rows(dst: Tensor, src: Tensor, rows: RowsInMemory, sms: int) -> None:
    """Copy the rows that begin at the first elements of these tensors, on the current stream, by at
    most `sms` programs.
    """
    addresses = dst.data_ptr() | src.data_ptr()
    unit = math.gcd(16, addresses, rows.size, rows.dst_stride, rows.src_stride)
    units = rows.number * rows.size // unit
    grid = max(1, min(sms, triton.cdiv(units, TILE)))
    _launch(dst, src, unit, units, RowsInMemory(*rows[:1], *(n // unit for n in rows[1:])), grid)


def load(device: torch.device) -> None:
    """Compile and load the kernel for every unit, which may wait for all work of the device."""
    nothing = torch.empty(16, dtype=torch.uint8, device=device)
    for unit in _WORDS:
        _launch(nothing, nothing, unit, 0, RowsInMemory(1, 1, 1, 1), 1)


def _launch(dst: Tensor, src: Tensor, unit: int, units: int, rows: RowsInMemory, grid: int) -> None:
    kernel: Any = copy_vectors_kernel if unit == 16 else copy_words_kernel
    target, source = (triton.reinterpret(tensor, _WORDS[unit]) for tensor in (dst, src))
    options = {"WORDS": 4 if unit == 16 else 1, "TILE": TILE, "num_warps": 8}
    kernel[(grid,)](target, source, units, *rows[1:], **options)


def _copy_rows(
    dst,
    src,
    units: tl.int64,  # of all rows
    size: tl.int64,  # units of a row
    dst_stride: tl.int64,  # in units
    src_stride: tl.int64,
    WORDS: tl.constexpr,  # of a unit
    TILE: tl.constexpr,
):
    words = tl.arange(0, WORDS)[None, :]
    start, every = tl.program_id(0).to(tl.int64) * TILE, tl.num_programs(0).to(tl.int64) * TILE
    if size == units:  # one row: no division for each unit
        while start < units:
            unit = (start + tl.arange(0, TILE))[:, None]
            within = unit * WORDS + words
            tl.store(dst + within, tl.load(src + within, mask=unit < units), mask=unit < units)
            start += every
    else:
        while start < units:
            unit = (start + tl.arange(0, TILE))[:, None]
            row = unit // size
            to = (unit + row * (dst_stride - size)) * WORDS + words
            at = (unit + row * (src_stride - size)) * WORDS + words
            tl.store(dst + to, tl.load(src + at, mask=unit < units), mask=unit < units)
            start += every


_SIZES = ["units", "size", "dst_stride", "src_stride"]
copy_vectors_kernel = triton.jit(_copy_rows, do_not_specialize=_SIZES)
# one compilation for all addresses, aligned or not
copy_words_kernel = triton.jit(
    _copy_rows, do_not_specialize=_SIZES, do_not_specialize_on_alignment=["dst", "src"]
)
