"""The operators that exchange rows with the experts of other ranks, which have as many, others or
none: products of all kinds of weights, there and back, against each expert alone.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.exchanges import DIVISIONS, inputs, matrix, of_rank, taken, weights
from support.ranks import on_ranks, reference_world, stream_world

import weft

ALGORITHMS = ("auto", "push", "by_expert", "sequential")
SIZES = [sizes for of in DIVISIONS.values() for sizes in of]


def numbers_of(sizes):
    """The argument that tells the numbers of experts, where it is needed."""
    return None if len({*sizes}) == 1 else sizes


def own_of(every, sizes, rank):
    """A rank's own of something that each expert has, or one to show its shape."""
    return [every[expert] for expert in of_rank(sizes, rank)] or every[:1]


def there_and_back(world, sizes, hosts=None):
    """Calls with other sizes each, whose receivers are not told."""
    rank = world.rank
    every = weights(sum(sizes), 1)
    b, bias = zip(*own_of(every, sizes, rank), strict=True)
    experts = of_rank(sizes, rank)
    for seed, algorithm in product(range(4), ALGORITHMS):
        counts = matrix(world.ranks, sum(sizes), seed)
        rows = inputs(counts, 6, seed)
        options = {"bias": [*bias], "algorithm": algorithm, "chunk_rows": 7}
        options["experts_of_ranks"] = numbers_of(sizes)
        made, parts = weft.all_to_all_matmul(
            rows[rank], [*b], input_split_sizes=counts[rank], return_split_sizes=True, **options
        )
        assert parts == [row[expert] for expert in experts for row in counts]
        own = taken(rows, counts, experts)
        wanted = [x @ w + v for x, w, v in zip(own, b, bias, strict=len(own) > 0)]
        torch.testing.assert_close(made, torch.cat([made[:0], *wanted]))
        back = weft.matmul_all_to_all(
            torch.cat([rows[rank][:0], *own]),
            [*b],
            input_split_sizes=parts,
            output_split_sizes=counts[rank],
            **options,
        )
        torch.testing.assert_close(back, alone(rows[rank], counts[rank], every))
    return True


def visits(world, sizes, hosts=None):
    """Rows that are multiplied where the weights are, in other numbers each time."""
    rank = world.rank
    every = weights(sum(sizes), 1)
    b, bias = zip(*own_of(every, sizes, rank), strict=True)
    for seed, algorithm in product(range(4), ("auto", "push", "sequential")):
        counts = matrix(world.ranks, sum(sizes), seed)
        mine = inputs(counts, 6, seed)[rank]
        found = weft.all_to_all_matmul_all_to_all(
            mine,
            [*b],
            bias=[*bias],
            input_split_sizes=counts[rank],
            experts_of_ranks=numbers_of(sizes),
            algorithm=algorithm,
            chunk_rows=7,
        )
        torch.testing.assert_close(found, alone(mine, counts[rank], every))
    return True


def alone(rows, counts, every):
    """Each part of rows times the weight of its expert."""
    parts = zip(rows.split(counts), every, strict=True)
    return torch.cat([x @ w + v for x, (w, v) in parts])


both = pytest.mark.parametrize("calls", [there_and_back, visits])


@pytest.mark.data
@both
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_experts(calls, sizes):
    on_ranks(calls, len(sizes), sizes)


@pytest.mark.data
@both
@pytest.mark.parametrize("context", [stream_world, reference_world])
def test_in_other_engines(calls, context):
    for sizes in ((2, 2), (0, 2)):
        on_ranks(calls, 2, sizes, context=context)


@pytest.mark.data
@both
@pytest.mark.parametrize(
    ("hosts", "sizes"), [([0, 0, 1], (2, 2, 2)), ([0, 0, 1, 1], (0, 2, 1, 0))], ids=str
)
def test_between_hosts(calls, hosts, sizes):
    with weft.local_world(len(hosts), hosts=hosts, timeout=20) as local:
        assert local.run(lambda: calls(weft.init(), sizes)) == [True] * len(hosts)


def kinds_of_weights(world, sizes):
    """Packed, quantised and any function: a rank without experts passes one of the same kind."""
    rank = world.rank

    def function(b):
        return weft.weight(
            lambda x, out: torch.matmul(x, b, out=out), b.shape, b.dtype, rows_multiple=4
        )

    for kind, (make, tolerance) in {
        "packed": (weft.pack, 1e-5),
        "int8": (weft.quantize, 3e-2),
        "a function": (function, 1e-5),
    }.items():
        every = [b.float() for b, _ in weights(sum(sizes), 2, 32, 16)]
        b = [*map(make, own_of(every, sizes, rank))]
        for seed, algorithm in product(range(3), ("push", "sequential")):
            counts = matrix(world.ranks, sum(sizes), seed)
            rows = [a.float() for a in inputs(counts, 32, seed)]
            options = {"experts_of_ranks": sizes, "algorithm": algorithm, "chunk_rows": 8}
            experts = of_rank(sizes, rank)
            own = taken(rows, counts, experts)
            parts = [row[expert] for expert in experts for row in counts]
            products = [x @ every[e] for x, e in zip(own, experts, strict=True)]
            there = torch.cat([torch.empty(0, 16), *products])
            each = zip(rows[rank].split(counts[rank]), every, strict=True)
            here = torch.cat([x @ w for x, w in each])
            came = torch.cat([torch.empty(0, 32), *own])
            found = [
                weft.all_to_all_matmul(rows[rank], b, input_split_sizes=counts[rank], **options),
                weft.matmul_all_to_all(came, b, input_split_sizes=parts, **options),
                weft.all_to_all_matmul_all_to_all(
                    rows[rank], b, input_split_sizes=counts[rank], **options
                ),
            ]
            for one, wanted in zip(found, (there, here, here), strict=True):
                scale = 1e-6 + max(
                    (w.abs().max().item() for w in (wanted,) if w.numel()), default=0
                )
                assert one.shape == wanted.shape, kind
                torch.testing.assert_close(one, wanted, rtol=0, atol=tolerance * scale)


@pytest.mark.data
def test_all_kinds_of_weights():
    on_ranks(kinds_of_weights, 3, (2, 0, 1))


def equal_parts(world):
    """Without sizes each expert gets as many rows of each rank; results have memory and dtype as
    asked for, and calls are repeated.
    """
    rank, sizes = world.rank, [1, 2]
    every = [b.bfloat16() for b, _ in weights(3, 3)]
    b = own_of(every, sizes, rank)
    rows = [torch.arange(36.0).view(6, 6).bfloat16() + at for at in range(2)]
    own = [torch.cat([a[2 * e : 2 * e + 2] for a in rows]) for e in of_rank(sizes, rank)]
    wanted = torch.cat([x.float() @ w.float() for x, w in zip(own, b, strict=True)])
    out = torch.empty(len(wanted), 5)
    for algorithm in ALGORITHMS:
        for _ in range(3):
            made, parts = weft.all_to_all_matmul(
                rows[rank],
                b,
                experts_of_ranks=sizes,
                out=out,
                out_dtype=torch.float32,
                algorithm=algorithm,
                return_split_sizes=True,
            )
            assert made is out
            torch.testing.assert_close(made, wanted)
            assert parts == [2] * (2 * sizes[rank])
            back = weft.matmul_all_to_all(
                torch.cat(own), b, experts_of_ranks=sizes, algorithm=algorithm
            )
            each = zip(rows[rank].split(2), every, strict=True)
            torch.testing.assert_close(back, torch.cat([x @ w for x, w in each]))
    text = weft.explain(rows[rank], b, operator="all_to_all_matmul", experts_of_ranks=sizes)
    assert text.startswith("all_to_all_matmul over 2 ranks: sequential, at most 2 rows")


@pytest.mark.data
def test_equal_parts_for_others_numbers_of_experts():
    on_ranks(equal_parts, 2)


def wrong(world):
    """Every rank raises an error that tells what to do, and the world continues."""
    a, b = torch.ones(4, 2), torch.ones(2, 3)
    rank = world.rank
    for numbers, message in {
        (1,): "must be 2 numbers",
        (3, -1): "none negative",
        (2, 2): f"gives rank {rank} 2 weights, but b has 1",
        (0, 0): "some rank must have one",
    }.items():
        for operator in (
            weft.all_to_all_matmul,
            weft.matmul_all_to_all,
            weft.all_to_all_matmul_all_to_all,
        ):
            for sizes in (None, [4]):
                with pytest.raises(ValueError, match=message):
                    operator(a, b, input_split_sizes=sizes, experts_of_ranks=numbers)
    with pytest.raises(ValueError, match="or, on a rank without experts, one"):
        weft.all_to_all_matmul(a, [], input_split_sizes=[4], experts_of_ranks=[rank, 1 - rank])
    options = {"input_split_sizes": [[4], [0]][rank], "experts_of_ranks": [1, 0]}
    for sizes in ([4, 0], []):
        with pytest.raises(ValueError, match=r"must be 1 sizes and output_split_sizes \d"):
            weft.all_to_all_matmul(a, b, **options | {"output_split_sizes": [*sizes, 1]})
    with pytest.raises(ValueError, match="rank 1 sends rank 0 4 rows, but rank 0 expects 5 rows"):
        weft.all_to_all_matmul(
            a,
            b,
            input_split_sizes=[4],
            output_split_sizes=[4, 5] if rank == 0 else [],
            experts_of_ranks=[1, 0],
        )
    assert weft.all_reduce(torch.ones(1)).item() == 2


def test_bad_numbers_of_experts():
    on_ranks(wrong, 2)


def different(world, sizes):
    """Ranks that do not agree on the numbers: an error before a row is sent."""
    numbers = ((2, 2, 1), (2, 1, 2))[world.rank != 0]
    b = [torch.ones(2, 3)] * numbers[world.rank]
    counts = [1] * 5 if sizes else None
    a = torch.ones(5, 2)
    with pytest.raises(weft.MismatchError) as caught:
        weft.all_to_all_matmul(a, b, input_split_sizes=counts, experts_of_ranks=numbers)
    if sizes:
        assert "rank 0: sizes of all_to_all_matmul(experts_of_ranks=[2, 2, 1])" in str(caught.value)
        assert "(experts_of_ranks=[2, 1, 2])" in str(caught.value)
        assert "pass the number of weights of each rank as experts_of_ranks=" in str(caught.value)


@pytest.mark.parametrize("sizes", [True, False])
def test_ranks_that_do_not_agree(sizes):
    on_ranks(different, 3, sizes)


def one_knows(world):
    """A rank that does not tell other numbers than its own."""
    b = [torch.ones(2, 3)] * (2 - world.rank)
    sizes = [2 // len(b)] * 2 * len(b)
    with pytest.raises(weft.MismatchError, match=r"pass the number .* as experts_of_ranks="):
        weft.all_to_all_matmul(torch.ones(4, 2), b, input_split_sizes=sizes)


def test_numbers_that_are_not_told():
    on_ranks(one_knows, 2)
