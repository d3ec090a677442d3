"""The fused operator on real ranks, against float64 on one process."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from support.products import DTYPES, assert_product
from support.ranks import everyones, on_ranks

import weft
from weft.ops import auto
from weft.ops.call import Decision
from weft.predict import machine
from weft.schedules.all_gather_matmul import ALGORITHMS
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant


def gathered(tensor):
    """All ranks' rows, by way of torch."""
    return torch.cat(everyones(tensor))


def every_algorithm(world, rows, k, n, symmetric):
    own = rows[world.rank]
    for dtype in DTYPES:
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


@pytest.mark.data
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "rows", [[8, 8], [40, 37], [5, 0, 9], [0, 4, 4], [3, 5, 2, 4], [0, 0, 6, 0]]
)
def test_every_algorithm_and_dtype(rows, symmetric):
    on_ranks(every_algorithm, len(rows), rows, 19, 11, symmetric)


def alone(world):
    every_algorithm(world, [6], 5, 4, False)
    every_algorithm(world, [0], 5, 4, True)


def test_one_rank():
    on_ranks(alone, 1)


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


@pytest.mark.data
def test_shapes_and_options():
    on_ranks(shapes_and_options, 2)


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


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_dimension_and_several_weights(ranks):
    on_ranks(every_dimension, ranks)


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


MOVING = [
    (algorithm, symmetric)
    for algorithm in (*ALGORITHMS, "mixed")
    for symmetric in (False, True)
    if (algorithm, symmetric)
    != ("direct", True)  # which moves nothing: peers' rows are multiplied where they lie
]


@pytest.mark.data
@pytest.mark.parametrize(("algorithm", "symmetric"), MOVING)
def test_calls_back_to_back_without_barriers(algorithm, symmetric):
    on_ranks(back_to_back, 3, algorithm, symmetric)


def test_direct_calls_back_to_back_on_symmetric_inputs():
    on_ranks(back_to_back, 3, "direct", True)


def same_bits(world):
    a, b = torch.randn(50, 300), torch.randn(300, 40)
    whole = gathered(a)
    for algorithm in ALGORITHMS:
        first = weft.all_gather_matmul(a, b, algorithm=algorithm)
        assert_product(first, whole, b)
        for _ in range(20):
            assert torch.equal(weft.all_gather_matmul(a, b, algorithm=algorithm), first)


@pytest.mark.data
def test_same_bits_on_every_run():
    on_ranks(same_bits, 3)


def two_worlds(world):
    other = weft.init(dist.group.WORLD)
    a, b = torch.randn(9, 5), torch.randn(5, 4)
    whole = gathered(a)
    for algorithm in ALGORITHMS * 4:
        assert_product(weft.all_gather_matmul(a, b, algorithm=algorithm, world=other), whole, b)
        assert_product(weft.all_gather_matmul(a, b, algorithm=algorithm), whole, b)
    inside = (
        weft.init(dist.new_group([0, 2], use_local_synchronization=True))
        if world.rank != 1
        else None
    )
    if inside is not None:
        ours = torch.cat([whole[:9], whole[18:]])
        assert_product(weft.all_gather_matmul(a, b, world=inside), ours, b)


@pytest.mark.data
def test_several_worlds_at_once():
    on_ranks(two_worlds, 3)


def repeated_calls_allocate_nothing(world, algorithm):
    a, b, out = (
        torch.randn(512, 512),
        weft.pack(torch.randn(512, 64)),
        torch.empty(512 * world.ranks, 64),
    )
    for _ in range(3):
        weft.all_gather_matmul(a, b, out=out, algorithm=algorithm)
    workspace = weft.engines.engine(world).workspace
    programs = len(weft.engines.engine(world).compiled)
    calls = world.executor.calls
    for _ in range(20):
        weft.all_gather_matmul(a, b, out=out, algorithm=algorithm)
    assert weft.engines.engine(world).workspace is workspace
    assert len(weft.engines.engine(world).compiled) == programs
    assert world.executor.calls == calls + 20
    return 0 if workspace is None else workspace.numel()


def test_workspaces_are_no_larger_than_promised():
    own, everything = 512 * 512 * 4, 2 * 512 * 512 * 4
    for algorithm, limit in {
        "direct": own,
        "pull": own + everything,
        "push": everything,
        "ring": everything,
        "sequential": everything,
    }.items():
        assert max(on_ranks(repeated_calls_allocate_nothing, 2, algorithm)) <= limit


def inputs_and_outputs_are_the_callers_again(world, algorithm):
    """As soon as a call returns its input may be overwritten, though a peer may be late."""
    a, b = world.empty(32, 8), torch.eye(8)
    for call in range(100):
        a.fill_(float(10 * call + world.rank))
        y = weft.all_gather_matmul(a, b, algorithm=algorithm)
        a.fill_(torch.nan)
        assert y[:, 0].tolist() == [
            10.0 * call + rank for rank in range(world.ranks) for _ in range(32)
        ]


@pytest.mark.data
@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_inputs_are_the_callers_again(algorithm):
    on_ranks(inputs_and_outputs_are_the_callers_again, 3, algorithm)


def test_inputs_that_are_read_in_place_are_the_callers_again():
    on_ranks(inputs_and_outputs_are_the_callers_again, 3, "direct")


def emulated(world):
    a, b = torch.randn(16, 4), torch.randn(4, 4)
    world.emulate_link(0.01, 50)
    with pytest.raises(ValueError, match="direct moves no rows"):
        weft.all_gather_matmul(a, b, algorithm="direct")
    assert "ranks: sequential" in weft.explain(a, b)
    said = weft.explain(torch.randn(512, 4), b)
    assert "ranks: push" in said
    assert "direct" not in said
    for algorithm in ("pull", "push", "ring", "sequential"):
        assert_product(weft.all_gather_matmul(a, b, algorithm=algorithm), gathered(a), b)


@pytest.mark.data
def test_an_emulated_link():
    on_ranks(emulated, 2)


def unlike(world):
    """Ranks whose widths differ would choose differently by themselves; rank 0 decides."""
    ways = [Decision(Variant(name), name) for name in ("sequential", "push", "direct")]
    auto.fastest = lambda *_: ways[world.rank]  # in this process, which ends with the rank
    a, b = torch.randn(16, 4), torch.randn(4, 4 + world.rank)
    for _ in range(2):
        assert_product(weft.all_gather_matmul(a, b), gathered(a), b)
    assert [choice.algorithm for choice in world.choices.values()] == ["sequential"]
    assert ("as rank 0 decided" in weft.explain(a, b)) == (world.rank > 0)
    with pytest.raises(
        weft.MismatchError,
        match=r"shapes differ\n  rank \d: all_gather_matmul\(a=\(40, 4\) float32\)\n  rank 2: all_gather_matmul\(a=\(8, 4\) float32\)",
    ):
        weft.all_gather_matmul(torch.randn(8 if world.rank == 2 else 40, 4), b)


@pytest.mark.data
def test_rank_0_chooses_for_all():
    on_ranks(unlike, 3)


def explained(world, directory):
    a, b = torch.randn(1024, 256), torch.randn(256, 256)
    said = weft.explain(a, b)
    assert "ranks: direct" in said
    assert "staged" in said
    assert "predicted" not in said, "this machine is not calibrated"
    os.environ["WEFT_CACHE"] = directory
    machine.remember({**asdict(machine.load("cpu")), "name": "this"})
    auto._calibrated.cache_clear()
    said = weft.explain(a, b)
    assert all(f"ms  {algorithm}, " in said for algorithm in ALGORITHMS)
    assert "ranks: sequential" in weft.explain(a[:2], b)
    assert "as asked for" in weft.explain(a, weft.pack(b), algorithm="ring")
    assert "read in place" in weft.explain(world.empty(1024, 256), b)
    assert "a split of K" in weft.explain(torch.randn(64, 128), b, dim=1)
    with pytest.raises(ValueError, match="there is no operator 'magic'"):
        weft.explain(a, b, operator="magic")
    for operator in OPERATORS:
        explained_as_called(world, operator)


def explained_as_called(world, operator):
    """What is explained before the first call is what the call decides, whatever it is asked for."""
    call, asked, fastest = getattr(weft, operator), [], auto.fastest
    auto.fastest = lambda workload, rule, *_: asked.append(workload) or rule("ring")
    a, b, bias = torch.randn(8, 16), torch.randn(16, 6), torch.randn(6)
    low, scales = torch.float8_e4m3fn, {"scale_a": torch.tensor(1.0), "scale_b": torch.tensor(1.0)}
    half = {"out_dtype": torch.float32, "bias": bias.bfloat16()}
    for given, options in (
        ((a.bfloat16(), b.bfloat16()), half),
        ((a.to(low), b.to(low)), scales),
        ((a, b), {"chunk_rows": 3}),
    ):
        world.choices.clear()
        asked.clear()
        said = weft.explain(*given, operator=operator, **options)
        call(*given, **options)
        assert len(asked) == 1 + (world.rank == 0), "rank 0 decides in the call, too"
        assert len(set(asked)) == 1
        (decided,) = world.choices.values()
        assert f"ranks: {decided.algorithm}, at most " in said
    with pytest.raises(TypeError, match="out_dtype must be float32"):
        weft.explain(a, b, operator=operator, out_dtype=torch.float16)
    auto.fastest = fastest


def test_explain(tmp_path):
    on_ranks(explained, 2, str(tmp_path))


def bad_arguments(world):
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    other = weft.init(dist.group.WORLD)
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
            "out has dtype float64; supported are float32",
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
    assert_product(
        weft.all_gather_matmul(a, b), gathered(a), b
    )  # nothing was sent: the world goes on


def test_bad_arguments_are_refused_before_anything_is_sent():
    on_ranks(bad_arguments, 2)
