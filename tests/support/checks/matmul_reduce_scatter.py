"""Checks of matmul_reduce_scatter against float64 on one process."""

from __future__ import annotations

import itertools

import pytest
import torch

import weft
from support.products import DTYPES, assert_sum
from weft.schedules.matmul_reduce_scatter import ALGORITHMS


def every_algorithm(world, rows, k, n, dtypes=DTYPES):
    start, own = sum(rows[: world.rank]), rows[world.rank]
    for dtype, (algorithm, chunk) in itertools.product(
        dtypes, itertools.product(ALGORITHMS, (None, 3))
    ):
        a = torch.randn(sum(rows), k + world.rank).to(dtype)
        b = torch.randn(k + world.rank, n).to(dtype)
        options = {"shard_rows": rows, "algorithm": algorithm, "chunk_rows": chunk}
        y = weft.matmul_reduce_scatter(a, b, **options)
        assert y.dtype == dtype
        assert_sum(y, a, b, lambda x: x[start : start + own])
        out = torch.full_like(y, torch.nan)
        assert weft.matmul_reduce_scatter(a, weft.pack(b), out=out, op="avg", **options) is out
        assert_sum(out, a, b, lambda x: x[start : start + own], op="avg")


def shapes_and_options(world):
    take = slice(3 * world.rank, 3 * world.rank + 3)
    for dtype in (torch.float16, torch.bfloat16):
        a, b = torch.randn(6, 50).to(dtype), torch.randn(50, 7).to(dtype)
        y = weft.matmul_reduce_scatter(a, b, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_sum(y, a, b, lambda x: x[take])
    strided = torch.randn(10, 12)[:, ::2].t()  # no row is contiguous
    b = torch.randn(10, 7)
    assert_sum(weft.matmul_reduce_scatter(strided, b), strided, b, lambda x: x[take])
    padded = torch.randn(6, 16)[:, :10]  # rows with gaps
    assert_sum(weft.matmul_reduce_scatter(padded, b), padded, b, lambda x: x[take])
    nothing = torch.randn(6, 0 if world.rank else 4), torch.randn(0 if world.rank else 4, 7)
    assert_sum(weft.matmul_reduce_scatter(*nothing), *nothing, lambda x: x[take])
    assert weft.matmul_reduce_scatter(torch.randn(6, 4), torch.randn(4, 0)).shape == (3, 0)


def back_to_back(world, algorithm):
    """Hundreds of calls without a barrier, with different sizes in between; every element of every
    result is checked.
    """
    generator = torch.Generator().manual_seed(5)
    for call in range(150):
        rows = [6, 1, 33][call % 3]
        everyone = [
            torch.randint(0, 2, (rows * world.ranks, 16), generator=generator).float()
            for _ in range(world.ranks)
        ]
        weights = [
            torch.randint(0, 2, (16, 8), generator=generator).float() for _ in range(world.ranks)
        ]
        chosen = ALGORITHMS[call % len(ALGORITHMS)] if algorithm == "mixed" else algorithm
        y = weft.matmul_reduce_scatter(everyone[world.rank], weights[world.rank], algorithm=chosen)
        total = sum(a @ b for a, b in zip(everyone, weights, strict=True))
        assert torch.equal(y, total[rows * world.rank :][:rows]), f"call {call}"


def different_calls(world):
    with pytest.raises(weft.MismatchError):
        weft.matmul_reduce_scatter(torch.randn(4, 6), torch.randn(6, 5 + world.rank))
