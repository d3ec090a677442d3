"""Matmul + reduce-scatter on real ranks, against float64 on one process."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from support import sums
from support.checks.matmul_reduce_scatter import (
    back_to_back,
    different_calls,
    every_algorithm,
    shapes_and_options,
)
from support.products import DTYPES, assert_sum
from support.ranks import on_ranks

import weft
from weft.plan.binding import split
from weft.schedules.matmul_all_reduce import ALGORITHMS as ALL_REDUCES
from weft.schedules.matmul_reduce_scatter import ALGORITHMS
from weft.schedules.workload import ORDERS


@pytest.mark.data
@pytest.mark.parametrize(
    "rows", [[8, 8], [40, 37], [5, 0, 9], [0, 4, 4], [3, 5, 2, 4], [0, 0, 6, 0]], ids=str
)
def test_every_algorithm_and_dtype(rows):
    on_ranks(every_algorithm, len(rows), rows, 19, 11)


@pytest.mark.parametrize("rows", [[7], [0], [0, 0]], ids=str)
def test_without_elements_to_sum(rows):
    on_ranks(every_algorithm, len(rows), rows, 19, 11)


def every_dimension(world):
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1))
    for dtype, dim, op in itertools.product(DTYPES, (0, 1, 2, -1), ("sum", "avg")):
        a, b = torch.randn(12, 24, 10).to(dtype), torch.randn(12, 10).to(dtype).t()
        part = [12, 24, 12][dim] // world.ranks
        for algorithm in (*ALGORITHMS, "auto"):
            y = weft.matmul_reduce_scatter(
                a, b, dim=dim, op=op, bias=bias.to(dtype), algorithm=algorithm
            )
            assert y.is_contiguous()
            of_part = (
                bias.to(dtype)[world.rank * part :][:part] if dim in (2, -1) else bias.to(dtype)
            )
            take = partial(torch.narrow, dim=dim, start=world.rank * part, length=part)
            assert_sum(y, a, b, take, op=op, bias=of_part)
            again = weft.matmul_reduce_scatter(
                a,
                b,
                dim=dim,
                op=op,
                bias=bias.to(dtype),
                algorithm=algorithm,
                out=torch.full_like(y, torch.nan),
            )
            assert torch.equal(again, y), "same bits on every run"


@pytest.mark.data
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_dimension(ranks):
    on_ranks(every_dimension, ranks)


def test_every_dimension_of_one_rank():
    on_ranks(every_dimension, 1)


@pytest.mark.data
def test_shapes_and_options():
    on_ranks(shapes_and_options, 2)


@pytest.mark.data
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "mixed"])
def test_calls_back_to_back_without_barriers(algorithm):
    on_ranks(back_to_back, 3, algorithm)


def in_rank_order(world):
    """Sums are added up in rank order and rounded once, by every algorithm; products of one column
    and row are exact.
    """
    ranks, rows, columns = range(world.ranks), 61, 24
    kept = split(rows, world.ranks)
    for dtype, out_dtype in sums.FUSED:
        a = [sums.numbers(rank, rows, 1, dtype=dtype) for rank in ranks]
        b = [sums.numbers(rank + 50, 1, columns, dtype=dtype) for rank in ranks]
        products = [sums.products(*pair, out_dtype) for pair in zip(a, b, strict=True)]
        wanted = sums.once(products, ranks, 0, out_dtype)
        mine, options = (a[world.rank], b[world.rank]), {"out_dtype": out_dtype, "chunk_rows": 5}
        for algorithm in ("auto", *ALGORITHMS):
            y = weft.matmul_reduce_scatter(*mine, shard_rows=kept, algorithm=algorithm, **options)
            assert torch.equal(y, wanted.split(kept)[world.rank]), (algorithm, dtype, out_dtype)
        for order in ORDERS:
            y = weft.matmul_reduce_scatter(
                *mine, shard_rows=kept, algorithm="push", order=order, **options
            )
            assert torch.equal(y, wanted.split(kept)[world.rank]), (order, dtype, out_dtype)
        for algorithm in ("auto", *ALL_REDUCES):
            assert torch.equal(
                weft.matmul_all_reduce(*mine, algorithm=algorithm, **options), wanted
            ), (algorithm, dtype, out_dtype)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_in_rank_order(ranks):
    on_ranks(in_rank_order, ranks)


def emulated(world):
    a, b = torch.randn(16, 4), torch.randn(4, 4)
    world.emulate_link(0.01, 50)
    with pytest.raises(ValueError, match="direct moves no rows"):
        weft.matmul_reduce_scatter(a, b, algorithm="direct")
    assert "ranks: sequential" in weft.explain(a, b, operator="matmul_reduce_scatter")
    text = weft.explain(torch.randn(512, 4), b, operator="matmul_reduce_scatter")
    assert "ranks: push" in text
    assert "direct" not in text
    for algorithm in ("push", "ring", "sequential"):
        y = weft.matmul_reduce_scatter(a, b, algorithm=algorithm)
        assert_sum(y, a, b, lambda x: x[8 * world.rank :][:8])


@pytest.mark.data
def test_an_emulated_link():
    on_ranks(emulated, 2)


def explained(world):
    a, b = torch.randn(2048, 256), torch.randn(256, 256)
    for dim, words in ((0, "ranks: direct"), (1, "transposed product")):
        assert words in weft.explain(a, b, operator="matmul_reduce_scatter", dim=dim)
    assert "ranks: sequential" in weft.explain(a[:2], b, operator="matmul_reduce_scatter")
    assert "direct" in weft.explain(a, [b, weft.pack(b)])
    with pytest.raises(ValueError, match="a list of 2 weights"):
        weft.explain(a, [b, b], operator="matmul_reduce_scatter")
    assert "as asked for" in weft.explain(
        a, weft.pack(b), operator="matmul_reduce_scatter", algorithm="ring"
    )


def test_explain():
    on_ranks(explained, 2)


def bad_arguments(world):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    bad = [
        (
            ValueError,
            "5 rows do not divide evenly over 2 ranks: give shard_rows",
            (torch.randn(5, 6), b),
        ),
        (ValueError, "5 rows do not divide evenly over 2 ranks", (a, b), {"dim": 1}),
        (
            ValueError,
            r"2 counts, none negative, of 4 in all; got \[4, 4\]",
            (a, b),
            {"shard_rows": [4, 4]},
        ),
        (ValueError, "2 counts, none negative", (a, b), {"shard_rows": [5, -1]}),
        (ValueError, "op must be sum or avg; got 'max'", (a, b), {"op": "max"}),
        (ValueError, "there is no dimension -3", (a, b), {"dim": -3}),
        (ValueError, "a has 6 columns and b 5 rows", (a, b.t())),
        (TypeError, "b must be a tensor; got list", (a, [b])),
        (ValueError, "at least 2 dimensions", (a[0], b)),
        (TypeError, "a has dtype int64", (a.long(), b)),
        (ValueError, r"bias must have shape \(5,\)", (a, b), {"bias": torch.ones(6)}),
        (ValueError, "there is no algorithm 'pull'", (a, b), {"algorithm": "pull"}),
        (ValueError, "chunk_rows must be at least 1", (a, b), {"chunk_rows": 0}),
        (ValueError, "there is no order 'up'; choose peer or interleaved", (a, b), {"order": "up"}),
        (ValueError, "use algorithm='push', or omit order", (a, b), {"order": "peer"}),
        (ValueError, r"out must have shape \(2, 5\)", (a, b), {"out": torch.empty(4, 5)}),
        (TypeError, "out_dtype must be float32", (a, b), {"out_dtype": torch.float16}),
        (ValueError, "timeout must be a positive", (a, b), {"timeout": 0}),
    ]
    for kind, message, arguments, *options in bad:
        with pytest.raises(kind, match=message):
            weft.matmul_reduce_scatter(*arguments, **(options[0] if options else {}))
    both = torch.empty(100)
    with pytest.raises(ValueError, match="out must not overlap an input"):
        weft.matmul_reduce_scatter(both[:24].view(4, 6), b, out=both[20:30].view(2, 5))
    # the world stays usable
    assert_sum(weft.matmul_reduce_scatter(a, b), a, b, lambda x: x[2 * world.rank :][:2])


def test_bad_arguments_are_refused_before_anything_is_sent():
    on_ranks(bad_arguments, 2)


def test_ranks_must_pass_equal_options():
    on_ranks(different_calls, 2)
