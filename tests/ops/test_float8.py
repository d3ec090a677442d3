"""Float8 inputs with scales, on real ranks, against float64 on one process."""

from __future__ import annotations

import pytest
import torch
from support.checks.float8 import assert_close, products
from support.ranks import everyones, on_ranks

import weft


@pytest.mark.data
@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_products(by_row):
    on_ranks(products, 2, by_row)


def any_strides(world):
    """Scales of rows as callers compute them: of no row, or a transposed row of scales."""
    rows = [2, 0]
    x, row = torch.randn(rows[world.rank], 4), torch.rand(1, rows[world.rank]) + 0.5
    a, b = x.to(torch.float8_e4m3fn), torch.randn(4, 3).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    for scale in (row.t(), row.t().abs().amax(1, keepdim=True) / 448, row.flatten()[:, None]):
        y = weft.all_gather_matmul(
            a, b, scale_a=scale, scale_b=one, shard_rows=rows, out_dtype=torch.float32
        )
        assert_close(y, torch.cat(everyones(a.double() * scale)) @ b.double())


def test_scales_with_any_strides():
    on_ranks(any_strides, 2)


def several(world):
    a, b, c = (torch.randn(*shape).to(torch.float8_e4m3fn) for shape in ((4, 8), (8, 6), (8, 2)))
    one, two = torch.tensor(1.0), torch.full((1, 2), 2.0)
    y, z = weft.all_gather_matmul(
        a, [b, c], scale_a=one, scale_b=[one, two], out_dtype=torch.float32
    )
    whole = torch.cat(everyones(a.double()))
    assert_close(y, whole @ b.double())
    assert_close(z, 2 * whole @ c.double())


@pytest.mark.data
def test_several_weights():
    on_ranks(several, 2)


def refused(world):
    a, b = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.randn(8, 6).to(torch.float8_e4m3fn)
    scales = {"scale_a": torch.tensor(1.0), "scale_b": torch.tensor(1.0)}
    bad = [
        (ValueError, "float8 inputs need scales: give scale_b", (a, b), {}),
        (
            ValueError,
            "float8 inputs need scales: give scale_a",
            (a, b),
            {"scale_b": torch.tensor(1.0)},
        ),
        (TypeError, "supported are float8_e4m3fn", (a.float(), b), scales),
        (TypeError, "b has dtype float32; supported are float8_e4m3fn", (a, b.float()), scales),
        (
            ValueError,
            r"scale_a must be float32, a single one or of shape \(4, 1\)",
            (a, b),
            {**scales, "scale_a": torch.ones(3, 1)},
        ),
        (
            ValueError,
            "scale_b must be float32",
            (a, b),
            {**scales, "scale_b": torch.ones(1, 6).double()},
        ),
        (
            TypeError,
            "out_dtype must be bfloat16, float16 or float32",
            (a, b),
            {**scales, "out_dtype": torch.float64},
        ),
        (ValueError, "a has 8 columns and b 6 rows", (a, b.t()), scales),
    ]
    for operator in (weft.all_gather_matmul, weft.matmul_reduce_scatter, weft.matmul_all_reduce):
        for kind, message, arguments, options in bad:
            with pytest.raises(kind, match=message):
                operator(*arguments, **options)
    with pytest.raises(ValueError, match="cannot be gathered along K"):
        weft.all_gather_matmul(a, b, dim=1, **scales)
    with pytest.raises(ValueError, match="cannot be scattered along their last dimension"):
        weft.matmul_reduce_scatter(a, b, dim=1, **scales)
    with pytest.raises(ValueError, match="no gradient"):
        weft.matmul_all_reduce(
            a, b, scale_a=torch.ones(1, requires_grad=True), scale_b=torch.ones(1)
        )


def test_invalid_scales_are_refused():
    on_ranks(refused, 2)


def explained(world):
    a, b = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.randn(8, 6).to(torch.float8_e4m3fn)
    return weft.explain(a, b, scale_a=torch.tensor(1.0), scale_b=torch.tensor(1.0))


def test_an_explanation_names_the_scales():
    assert all("b is float8 with scales" in text for text in on_ranks(explained, 2))
