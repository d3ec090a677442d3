"""Checks of all_gather_matmul against float64 on one process."""

from __future__ import annotations

import itertools

import pytest
import torch

import weft
from support.products import DTYPES, assert_product
from support.ranks import another_world, everyones
from weft.schedules.all_gather_matmul import ALGORITHMS


def gathered(tensor):
    """All ranks' rows, gathered by torch."""
    return torch.cat(everyones(tensor))


def every_algorithm(world, rows, k, n, symmetric, dtypes=DTYPES):
    own = rows[world.rank]
    for dtype in dtypes:
        a = (
            world.empty(max(rows), k, dtype=dtype)[:own]
            if symmetric
            else torch.empty(own, k, dtype=dtype)
        )
        b = torch.randn(k, n).to(dtype)
        for algorithm, chunk in itertools.product(ALGORITHMS, (None, 3)):
            a.copy_(torch.randn(own, k))
            whole = gathered(a)
            y, g = weft.all_gather_matmul(
                a, b, shard_rows=rows, algorithm=algorithm, chunk_rows=chunk, return_gathered=True
            )
            assert torch.equal(g, whole)
            assert_product(y, whole, b)
            out = torch.full_like(y, torch.nan)
            again = weft.all_gather_matmul(
                a, weft.pack(b), shard_rows=rows, algorithm=algorithm, chunk_rows=chunk, out=out
            )
            assert again is out
            assert_product(out, whole, b)


def shapes_and_options(world):
    a3 = torch.randn(4, 3, 10)
    whole = gathered(a3)
    b = torch.randn(6, 10).t()
    bias = torch.randn(6)
    for algorithm in ALGORITHMS:
        y, g = weft.all_gather_matmul(a3, b, bias=bias, algorithm=algorithm, return_gathered=True)
        assert y.shape == (4 * world.ranks, 3, 6)
        assert torch.equal(g, whole)
        assert_product(y.view(-1, 6), whole.view(-1, 10), b, bias)
    for dtype in (torch.float16, torch.bfloat16):
        half, weight = a3.to(dtype), b.to(dtype)
        y = weft.all_gather_matmul(half, weight, bias=bias.to(dtype), out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_product(y.view(-1, 6), gathered(half).view(-1, 10), weight, bias.to(dtype))
    strided = torch.randn(10, 8)[:, ::2].t()  # no row is contiguous
    assert_product(weft.all_gather_matmul(strided, b), gathered(strided.contiguous()), b)
    padded = torch.randn(4, 16)[:, :10]  # rows with gaps
    for algorithm in ALGORITHMS:
        assert_product(
            weft.all_gather_matmul(padded, b, algorithm=algorithm), gathered(padded.contiguous()), b
        )
    column = torch.randn(world.rank + 2, 1)[:, :1]
    uneven = weft.all_gather_matmul(column, torch.randn(1, 1 + world.rank), shard_rows=[2, 3])
    assert uneven.shape == (5, 1 + world.rank), "each rank has a weight of its own width"


def every_dimension(world):
    """Three-dimensional inputs of uneven sizes, gathered along each dimension, by several weights
    at once.
    """
    for dim, algorithm in itertools.product((0, 1, 2, -1), (*ALGORITHMS, "auto")):
        sizes = [2 + rank for rank in range(world.ranks)]
        shape = [3, 4, 5]
        shape[dim] = sizes[world.rank]
        a = torch.randn(*shape)
        whole = torch.cat(everyones(a), dim)
        k = whole.shape[-1]
        b, c = torch.randn(k, 6), weft.pack(torch.randn(7 + world.rank, k).t())
        bias = torch.randn(6)
        options = {"dim": dim, "algorithm": algorithm, "shard_rows": sizes}
        (y, z), g = weft.all_gather_matmul(
            a, [b, c], bias=[bias, None], return_gathered=True, **options
        )
        assert torch.equal(g, whole)
        assert all(tensor.is_contiguous() for tensor in (g, y, z))
        flat = whole.reshape(-1, k)
        assert_product(y.reshape(-1, 6), flat, b, bias)
        assert_product(z.reshape(-1, 7 + world.rank), flat, c.plain)
        out = torch.full_like(y, torch.nan)
        assert weft.all_gather_matmul(a, b, bias=bias, out=out, **options) is out
        assert torch.equal(out, y)
        (one,) = weft.all_gather_matmul(a, [b], out=[out.fill_(torch.nan)], **options)
        assert one is out
        assert_product(out.reshape(-1, 6), flat, b)


def back_to_back(world, algorithm, symmetric):
    """Hundreds of calls without a barrier, with different sizes in between; every element of every
    result is checked.
    """
    generator = torch.Generator().manual_seed(5)
    b = torch.randint(0, 2, (16, 8), generator=generator).float()
    shapes = [(6, 16), (1, 16), (33, 16)]
    inputs = [world.empty(*shape) if symmetric else torch.empty(*shape) for shape in shapes]
    for call in range(150):
        everyone = [
            torch.randint(0, 2, shapes[call % 3], generator=generator).float()
            for _ in range(world.ranks)
        ]
        a = inputs[call % 3]
        a.copy_(everyone[world.rank])
        y = weft.all_gather_matmul(
            a,
            b,
            algorithm=ALGORITHMS[call % len(ALGORITHMS)] if algorithm == "mixed" else algorithm,
        )
        assert torch.equal(y, torch.cat(everyone) @ b), f"call {call}"


def bad_arguments(world):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    other = another_world(world)
    foreign = other.empty(4, 6)
    bad = [
        (ValueError, "a has 6 columns and b 5 rows", (a, b.t())),
        (ValueError, "b must be a matrix", (a, b[0])),
        (ValueError, "at least 2 dimensions", (a[0], b)),
        (TypeError, "a must be a tensor; got list", ([[1.0]], b)),
        (TypeError, "a has dtype int64; supported are float16", (a.long(), b)),
        (TypeError, "a is float64 and b float32", (a.double(), b)),
        (ValueError, "a is on meta", (a.to("meta"), b)),
        (ValueError, "symmetric in another world", (foreign, b)),
        (ValueError, r"bias must have shape \(5,\); got \(6,\)", (a, b), {"bias": torch.ones(6)}),
        (
            ValueError,
            "there is no algorithm 'magic'; choose auto or one of direct",
            (a, b),
            {"algorithm": "magic"},
        ),
        (ValueError, "chunk_rows must be at least 1; got 0", (a, b), {"chunk_rows": 0}),
        (ValueError, "shard_rows must be 2 counts", (a, b), {"shard_rows": [4]}),
        (
            ValueError,
            "shard_rows must be 2 counts, one per rank, none negative",
            (a, b),
            {"shard_rows": [4, -4]},
        ),
        (
            ValueError,
            r"shard_rows gives rank \d 9 rows, but its input has 4",
            (a, b),
            {"shard_rows": [9, 9]},
        ),
        (
            ValueError,
            r"out must have shape \(8, 5\); got \(7, 5\)",
            (a, b),
            {"out": torch.empty(7, 5)},
        ),
        (
            TypeError,
            "out must have dtype float32; got float64",
            (a, b),
            {"out": torch.empty(8, 5).double()},
        ),
        (ValueError, "out must be contiguous", (a, b), {"out": torch.empty(5, 8).t()}),
        (TypeError, "out_dtype must be float32", (a, b), {"out_dtype": torch.float16}),
        (ValueError, "timeout must be a positive", (a, b), {"timeout": -1}),
        (ValueError, "a has 2 dimensions; there is no dimension 2", (a, b), {"dim": 2}),
        (ValueError, "a has 12 columns and b 6 rows", (a, b), {"dim": 1}),
        (ValueError, "b is an empty list", (a, [])),
        (ValueError, "so bias must be a list of 2 too", (a, [b, b]), {"bias": torch.ones(5)}),
        (ValueError, "so out must be a list of 2 too", (a, [b, b]), {"out": [torch.ones(5)]}),
    ]
    for kind, message, arguments, *options in bad:
        with pytest.raises(kind, match=message):
            weft.all_gather_matmul(*arguments, **(options[0] if options else {}))
    both = torch.empty(100)
    with pytest.raises(ValueError, match="out must not overlap an input"):
        weft.all_gather_matmul(both[:24].view(4, 6), b, out=both[20:60].view(8, 5))
    weight = torch.randn(6, 5)
    packed = weft.pack(weight)
    weight.add_(1)
    with pytest.raises(ValueError, match="changed after it was packed"):
        weft.all_gather_matmul(a, packed)
    with pytest.raises(ValueError, match="a weight to pack"):
        weft.pack(torch.ones(3))
    other.close()
    with pytest.raises(weft.WeftError, match="closed"):
        weft.all_gather_matmul(a, b, world=other)
    # nothing was sent: the world stays usable
    assert_product(weft.all_gather_matmul(a, b), gathered(a), b)
