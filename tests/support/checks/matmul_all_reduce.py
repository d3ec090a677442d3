"""Checks of matmul_all_reduce against float64 on one process."""

from __future__ import annotations

import itertools

import torch

import weft
from support.products import DTYPES, assert_sum
from support.ranks import everyones
from weft.schedules.matmul_all_reduce import ALGORITHMS


def every_algorithm(world, rows, dtypes=DTYPES):
    bias = torch.randn(11, generator=torch.Generator().manual_seed(1))
    for dtype, algorithm, chunk, op in itertools.product(
        dtypes, (*ALGORITHMS, "auto"), (None, 3), ("sum", "avg")
    ):
        a, b = (
            torch.randn(rows, 19 + world.rank).to(dtype),
            torch.randn(11, 19 + world.rank).to(dtype).t(),
        )
        options = {"op": op, "bias": bias.to(dtype), "algorithm": algorithm, "chunk_rows": chunk}
        y = weft.matmul_all_reduce(a, weft.pack(b) if chunk else b, **options)
        assert y.dtype == dtype
        assert_sum(y, a, b, lambda x: x, op=op, bias=bias.to(dtype))
        assert all(torch.equal(y, other) for other in everyones(y)), "equal bits on all ranks"
        out = torch.full_like(y, torch.nan)
        assert weft.matmul_all_reduce(a, weft.pack(b) if chunk else b, out=out, **options) is out
        assert torch.equal(out, y), "same bits on every run"


def shapes_and_options(world):
    a3, b = torch.randn(4, 3, 10), torch.randn(10, 6)
    for algorithm in ALGORITHMS:
        y = weft.matmul_all_reduce(a3, b, algorithm=algorithm)
        assert y.shape == (4, 3, 6)
        assert_sum(y, a3, b, lambda x: x)
    for dtype in (torch.float16, torch.bfloat16):
        half, weight = a3.to(dtype), b.to(dtype)
        y = weft.matmul_all_reduce(half, weight, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_sum(y, half, weight, lambda x: x)
    strided = torch.randn(10, 12)[:, ::2].t()
    assert_sum(weft.matmul_all_reduce(strided, b), strided, b, lambda x: x)
