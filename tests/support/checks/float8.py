"""Checks of products of float8 inputs with scales, against float64 on one process."""

from __future__ import annotations

import torch

import weft
from support.ranks import everyones
from weft.kernels.weights import FLOAT8

OUT = (torch.float32, torch.bfloat16, torch.float16)


def assert_close(y, exact):
    torch.testing.assert_close(
        y.double(), exact, rtol=2 * torch.finfo(y.dtype).eps, atol=1e-4 * exact.abs().max().item()
    )


def products(world, by_row):
    for dtype, k in zip(FLOAT8, (13, 16), strict=True):
        a, b = torch.randn(3, 4, k).to(dtype), torch.randn(k, 6).to(dtype)
        scale_a = torch.rand(3, 4, 1) + 0.5 if by_row else torch.rand(()) + 0.5
        scale_b = torch.rand(1, 6) + 0.5 if by_row else torch.rand(1) + 0.5
        x, w = a.double() * scale_a.double(), b.double() * scale_b.double()
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        bias = torch.randn(6, generator=torch.Generator().manual_seed(2))
        for dim in (0, 1):
            whole = torch.cat(everyones(x), dim)
            for algorithm in ("direct", "pull", "push", "ring", "sequential"):
                y, g = weft.all_gather_matmul(
                    a, b, dim=dim, algorithm=algorithm, return_gathered=True, **scales
                )
                assert y.dtype == torch.bfloat16
                assert_close(y, whole @ w)
                assert g.double().equal(torch.cat(everyones(a.double()), dim))
        total = (
            sum(one @ other for one, other in zip(everyones(x), everyones(w), strict=True))
            + bias.double()
        )
        for out_dtype in OUT:
            y = weft.matmul_all_reduce(a, b, bias=bias, out_dtype=out_dtype, **scales)
            assert_close(y, total)
            for algorithm in ("direct", "push", "ring", "sequential"):
                y = weft.matmul_reduce_scatter(
                    a, b, dim=1, bias=bias, out_dtype=out_dtype, algorithm=algorithm, **scales
                )
                assert_close(y, total.narrow(1, 2 * world.rank, 2))
