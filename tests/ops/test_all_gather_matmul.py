"""The fused operator on real ranks, against float64 on one process."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.caches import own_cache
from support.checks.all_gather_matmul import (
    back_to_back,
    bad_arguments,
    every_algorithm,
    every_dimension,
    gathered,
    shapes_and_options,
)
from support.pairs import pairs
from support.products import assert_product
from support.ranks import another_world, beside_gloo, on_ranks

import weft
from weft.engines import engine
from weft.ops import autotune
from weft.ops.call import Selection
from weft.plan import Copy
from weft.schedules.all_gather_matmul import ALGORITHMS
from weft.schedules.operators import OPERATORS
from weft.schedules.workload import Variant

ROWS = ([8, 8], [40, 37], [5, 0, 9], [0, 4, 4], [3, 5, 2, 4], [0, 0, 6, 0])


@pytest.mark.data
@pairs(
    ("rows", "symmetric"),
    ROWS,
    (False, True),
    [*zip(ROWS, (False, True, False, True, True, False), strict=True)],
)
def test_every_algorithm_and_dtype(rows, symmetric):
    on_ranks(every_algorithm, len(rows), rows, 19, 11, symmetric)


def alone(world):
    every_algorithm(world, [6], 5, 4, False)
    every_algorithm(world, [0], 5, 4, True)


def test_one_rank():
    on_ranks(alone, 1)


@pytest.mark.data
def test_shapes_and_options():
    on_ranks(shapes_and_options, 2)


@pytest.mark.data
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_dimension_and_several_weights(ranks):
    on_ranks(every_dimension, ranks)


MOVING = [
    (algorithm, symmetric)
    for algorithm in (*ALGORITHMS, "mixed")
    for symmetric in (False, True)
    if (algorithm, symmetric)
    != ("direct", True)  # moves nothing: peers' rows are multiplied in place
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


def orders(world):
    """A push sends pieces in the order that is asked for, also over columns and in a sum."""
    a, b = torch.randn(8, 16), torch.randn(16, 6)
    for name, dim in (
        ("all_gather_matmul", 0),
        ("all_gather_matmul", 1),
        ("matmul_reduce_scatter", 0),
    ):
        options = {"dim": dim, "algorithm": "push", "chunk_rows": 4 if dim == 0 else 8}
        if name == "matmul_reduce_scatter":
            options |= {"shard_rows": [2, 6, 0], "chunk_rows": 3}
        weight = torch.randn(16 * world.ranks, 6) if dim else b
        call, results = partial(getattr(weft, name), a, weight, **options), []
        for order in (None, "interleaved", "peer"):
            results.append(call(order=order))
            assert torch.equal(call(order=order), results[-1]), "a repeated call"
            plan = [*engine(world).programs.values()][-1].original
            sent = [
                each.dst.rank
                for lane in plan.lanes[0].values()
                for each in lane
                if isinstance(each, Copy) and each.dst.rank != each.src.rank == 0
            ]
            peers = list(dict.fromkeys(sent))
            if order != "peer":
                wanted = peers * 2 if order else [peers[0]] * 2 + [peers[1]] * 2
                assert sent == wanted, (name, dim, order)
        assert all(torch.equal(result, results[0]) for result in results)
    assert "push interleaved" in weft.explain(a, b, algorithm="push", order="interleaved")
    with pytest.raises(ValueError, match="auto has no order 'peer': use algorithm='push'"):
        weft.all_gather_matmul(a, b, order="peer")
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        weft.explain(a, b, operator="matmul_all_reduce", order="peer")


def test_the_order_of_a_push():
    on_ranks(orders, 3)


def two_worlds(world):
    other = another_world(world)
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
    on_ranks(two_worlds, 3, context=beside_gloo)


def repeated_calls_allocate_nothing(world, algorithm):
    a, b, out = (
        torch.randn(512, 512),
        weft.pack(torch.randn(512, 64)),
        torch.empty(512 * world.ranks, 64),
    )
    for _ in range(3):
        weft.all_gather_matmul(a, b, out=out, algorithm=algorithm)
    workspace = weft.engines.engine(world).workspace
    programs = len(weft.engines.engine(world).programs)
    calls = world.executor.calls
    for _ in range(20):
        weft.all_gather_matmul(a, b, out=out, algorithm=algorithm)
    assert weft.engines.engine(world).workspace is workspace
    assert len(weft.engines.engine(world).programs) == programs
    assert world.executor.calls == calls + 20
    return 0 if workspace is None else workspace.numel()


def test_workspaces_stay_within_their_bound():
    own, everything = 512 * 512 * 4, 2 * 512 * 512 * 4
    for algorithm, limit in {
        "direct": own,
        "pull": own + everything,
        "push": everything,
        "ring": everything,
        "sequential": everything,
    }.items():
        assert max(on_ranks(repeated_calls_allocate_nothing, 2, algorithm)) <= limit


def reuses_inputs_and_outputs(world, algorithm):
    """After a call returns its input may be overwritten, although a peer may be late."""
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
def test_inputs_may_be_reused_after_a_call(algorithm):
    on_ranks(reuses_inputs_and_outputs, 3, algorithm)


def test_inputs_read_in_place_may_be_reused_after_a_call():
    on_ranks(reuses_inputs_and_outputs, 3, "direct")


def emulated(world):
    a, b = torch.randn(16, 4), torch.randn(4, 4)
    world.emulate_link(0.01, 50)
    with pytest.raises(ValueError, match="direct moves no rows"):
        weft.all_gather_matmul(a, b, algorithm="direct")
    assert "ranks: sequential" in weft.explain(a, b)
    text = weft.explain(torch.randn(512, 4), b)
    assert "ranks: push" in text
    assert "direct" not in text
    for algorithm in ("pull", "push", "ring", "sequential"):
        assert_product(weft.all_gather_matmul(a, b, algorithm=algorithm), gathered(a), b)


@pytest.mark.data
def test_an_emulated_link():
    on_ranks(emulated, 2)


def different_widths(world):
    """Ranks whose widths select different variants by themselves; rank 0 selects."""
    own = Selection(Variant(("sequential", "push", "direct")[world.rank]), f"rank {world.rank}")
    # patched in this process, which ends with the rank
    autotune._proposed = lambda *_: autotune.Proposal(own, 0.0, [])
    a, b = torch.randn(16, 4), torch.randn(4, 4 + world.rank)
    for _ in range(2):
        assert_product(weft.all_gather_matmul(a, b), gathered(a), b)
    assert [choice.variant.algorithm for choice in engine(world).selections.values()] == [
        "sequential"
    ]
    assert "ranks: sequential, at most 16 rows per transfer: rank 0;" in weft.explain(a, b)
    with pytest.raises(
        weft.MismatchError,
        match=r"shapes differ\n  rank \d: all_gather_matmul\(a=\(40, 4\) float32\), at .*"
        r"\n  rank 2: all_gather_matmul\(a=\(8, 4\) float32\)",
    ):
        weft.all_gather_matmul(torch.randn(8 if world.rank == 2 else 40, 4), b)


@pytest.mark.data
def test_rank_0_selects_for_all():
    on_ranks(different_widths, 3)


def explained(world, directory):
    a, b = torch.randn(1024, 256), torch.randn(256, 256)
    text = weft.explain(a, b)
    assert "ranks: direct" in text
    assert "staged" in text
    own_cache(directory, torch.bfloat16)
    assert "ranks: sequential" in weft.explain(a[:2], b)
    assert "as asked for" in weft.explain(a, weft.pack(b), algorithm="ring")
    assert "read in place" in weft.explain(world.empty(1024, 256), b)
    assert "a split of K" in weft.explain(torch.randn(64, 128), b, dim=1)
    with pytest.raises(ValueError, match="there is no operator 'magic'"):
        weft.explain(a, b, operator="magic")
    for operator in OPERATORS:
        explained_as_called(world, operator)


def explained_as_called(world, operator):
    """An explanation before the first call names the variant of the call, for any options."""
    call, workloads, proposed = getattr(weft, operator), [], autotune._proposed
    accepted, other = inspect.signature(call).parameters, OPERATORS[operator].algorithms[-2]

    def record(call, _):
        workloads.append(call.workload)
        return autotune.Proposal(Selection(call.variant(other), "patched"), 0.0, [])

    autotune._proposed = record
    a, b, bias = torch.randn(8, 16), torch.randn(16, 6), torch.randn(6)
    low, scales = torch.float8_e4m3fn, {"scale_a": torch.tensor(1.0), "scale_b": torch.tensor(1.0)}
    half = {"out_dtype": torch.float32, "bias": bias.bfloat16()}
    for operands, options in (
        ((a.bfloat16(), b.bfloat16()), half),
        ((a.to(low), b.to(low)), scales),
        ((a, b), {"chunk_rows": 3}),
    ):
        if not options.keys() <= accepted.keys():
            continue
        engine(world).selections.clear()
        workloads.clear()
        text = weft.explain(*operands, operator=operator, **options)
        call(*operands, **options)
        assert len(workloads) == 1 + (world.rank == 0), "rank 0 selects in the call, too"
        assert len(set(workloads)) == 1
        (selection,) = engine(world).selections.values()
        assert f"ranks: {selection.variant}, at most " in text
    if "out_dtype" in accepted:
        with pytest.raises(TypeError, match="out_dtype must be float32"):
            weft.explain(a, b, operator=operator, out_dtype=torch.float16)
    autotune._proposed = proposed


def test_explain(tmp_path):
    on_ranks(explained, 2, str(tmp_path))


def test_bad_arguments_are_refused_before_anything_is_sent():
    on_ranks(bad_arguments, 2)
