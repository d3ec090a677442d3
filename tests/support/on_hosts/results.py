"""Results of operators on several hosts, against a single process, and refusals."""

from __future__ import annotations

import pytest
import torch

import weft
from support import mixture, random_calls, sums
from weft.plan.binding import split
from weft.schedules.peers import one_rank_per_host


def whole(rank, *shape, call=0):
    """Small integers, different for each rank and call, whose products and sums floats represent
    exactly.
    """
    return torch.randint(
        -8, 8, shape, generator=torch.Generator().manual_seed(1000 * call + rank)
    ).float()


def many_shapes(world):
    """Calls of more shapes than peers remember the texts of."""
    for n in range(1, 401):
        total = weft.all_reduce(torch.full((n,), float(world.rank)))
        assert torch.equal(total, torch.full((n,), float(sum(range(world.ranks)))))


def operators(world):
    """Every operator and collective with every algorithm, on new data each time, equals the
    single-process result.
    """
    ranks = range(world.ranks)
    shards = [5 + 7 * rank for rank in ranks]
    total, k, n = 96, 6, 5
    for call in range(3):
        b = whole(world.rank, k, n, call=call + 50)
        weights = [whole(r, k, n, call=call + 50) for r in ranks]
        pieces = [whole(r, shards[r], k, call=call) for r in ranks]
        gathered = torch.cat(pieces)
        for algorithm in ("auto", "push", "ring", "sequential"):
            out, kept = weft.all_gather_matmul(
                pieces[world.rank],
                b,
                shard_rows=shards,
                algorithm=algorithm,
                chunk_rows=3,
                return_gathered=True,
            )
            assert torch.equal(out, gathered @ b), algorithm
            assert torch.equal(kept, gathered), algorithm
        whole_a = [whole(r, total, k, call=call + 9) for r in ranks]
        products = [whole_a[r] @ weights[r] for r in ranks]
        summed, own = (
            sum(products),
            slice(world.rank * total // world.ranks, (world.rank + 1) * total // world.ranks),
        )
        for algorithm in ("auto", "push", "ring", "sequential"):
            y = weft.matmul_reduce_scatter(whole_a[world.rank], b, algorithm=algorithm)
            assert torch.equal(y, summed[own]), algorithm
        for algorithm in ("auto", "two_shot", "ring", "sequential"):
            assert torch.equal(
                weft.matmul_all_reduce(whole_a[world.rank], b, algorithm=algorithm), summed
            ), algorithm
        for algorithm in ("auto", "push", "ring"):
            got = weft.all_gather(
                pieces[world.rank], shard_rows=shards, algorithm=algorithm, chunk_rows=4
            )
            assert torch.equal(got, gathered), algorithm
        into = torch.empty(total // world.ranks, n)
        for algorithm in ("push", "ring"):
            assert torch.equal(
                weft.reduce_scatter(products[world.rank], out=into, algorithm=algorithm),
                summed[own],
            )
        for algorithm in ("auto", "two_shot", "ring"):
            for rows in (total, 1):
                got = weft.all_reduce(products[world.rank][:rows].contiguous(), algorithm=algorithm)
                assert torch.equal(got, summed[:rows]), algorithm
        same = products[world.rank].clone()
        assert torch.equal(
            weft.all_reduce(same, out=same, op="max"), torch.stack(products).max(0).values
        )
        for source in ranks:
            sent = (
                products[source].clone()
                if world.rank == source
                else torch.full((total, n), torch.nan)
            )
            assert torch.equal(
                weft.broadcast(sent, source, algorithm=("auto", "ring")[call % 2]), products[source]
            )
        # through eager buffers, if ranks share a host, and through the workspace
        for repeats in (
            1,
            40,
        ):
            inputs = [product.repeat(1, repeats) for product in products]
            taken = torch.cat([inputs[r].chunk(world.ranks)[world.rank] for r in ranks])
            there, back = torch.empty_like(taken), torch.empty_like(taken)
            handles = [
                weft.all_to_all_async(inputs[world.rank], out=there),
                weft.all_to_all_async(there, out=back),
            ]
            assert torch.equal(handles[0].wait(), taken)
            assert torch.equal(handles[1].wait(), inputs[world.rank])
            sizes = [[(r + p) % 3 * 4 for p in ranks] for r in ranks]
            shares = [inputs[r][: sum(sizes[r])].split(sizes[r]) for r in ranks]
            received = [shares[r][world.rank] for r in ranks]
            options = {
                "input_split_sizes": sizes[world.rank],
                "output_split_sizes": [*map(len, received)],
            }
            assert torch.equal(
                weft.all_to_all(torch.cat(shares[world.rank]), **options), torch.cat(received)
            )
        handles = [
            weft.all_gather_async(pieces[world.rank], shard_rows=shards),
            weft.all_reduce_async(products[world.rank]),
        ]
        assert torch.equal(handles[1].wait(), summed)
        assert torch.equal(handles[0].wait(), gathered)
        weft.barrier()
    noise = torch.randn(64, 32, generator=torch.Generator().manual_seed(world.rank))
    once, again = (
        weft.matmul_all_reduce(
            noise, torch.randn(32, 8, generator=torch.Generator().manual_seed(7))
        )
        for _ in range(2)
    )
    assert torch.equal(once, again)  # equal bits in every run, and on every rank
    everyone = weft.all_gather(once.view(1, -1))
    assert all(torch.equal(everyone[0], theirs) for theirs in everyone)
    wide = torch.randn(40, 64)[:, ::2][:, :6]  # rows that are not contiguous
    assert torch.equal(weft.all_gather(wide, algorithm="push")[world.rank * 40 :][:40], wide)
    symmetric = world.empty(8, 4)
    symmetric.fill_(world.rank)
    assert torch.equal(
        weft.all_gather(symmetric)[:, 0], torch.arange(world.ranks).repeat_interleave(8).float()
    )


def calls_at_random(world):
    """Calls of all kinds, consecutive and concurrent, with checked results."""
    random_calls.check(world, seed=2, number=300)


def experts_of_hosts(world):
    """Layers of experts for the tokens of each rank, by every algorithm."""
    sizes = [(0, 3, 2)[(rank + 1) % 3] for rank in range(world.ranks)]
    for seed in range(12):
        tokens, dtype = (0, 3, 60)[seed % 3], (torch.float32, torch.bfloat16)[seed % 2]
        layer = mixture.random(tokens, 33, 20, sum(sizes), 2, dtype, seed)
        mixture.check_algorithms(world, layer, sizes)


def sums_to_the_bit(world):
    """Random sums of every dtype have the promised bits, by every algorithm; products are of one
    column and one row, so exact.
    """
    ranks, rows, columns = range(world.ranks), 61, 24
    kept = split(rows, world.ranks)
    for dtype, out_dtype in sums.FUSED:
        a = [sums.numbers(rank, rows, 1, dtype=dtype) for rank in ranks]
        b = [sums.numbers(rank + 50, 1, columns, dtype=dtype) for rank in ranks]
        products = [sums.products(*pair, out_dtype) for pair in zip(a, b, strict=True)]
        wanted = sums.blocks(sums.once, products, world.hosts, kept, out_dtype)
        mine, options = (a[world.rank], b[world.rank]), {"out_dtype": out_dtype, "chunk_rows": 5}
        for algorithm in ("auto", "push", "ring", "sequential"):
            y = weft.matmul_reduce_scatter(*mine, shard_rows=kept, algorithm=algorithm, **options)
            assert torch.equal(y, wanted[world.rank]), (algorithm, dtype, out_dtype)
        for algorithm in ("auto", "two_shot", "ring", "sequential"):
            y = weft.matmul_all_reduce(*mine, algorithm=algorithm, **options)
            assert torch.equal(y, torch.cat(wanted)), (algorithm, dtype, out_dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = [sums.numbers(rank, rows, columns, dtype=dtype) for rank in ranks]
        for algorithm, how in (("push", sums.once), ("ring", sums.at_every_host)):
            y = weft.reduce_scatter(parts[world.rank], shard_rows=kept, algorithm=algorithm)
            assert torch.equal(y, sums.blocks(how, parts, world.hosts, kept, dtype)[world.rank]), (
                algorithm,
                dtype,
            )
        parts, kept_each = [part.view(-1) for part in parts], split(rows * columns, world.ranks)
        around = sums.around if one_rank_per_host(world.hosts) else sums.at_every_host
        for algorithm, how in (("two_shot", sums.once), ("ring", around)):
            y = weft.all_reduce(parts[world.rank], algorithm=algorithm)
            assert torch.equal(
                y, torch.cat(sums.blocks(how, parts, world.hosts, kept_each, dtype))
            ), (algorithm, dtype)


def refusals(world):
    """Options that several hosts do not support are refused by name, before anything is sent."""
    a, b = torch.ones(64, 4), torch.ones(4, 4)
    far = next(rank for rank in range(world.ranks) if not world.hosts.here(rank))
    symmetric = world.empty(4)
    for words, call in {
        "direct is not possible in this world": lambda: weft.all_gather_matmul(
            a, b, algorithm="direct"
        ),
        "pull is not possible in this world": lambda: weft.all_gather(a, algorithm="pull"),
        "one_shot is not possible in this world": lambda: weft.matmul_all_reduce(
            a, b, algorithm="one_shot"
        ),
        f"rank {far} is on another host, whose memory": lambda: world.peer(symmetric, far),
        "have a real link": lambda: world.emulate_link(1.0),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert "push" in weft.explain(a, b)
