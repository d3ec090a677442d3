"""Fused operators of few rows, as in decoding: repeated calls, compared with their parts, and calls
whose number of rows no call had before.

``python benchmarks/few_rows.py [ROUNDS]``, by default 200: two ranks of one thread each, float32,
packed weights. Repeated calls alternate in every round; times are rank 0's, in microseconds, the
median and the best.
"""

import random
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

import weft

Call = Callable[[], object]
Operator = Callable[[int], Call]
CALLS = 20  # of a kind in a round
SETTLED = 200  # calls after which `auto` has chosen
MOST_ROWS = 64
REPEATS = 5  # of a call whose number of rows was new


def operators(world: weft.World, width: int) -> dict[str, Operator]:
    """The calls of each operator with a number of rows per rank and a weight of (width, width)."""
    weight = weft.pack(torch.randn(width, width))

    def gather(rows: int) -> Call:
        a = torch.randn(rows, width)
        return lambda: weft.all_gather_matmul(a, weight)

    def scatter(rows: int) -> Call:
        a = torch.randn(world.ranks * rows, width)
        return lambda: weft.matmul_reduce_scatter(a, weight)

    def reduce(rows: int) -> Call:
        a = torch.randn(rows, width)
        return lambda: weft.matmul_all_reduce(a, weight)

    return {
        "all_gather_matmul": gather,
        "matmul_reduce_scatter": scatter,
        "matmul_all_reduce": reduce,
    }


def seconds(call: Call, calls: int) -> float:
    """The time of a call, of several from a barrier on."""
    weft.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def repeated(world: weft.World, rounds: int) -> list[str]:
    """The lines on one row of 256 columns of each rank, and on what a call is made of."""
    a = torch.randn(1, 256)
    weight = torch.randn(256, 256)
    number = torch.ones(2)
    calls: dict[str, Call] = {
        "torch.mm": lambda: torch.mm(a, weight),
        "barrier": weft.barrier,
        "all_reduce of 8 bytes": lambda: weft.all_reduce(number, out=number),
        **{name: operator(1) for name, operator in operators(world, 256).items()},
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        seconds(call, SETTLED)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, CALLS))
    return [
        f"{name:24s} {1e6 * median(each):8.1f} {1e6 * min(each):8.1f}"
        for name, each in times.items()
    ]


def first_calls(world: weft.World) -> list[str]:
    """The lines on first and repeated calls of odd numbers of rows, in a random order. Even ones
    come before, so that `auto` has chosen.
    """
    lines = []
    for name, operator in operators(world, 512).items():
        for rows in range(2, MOST_ROWS, 2):
            seconds(operator(rows), 10)
        first, again = [], []
        for rows in random.Random(0).sample(range(1, MOST_ROWS, 2), MOST_ROWS // 2):
            call = operator(rows)
            first.append(seconds(call, 1))
            again.append(median(seconds(call, 1) for _ in range(REPEATS)))
        figures = (median(first), min(first), median(again), min(again))
        lines.append(f"{name:24s}" + "".join(f" {1e6 * each:8.1f}" for each in figures))
    return lines


def measure(rounds: int) -> list[str]:
    """The lines of both tables."""
    with weft.init() as world:
        return [
            "one row of 256 columns      median  at best",
            *repeated(world, rounds),
            "new numbers of rows          first  at best    again  at best",
            *first_calls(world),
        ]


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(*weft.launch(measure, 2, rounds, threads=1)[0], sep="\n")
