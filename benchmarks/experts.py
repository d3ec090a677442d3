"""The exchanges of a mixture of experts, with their products: by each algorithm over an emulated
link on which rows take as long as products, and small calls whose senders alone know their sizes.

    weft run -n 2 benchmarks/experts.py

Times are medians of rounds in which all variants take turns; the least are in brackets.
"""

import statistics
import time
from itertools import accumulate, pairwise

import torch

import weft
from weft.kernels.products import multiply
from weft.schedules.exchanges import dispatched

TOKENS, TOP, WIDTH, INNER, EXPERTS = 1024, 2, 512, 1024, 4  # of a rank
ROUNDS, SMALL_ROUNDS, CALLS = 15, 60, 50
ALGORITHMS = "sequential", "push", "by_expert"


def routing(world, kind):
    """The rows of every rank for each expert. Experts that are chosen often are on all ranks."""
    numbers, wide = torch.Generator().manual_seed(5), world.ranks * EXPERTS
    likely = torch.ones(wide) if kind == "uniform" else 1 / torch.arange(1.0, 1 + wide)
    likely = likely.view(EXPERTS, world.ranks).t().flatten()
    return [
        torch.multinomial(likely.expand(TOKENS, wide), TOP, generator=numbers)
        .flatten()
        .bincount(minlength=wide)
        .tolist()
        for _ in range(world.ranks)
    ]


def in_turns(calls, rounds, repeats=1):
    """The milliseconds of each call, one list for each name."""
    times = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            weft.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            weft.barrier()
            if number >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3 / repeats)
    return times


def over_a_link(world, kind):
    """Dispatch and combine over a link on which both take as long as the products of both."""
    counts, rank = routing(world, kind), world.rank
    received = dispatched(counts, EXPERTS)
    sent, own = counts[rank], received[rank]
    a, x, h = (torch.randn(sum(n), k) for n, k in ((sent, WIDTH), (own, WIDTH), (own, INNER)))
    up = [weft.pack(torch.randn(WIDTH, INNER)) for _ in range(EXPERTS)]
    down = [weft.pack(torch.randn(INNER, WIDTH)) for _ in range(EXPERTS)]
    hidden, results = torch.empty(len(h), INNER), torch.empty(len(h), WIDTH)
    ends = [*pairwise([0, *accumulate(own)][:: world.ranks])]

    def products():
        for (start, stop), b in zip(ends, up, strict=True):
            multiply(x[start:stop], b, hidden[start:stop])
        for (start, stop), b in zip(ends, down, strict=True):
            multiply(h[start:stop], b, results[start:stop])

    def both(algorithm):
        weft.all_to_all_matmul(a, up, input_split_sizes=sent, algorithm=algorithm)
        weft.matmul_all_to_all(
            h, down, input_split_sizes=own, output_split_sizes=sent, algorithm=algorithm
        )

    by_rank = torch.tensor(counts).view(world.ranks, world.ranks, EXPERTS).sum(2)
    there = {"input_split_sizes": by_rank[rank].tolist()}
    back = {"input_split_sizes": by_rank[:, rank].tolist()}

    def rows():
        weft.all_to_all(a, **there)
        weft.all_to_all(results, **back)

    products_ms = statistics.median(in_turns({"": products}, ROUNDS)[""])
    others = by_rank - by_rank.diag().diag()
    most = max(others.sum(1)) + max(others.sum(0))  # of a rank, there and back
    products_ms = weft.all_reduce(torch.tensor(products_ms), op="max").item()
    world.emulate_link(most.item() * WIDTH * 32 / products_ms * 1e-6, 0.0)
    calls = {"products": products, "rows": rows}
    calls |= {name: lambda name=name: both(name) for name in ALGORITHMS}
    times = {name: statistics.median(found) for name, found in in_turns(calls, ROUNDS).items()}
    limit = max(times["products"], times["rows"])
    if rank == 0:
        print(f"{kind}: products {times['products']:.1f} ms, rows {times['rows']:.1f} ms")
        for name in ALGORITHMS:
            faster, over = times["sequential"] / times[name], times[name] / limit
            print(f"  {name:<10} {times[name]:7.1f} ms {faster:5.2f}x, {over:.2f} of the limit")


def small(world):
    """A few rows: sizes seen before, and equal parts, which need no sizes."""
    every = range(world.ranks)
    sizes = [[2 + (source + peer) % 3 for peer in every] for source in every]
    sent, b = sizes[world.rank], weft.pack(torch.randn(64, 64))
    a, even = torch.randn(sum(sent), 64), torch.randn(4 * world.ranks, 64)
    calls = {
        "all_to_all": lambda: weft.all_to_all(a, input_split_sizes=sent),
        "all_to_all, equal": lambda: weft.all_to_all(even),
        "all_to_all_matmul": lambda: weft.all_to_all_matmul(a, b, input_split_sizes=sent),
        "all_to_all_matmul, equal": lambda: weft.all_to_all_matmul(even, b),
        "matmul_all_to_all": lambda: weft.matmul_all_to_all(a, b, input_split_sizes=sent),
        "matmul_all_to_all, equal": lambda: weft.matmul_all_to_all(even, b),
    }
    for name, found in in_turns(calls, SMALL_ROUNDS, CALLS).items():
        if world.rank == 0:
            print(f"{name:<25} {1e3 * statistics.median(found):7.1f} us ({1e3 * min(found):.1f})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with weft.init(timeout=60) as made:
        small(made)
        for one in ("uniform", "Zipf"):
            over_a_link(made, one)
