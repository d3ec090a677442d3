"""The exchanges of a mixture of experts in small calls, whose senders alone know their sizes, and
in calls of equal parts. `weft bench moe` measures a whole layer.

    weft run -n 2 benchmarks/experts.py

Times are medians of rounds in which all variants take turns; the least are in brackets.
"""

import statistics
import time

import torch

import weft

ROUNDS, CALLS = 60, 50


def in_turns(calls):
    """The milliseconds of each call, one list for each name."""
    times = {name: [] for name in calls}
    for number in range(ROUNDS + 3):
        for name, call in calls.items():
            weft.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            weft.barrier()
            if number >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3 / CALLS)
    return times


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
    for name, found in in_turns(calls).items():
        if world.rank == 0:
            print(f"{name:<25} {1e3 * statistics.median(found):7.1f} us ({1e3 * min(found):.1f})")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with weft.init(timeout=60) as made:
        small(made)
